"""Orders and paddings of NVFP4 weights that Blackwell's matmuls expect.

The block scales' own order is `swizzle_128x4`. What is padded holds code 0 and scale 0: it adds
nothing to a product, and its rows are cut off the result.
"""

import torch
import torch.nn.functional as F

BLOCK_SIZE = 16
_TILE_ROWS = 32


def pad_weight(
    weight: torch.Tensor, scales: torch.Tensor, row_multiple: int, k_multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros after the last row and after the last k, up to the next multiples.

    Args:
        weight: uint8 `[N, K/2]`.
        scales: float8_e4m3fn `[N, K/16]`, in linear order.
        row_multiple: N is padded to a multiple of this.
        k_multiple: K is padded to a multiple of this; itself a multiple of 16.

    Returns:
        `weight` and `scales` of the padded size; the arguments themselves if they fit already.

    Raises:
        ValueError: a `k_multiple` that would split a block.
    """
    if k_multiple % BLOCK_SIZE:
        raise ValueError(f"k_multiple: expected a multiple of {BLOCK_SIZE}, got {k_multiple}")
    rows = -weight.shape[0] % row_multiple
    k = -(2 * weight.shape[1]) % k_multiple
    if not rows and not k:
        return weight, scales
    raw = F.pad(scales.view(torch.uint8), (0, k // BLOCK_SIZE, 0, rows))
    return F.pad(weight, (0, k // 2, 0, rows)), raw.view(scales.dtype)


def interleave_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Rows in the order of trtllm-gen's weights ("shuffled", for an epilogue tile of 128 rows).

    In every 32 rows, row r moves to 8 * (r % 4) + r // 4: what a thread of the epilogue holds ends
    up in neighbouring columns of the result.

    Args:
        matrix: `[N, ...]`, N % 32 == 0; codes and linear block scales alike.

    Raises:
        ValueError: N is not a multiple of 32.
    """
    return _swap_in_tiles(matrix, 8, 4)


def deinterleave_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave_rows`."""
    return _swap_in_tiles(matrix, 4, 8)


def _swap_in_tiles(matrix: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    if matrix.shape[0] % _TILE_ROWS:
        raise ValueError(f"rows: expected a multiple of {_TILE_ROWS}, got {matrix.shape[0]}")
    tiles = matrix.view(torch.uint8).unflatten(0, (-1, outer, inner))
    return tiles.transpose(1, 2).flatten(0, 2).view(matrix.dtype)
