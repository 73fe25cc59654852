"""Dialects of NVFP4 checkpoints: one file per dialect reads and writes its declarations.

The KV cache's declaration, which dialects share, is read in `layouts/kv_declarations.py`.
"""
