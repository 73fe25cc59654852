"""Unpacks keys and values into the workspace, for dense kernels."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.prefill.key_ranges import KeyRanges
from halfbyte.attention.prefill.unpack_kernel import unpack_kernel
from halfbyte.kernels.formats.kv_tiles import page_stride_of, scale_factor, side_geometry
from halfbyte.kernels.runtime.devices import current_device
from halfbyte.kvcache.recent_step import LayerPages
from halfbyte.kvcache.transform import MARK, KVTransform, MeanTables
from halfbyte.layouts import PageLayout
from halfbyte.layouts.formats import KV_FORMATS
from halfbyte.numerics.hadamard import block_size, hadamard


class Tile(NamedTuple):
    """Tile of a program."""

    num_tokens: int
    num_warps: int


def choose_tile(head_size: int, rotated: bool) -> Tile:
    """4 KiB of packed values at head size 128; less where the matmul would spill registers."""
    if rotated and head_size > 128:
        return Tile(32, 8)
    return Tile(32 if rotated else 64, 4)


def _omitted_factor(kind: str) -> float:
    """Power of two that decoding to float16 omits; 1 for formats that are decoded to float32."""
    row = KV_FORMATS[kind]
    return 2.0**row.shift if row.exact_in_float16 else 1.0


@lru_cache(maxsize=16)
def half_matrix(head_size: int, padded: int, device: torch.device) -> torch.Tensor:
    """float16 `[padded, padded]` of +1 and -1: the Hadamard matrix of half a head, zeros beyond."""
    half = block_size(head_size) // 2
    signs = hadamard(torch.eye(half, dtype=torch.float32, device="cpu")).sign()
    matrix = torch.zeros(padded, padded, dtype=torch.float16, device="cpu")
    for begin in range(0, head_size // 2, half):
        matrix[begin : begin + half, begin : begin + half] = signs
    return matrix.to(device)


def unpack(inputs: AttentionInputs, ranges: KeyRanges) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of ranges of keys, `[ranges.num_rows, kv_heads, D]` in the query's dtype.

    Does not sync the GPU. Rows outside of the ranges are undefined.
    """
    layout = inputs.layout
    key, value = (
        inputs.query.new_empty((ranges.num_rows, layout.num_kv_heads, size))
        for size in (layout.head_size, layout.head_size_v)
    )
    unpack_into(key, value, inputs, ranges)
    return key, value


def unpack_into(
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    inputs: AttentionInputs | LayerPages,
    ranges: KeyRanges,
) -> None:
    """`unpack` to given workspaces.

    Args:
        k_out: bfloat16, float16 or float32 `[rows, kv_heads, head_size]`; any strides, but
            contiguous in the last dimension.
        v_out: likewise, `[rows, kv_heads, head_size_v]`.
        inputs: of `paged_attention`, checked. Scales may be floats, or float32 tensors of one
            element; one on the GPU is read there. The transform of K is undone.
        ranges: of keys.
    """
    pages, layout, transform = inputs.pages, inputs.layout, inputs.transform
    block_tables = inputs.block_tables[ranges.sequences]
    num_seqs = block_tables.shape[0]
    if num_seqs == 0 or ranges.max_keys <= 0:
        return
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    k, v = side_geometry(layout, "k"), side_geometry(layout, "v")
    k_factor, k_global = scale_factor(inputs.k_scale, layout.k_dtype, pages.device)
    v_factor, v_global = scale_factor(inputs.v_scale, layout.v_dtype, pages.device)
    undone = _transform_arguments(transform, layout, k.padded, pages)
    if undone["rotated"]:
        k_factor *= block_size(layout.head_size) ** -0.5
    tile = choose_tile(layout.head_size, undone["rotated"])
    tiles = -(-ranges.max_keys // tile.num_tokens)
    if undone["segment"]:
        tiles += 1  # the first tile may start before the range
    # Absent tensors get any pointer; it is never read.
    with current_device(pages.get_device()):
        unpack_kernel[tiles, num_seqs, 2 * layout.num_kv_heads](
            pages=pages,
            tables=block_tables,
            begins=ranges.begins,
            ends=ranges.ends,
            first_rows=ranges.rows,
            k_global=pages if k_global is None else k_global,
            v_global=pages if v_global is None else v_global,
            k_out=k_out,
            v_out=v_out,
            k_factor=k_factor * _omitted_factor(k.kind),
            v_factor=v_factor * _omitted_factor(v.kind),
            page_stride=page_stride_of(pages, layout),
            table_stride=block_tables.stride(0),
            k_out_token=k_out.stride(0),
            k_out_head=k_out.stride(1),
            v_out_token=v_out.stride(0),
            v_out_head=v_out.stride(1),
            k=k,
            v=v,
            kv_heads=layout.num_kv_heads,
            k_global_on_device=k_global is not None,
            v_global_on_device=v_global is not None,
            mark=MARK,
            ring=ranges.ring,
            num_tokens=tile.num_tokens,
            ptx=pages.is_cuda,
            num_warps=tile.num_warps,
            **undone,
        )


def _transform_arguments(
    transform: KVTransform | None, layout: PageLayout, padded: int, absent: torch.Tensor
) -> dict[str, Any]:
    """Arguments of `unpack_kernel` that undo the transform of K.

    Args:
        padded: columns of a tile of K.
        absent: replaces tensors that the transform does not have; never read.
    """
    matrix = tables = first_keys = first_values = None
    if transform is not None:
        tables = transform.mean_tables
        first_keys, first_values = transform.first_keys, transform.first_values
        if transform.rotate:
            matrix = half_matrix(layout.head_size, padded, absent.device)
    return {
        "matrix": absent if matrix is None else matrix,
        **(MeanTables(absent, absent, absent, absent) if tables is None else tables)._asdict(),
        "first_keys": absent if first_keys is None else first_keys.contiguous(),
        "first_values": absent if first_values is None else first_values.contiguous(),
        "num_segments": 0 if tables is None else len(tables.cos),
        "rotated": matrix is not None,
        "segment": 0 if transform is None or tables is None else transform.segment,
        "knows_first": first_keys is not None,
    }
