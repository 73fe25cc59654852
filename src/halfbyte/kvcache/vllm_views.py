"""vLLM's five-dimensional form of an NVFP4 cache (PR 37332), for code that holds one.

`uint8 [num_pages, 2, dim_1, dim_2, full_dim]`, where (dim_1, dim_2) is (block_size, heads) for NHD
and (heads, block_size) for HND, and `full_dim = D/2 + D/16`. The last dimension is bookkeeping
only: the bytes of each side of a page are all its data followed by all its scales.
"""

import torch

from halfbyte.layouts.scale_layouts import VScaleLayout, v_scale_position
from halfbyte.numerics import nvfp4


def nvfp4_kv_cache_full_dim(head_size: int) -> int:
    """Bytes of one head of one token: `head_size / 2` of data and `head_size / 16` of scales.

    Raises:
        ValueError: `head_size` is not a positive multiple of 16.
    """
    if head_size <= 0 or head_size % nvfp4.BLOCK_SIZE:
        raise ValueError(f"head_size: nvfp4 needs a positive multiple of 16, got {head_size}")
    return head_size // 2 + head_size // 16


def nvfp4_kv_cache_split_views(
    kv_cache: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Zero-copy views of data and scales.

    Args:
        kv_cache: uint8 `[num_pages, 2, dim_1, dim_2, full_dim]`, or one side of it,
            `[num_pages, dim_1, dim_2, full_dim]`. Pages may be padded, and dim_1 and dim_2 may be
            a permuted view (an HND cache seen as NHD).

    Returns:
        `([k_data, v_data], [k_scale, v_scale])`: uint8 `[num_pages, dim_1, dim_2, D/2]` and
        float8_e4m3fn `[num_pages, dim_1, dim_2, D/16]`, in the input's order of dimensions; for
        one side `([data], [scale])`.

    Raises:
        ValueError: not uint8, not 4 or 5 dimensions, or a last dimension that is not 9 · D/16.
    """
    if kv_cache.dtype != torch.uint8 or kv_cache.dim() not in (4, 5):
        raise ValueError(
            "kv_cache: expected uint8 of 4 or 5 dimensions, got "
            f"{kv_cache.dtype} {tuple(kv_cache.shape)}"
        )
    if kv_cache.dim() == 5 and kv_cache.shape[1] != 2:
        raise ValueError(f"kv_cache: dimension 1 must be 2 (K, V), got {kv_cache.shape[1]}")
    sides = kv_cache.unbind(1) if kv_cache.dim() == 5 else (kv_cache,)
    split = [_split_side(side) for side in sides]
    return [data for data, _ in split], [scales for _, scales in split]


def dequant_nvfp4_kv_cache(
    fp4_data: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: float | torch.Tensor,
    head_size: int | None = None,
    block_size: int | None = None,
    *,
    scale_layout: VScaleLayout = "linear",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Dequantize one side of an NVFP4 cache.

    Args:
        fp4_data: uint8 `[..., D/2]`.
        block_scale: uint8 or float8_e4m3fn `[..., D/16]`.
        global_scale: global scale.
        head_size, block_size: D and tokens per page, checked against the shapes where given.
        scale_layout: `linear`, or `sm100` for scales in the trtllm-gen order; then the last two
            dimensions must be (block_size, D/16), as in an HND view.
        dtype: of the result.

    Returns:
        `[..., D]` of `dtype`.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if head_size is not None and fp4_data.shape[-1] * 2 != head_size:
        raise ValueError(
            f"head_size: {head_size} needs {head_size // 2} bytes, got {fp4_data.shape[-1]}"
        )
    if block_size is not None and block_size not in fp4_data.shape[-3:-1]:
        raise ValueError(f"block_size: {block_size} is no dimension of {tuple(fp4_data.shape)}")
    scales = block_scale.view(torch.uint8)
    if scale_layout != "linear":
        tokens, blocks = scales.shape[-2:]
        row, column = v_scale_position(tokens, blocks, scale_layout, scales.device)
        scales = scales[..., row, column]
    return nvfp4.dequantize(fp4_data, scales, global_scale, dtype)


def _split_side(side: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_pages, dim_1, dim_2, full_dim = side.shape
    if full_dim == 0 or full_dim % 9:
        raise ValueError(f"kv_cache: the last dimension must be 9 * head_size / 16, got {full_dim}")
    head_size = full_dim * 16 // 9
    data_dim, scale_dim = head_size // 2, head_size // 16
    # The outer of the two dimensions is the one with the larger stride in memory.
    dim_1_is_outer = side.stride(1) >= side.stride(2)
    inner_size = dim_2 if dim_1_is_outer else dim_1
    dense = (inner_size * full_dim, full_dim)
    expected = (*(dense if dim_1_is_outer else dense[::-1]), 1)
    actual = zip(side.shape[1:], side.stride()[1:], expected, strict=True)
    if any(size > 1 and stride != wanted for size, stride, wanted in actual):
        raise ValueError(
            f"kv_cache: a page's side must be dense, got strides {side.stride()} for "
            f"{tuple(side.shape)}"
        )

    def view(width: int, offset: int) -> torch.Tensor:
        outer, inner = inner_size * width, width
        strides = (outer, inner) if dim_1_is_outer else (inner, outer)
        return side.as_strided(
            (num_pages, dim_1, dim_2, width),
            (side.stride(0), *strides, 1),
            side.storage_offset() + offset,
        )

    scales = view(scale_dim, dim_1 * dim_2 * data_dim)
    return view(data_dim, 0), scales.view(torch.float8_e4m3fn)
