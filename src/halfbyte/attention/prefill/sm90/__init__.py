"""Attention of prompts in CUDA C++ for SM90."""
