"""What other projects do: their kernels on our pages, their schemes as oracles in PyTorch."""
