"""What others do to K and V, as oracles in PyTorch."""
