"""Orders of block scales in memory that Blackwell's readers expect, and their inverses.

All other readers use the linear order: the scale of token t and block s is at (t, s).
"""

from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F

VScaleLayout = Literal["linear", "sm100"]


@lru_cache(maxsize=64)
def v_scale_position(
    num_tokens: int, num_blocks: int, layout: VScaleLayout, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a page keeps the V scale of each (token, block): `(row, column)`.

    `sm100` is the interleave of the trtllm-gen reader. With S = num_blocks,
    (t, s) -> (4 * (t // 4) + s // (S / 4), 4 * (s % (S / 4)) + t % 4): groups of four tokens, in
    which the four tokens' scales of one block lie side by side.

    Args:
        num_tokens: tokens per page (a multiple of 4 for `sm100`).
        num_blocks: scales per head and token (a multiple of 4 for `sm100`).
        layout: `linear` or `sm100`.
        device: of the result.

    Returns:
        Two int64 tensors `[num_tokens, num_blocks]`.

    Raises:
        ValueError: a size that `sm100` cannot interleave.
    """
    t = torch.arange(num_tokens, device=device)[:, None]
    s = torch.arange(num_blocks, device=device)[None, :]
    if layout == "sm100":
        check_sm100(num_tokens, num_blocks)
        quarter = num_blocks // 4
        row, column = 4 * (t // 4) + s // quarter, 4 * (s % quarter) + t % 4
    elif layout == "linear":
        row, column = t.expand(-1, num_blocks), s.expand(num_tokens, -1)
    else:
        raise ValueError(f"layout: expected 'linear' or 'sm100', got {layout!r}")
    return row, column


def check_sm100(num_tokens: int, num_blocks: int) -> None:
    """Raise ValueError unless a page of these sizes can hold V scales in the `sm100` order."""
    if num_tokens % 4 or num_blocks % 4:
        raise ValueError(
            "v_scale_layout 'sm100' needs block_size % 4 == 0 and head_size_v % 64 == 0, got "
            f"block_size {num_tokens} and {num_blocks} scales per token"
        )


def swizzle_128x4(scales: torch.Tensor) -> torch.Tensor:
    """Block scales of a matrix in the order of Blackwell's scaled MMA (cuBLAS, CUTLASS).

    Rows are padded to 128 and columns to 4 with zero bytes. Tiles of 128 x 4 lie row-major; in a
    tile, (r, c) is byte `(r % 32) * 16 + (r // 32) * 4 + c` (cuBLAS documentation, "1D Block
    Scaling Factors Layout").

    Args:
        scales: 1-byte dtype `[M, S]`.

    Returns:
        The same dtype, `[ceil(M / 128) * 128, ceil(S / 4) * 4]`; its bytes are in swizzled order.
    """
    rows, columns = scales.shape
    padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    raw = F.pad(scales.view(torch.uint8), (0, padded_columns - columns, 0, padded_rows - rows))
    tiles = raw.reshape(padded_rows // 128, 4, 32, padded_columns // 4, 4)
    swizzled = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)
    return swizzled.contiguous().view(scales.dtype)


def unswizzle_128x4(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Linear `[rows, columns]` scales of `swizzle_128x4`'s result, padding removed.

    Raises:
        ValueError: `swizzled` does not have the padded size of a `[rows, columns]` matrix.
    """
    padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    if swizzled.numel() != padded_rows * padded_columns:
        raise ValueError(
            f"swizzled: {rows} x {columns} scales pad to {padded_rows} x {padded_columns}, "
            f"got {swizzled.numel()} bytes"
        )
    tiles = swizzled.view(torch.uint8).reshape(padded_rows // 128, padded_columns // 4, 32, 4, 4)
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)
    return linear[:rows, :columns].contiguous().view(swizzled.dtype)
