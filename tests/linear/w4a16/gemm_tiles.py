"""Tiles of the W4A16 GEMM kernel by name, and a representative subset."""

from halfbyte.linear.w4a16.gemm_sm90.plan import TILES, Tile


def tile_named(name: str) -> Tile:
    """A tile by its name, such as `128x64`: rows of W x tokens."""
    return next(tile for tile in TILES if str(tile) == name)


DIFFERENT = [
    tile_named(name)
    for name in ("128x64", "128x144", "128x256", "192x80", "192x160", "64x64", "64x128")
]
"""The smallest and the largest M, tiles with 5, 9 and 10 strips to share, and of one warpgroup."""
