"""Other projects' kernels on halfbyte's pages, and their schemes as PyTorch oracles."""
