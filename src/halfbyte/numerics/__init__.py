"""Definitions of the number formats in pure PyTorch: the oracle of every kernel.

Imports nothing else of halfbyte. `nvfp4`, `block_fp4` and `fp8` are the formats of caches and
weights, `weighted_rounding` chooses other codes of `nvfp4`; `e2m1`, `e4m3`, `e5m2` and `e8m0` are
the small floats that they are made of.
"""

from halfbyte.numerics import block_fp4, e2m1, e4m3, e5m2, e8m0, fp8, nvfp4, weighted_rounding

__all__ = ["block_fp4", "e2m1", "e4m3", "e5m2", "e8m0", "fp8", "nvfp4", "weighted_rounding"]
