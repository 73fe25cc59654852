"""Attention beside its peers: cases, the run, the table and the picture of it."""
