"""Attention straight from packed pages of every format, in Triton."""
