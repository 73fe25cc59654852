"""NVFP4 linear layers beside their peers: the run, its ratios and its table."""
