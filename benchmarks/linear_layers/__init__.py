"""The benchmark of NVFP4 linear layers with peers: run, ratios and table."""
