"""Tiles of the W4A16 kernel for many rows, by name, and some that stand for all."""

from halfbyte.linear.w4a16.gemm_sm90.plan import TILES, Tile


def tile_named(name: str) -> Tile:
    """Such as `128x64`: rows of W x rows of x."""
    return next(tile for tile in TILES if str(tile) == name)


DIFFERENT = [tile_named(name) for name in ("128x64", "128x144", "128x256", "192x80", "192x160")]
"""The narrowest and the widest, and such as have 5, 9 or 10 strips for those who share them."""
