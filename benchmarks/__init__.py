"""Benchmarks of speed and accuracy, run from the repository's root, and their results as JSON."""
