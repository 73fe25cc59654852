"""The benchmark of mixtures of experts with peers: run, ratios and table."""
