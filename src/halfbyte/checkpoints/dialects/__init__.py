"""Dialects of NVFP4 checkpoints: each reads and writes its declarations in one file."""
