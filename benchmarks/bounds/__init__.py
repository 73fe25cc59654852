"""Bounds on committed runs, by operation; checked by `benchmarks.check`."""
