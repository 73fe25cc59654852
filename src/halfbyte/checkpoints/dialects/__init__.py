"""Dialects of NVFP4 checkpoints: one file per dialect reads and writes its declarations."""
