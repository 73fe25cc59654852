"""Store kernel: K and V of new tokens are encoded and written to their slots, in one launch.

The bytes equal those of the reference (`kvcache/store/reference.py`). A thread has a row of 16
values, which in bfloat16 are two loads of 16 bytes, and writes their codes as words; the grid's
second axis is K or V. There is no host sync, so that a launch can be captured in a CUDA graph. The
kernel reads the slots, which may change between replays.
"""

# mypy: disable-error-code="no-untyped-def"

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.kernels.runtime.devices import current_device
from halfbyte.kernels.runtime.triton_overlap import overlap_options, wait_for_previous
from halfbyte.kvcache.recent import RingSlots
from halfbyte.kvcache.store.base import StoreInputs, global_scale_on
from halfbyte.kvcache.store.triton_feedback_kernel import store_feedback_kernel
from halfbyte.kvcache.store.triton_rows import ROW, Side, side_of, store_side
from halfbyte.kvcache.store.triton_transform import store_transformed_kernel
from halfbyte.kvcache.transform import MARK, MATCH_TOLERANCE, KVTransform, MeanTables
from halfbyte.layouts import PageLayout, page_stride
from halfbyte.numerics.hadamard import block_size

# (rows, warps) per program: small, to spread a few tokens over many SMs; larger for prompts.
_SMALL_TILE = (64, 2)
_LARGE_TILE = (128, 4)
_LARGE_FROM_ROWS = 2**15
# For K with error feedback: (tokens, rows, warps), and the min number of (token, head) pairs. With
# fewer pairs, one warp per pair.
_ROW_FEEDBACK = (1, 64, 1)
_SMALL_FEEDBACK = (32, 64, 1)
_SMALL_FEEDBACK_FROM = 2**11
_LARGE_FEEDBACK = (128, 128, 2)
_LARGE_FEEDBACK_FROM = 2**14


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def store_kernel(
    key,
    value,
    pages,
    slots,
    k_scale,
    v_scale,
    num_slots,
    capacity,
    page_stride,
    slot_stride,
    key_stride_token,
    key_stride_head,
    key_stride,
    value_stride_token,
    value_stride_head,
    value_stride,
    k_side: tl.constexpr,
    v_side: tl.constexpr,
    k_offsets: tl.constexpr,
    v_offsets: tl.constexpr,
    k_dense: tl.constexpr,
    v_dense: tl.constexpr,
    k_scale_on_device: tl.constexpr,
    v_scale_on_device: tl.constexpr,
    rows: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Rows `[program_id(0) * rows, ...)` of K (`program_id(1)` 0) or V (1).

    Slots outside `0 .. capacity - 1` are skipped.
    """
    wait_for_previous(overlaps)
    is_value = tl.program_id(1) == 1
    if (
        k_side == v_side
        and k_dense == v_dense
        and k_scale_on_device == v_scale_on_device
        and key.dtype == value.dtype
    ):  # one body for both
        store_side(
            x=tl.where(is_value, value, key),
            stride_token=tl.where(is_value, value_stride_token, key_stride_token),
            stride_head=tl.where(is_value, value_stride_head, key_stride_head),
            stride=tl.where(is_value, value_stride, key_stride),
            scale=tl.where(is_value, v_scale, k_scale),
            data_offset=tl.where(is_value, v_offsets[0], k_offsets[0]),
            scale_offset=tl.where(is_value, v_offsets[1], k_offsets[1]),
            pages=pages,
            page_stride=page_stride,
            slots=slots,
            slot_stride=slot_stride,
            num_slots=num_slots,
            capacity=capacity,
            side=k_side,
            dense=k_dense,
            scale_on_device=k_scale_on_device,
            rows=rows,
        )
    elif is_value:
        store_side(
            x=value,
            stride_token=value_stride_token,
            stride_head=value_stride_head,
            stride=value_stride,
            scale=v_scale,
            data_offset=v_offsets[0],
            scale_offset=v_offsets[1],
            pages=pages,
            page_stride=page_stride,
            slots=slots,
            slot_stride=slot_stride,
            num_slots=num_slots,
            capacity=capacity,
            side=v_side,
            dense=v_dense,
            scale_on_device=v_scale_on_device,
            rows=rows,
        )
    else:
        store_side(
            x=key,
            stride_token=key_stride_token,
            stride_head=key_stride_head,
            stride=key_stride,
            scale=k_scale,
            data_offset=k_offsets[0],
            scale_offset=k_offsets[1],
            pages=pages,
            page_stride=page_stride,
            slots=slots,
            slot_stride=slot_stride,
            num_slots=num_slots,
            capacity=capacity,
            side=k_side,
            dense=k_dense,
            scale_on_device=k_scale_on_device,
            rows=rows,
        )


class _Launch(NamedTuple):
    """A kernel, its grid, and its arguments beyond those that all store kernels take, by name."""

    kernel: Any
    grid: tuple[int, int]
    rows: int
    num_warps: int
    arguments: Mapping[str, Any] = MappingProxyType({})


def store_tokens(inputs: StoreInputs) -> None:
    """Quantize and write tokens; all tensors are on one GPU.

    Does not sync the GPU; slots past the last page are skipped.

    Args:
        inputs: checked. Scales may be floats, or float32 tensors of one element; one on a GPU is
            read there.

    Raises:
        ValueError: a float scale that `KVCacheDType.check_scale` refuses, a scale of several
            elements, or pages whose alignment does not suit a 16- or 32-bit format.
    """
    key, value, pages, slot_mapping, layout = inputs[:5]
    num_slots = slot_mapping.shape[0]
    if inputs.recent is not None and (inputs.transform is None or num_slots == 0):
        inputs.recent.write(key, value)
    if num_slots == 0:
        return
    layout.check_alignment(pages)
    stride = page_stride(pages)
    geometry = _geometry(layout, (pages.data_ptr() | stride) % 4 == 0)
    k_global = global_scale_on(pages.device, "k_scale", inputs.k_scale, layout.k_dtype)
    v_global = global_scale_on(pages.device, "v_scale", inputs.v_scale, layout.v_dtype)
    launch = _launch(inputs, num_slots * geometry.rows_per_token)
    with current_device(pages.get_device()):
        launch.kernel[launch.grid](
            key=key,
            value=value,
            pages=pages,
            slots=slot_mapping,
            k_scale=k_global,
            v_scale=v_global,
            num_slots=num_slots,
            capacity=pages.shape[0] * layout.block_size,
            page_stride=stride,
            slot_stride=slot_mapping.stride(0),
            key_stride_token=key.stride(0),
            key_stride_head=key.stride(1),
            key_stride=key.stride(2),
            value_stride_token=value.stride(0),
            value_stride_head=value.stride(1),
            value_stride=value.stride(2),
            k_side=geometry.key,
            v_side=geometry.value,
            k_offsets=geometry.key_offsets,
            v_offsets=geometry.value_offsets,
            k_dense=_is_dense(key),
            v_dense=_is_dense(value),
            k_scale_on_device=isinstance(k_global, torch.Tensor),
            v_scale_on_device=isinstance(v_global, torch.Tensor),
            rows=launch.rows,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
            **overlap_options(pages.get_device()),
            **launch.arguments,
        )


def _launch(inputs: StoreInputs, num_rows: int) -> _Launch:
    """The kernel for the inputs' transform; `num_rows` rows of K or V, whichever has more."""
    transform, layout, recent = inputs.transform, inputs.layout, inputs.recent
    rows, num_warps = _LARGE_TILE if num_rows >= _LARGE_FROM_ROWS else _SMALL_TILE
    grid = (-(-num_rows // rows), 2)
    if transform is None:
        return _Launch(store_kernel, grid, rows, num_warps)
    assert inputs.positions is not None
    arguments = _transform_arguments(transform, inputs.positions, layout, inputs.pages)
    arguments |= _ring_arguments(recent, layout, rows, inputs.pages)
    if recent is not None:
        programs = -(-len(recent.rows) * layout.num_kv_heads // arguments["pairs"])
        grid = (max(grid[0], programs), 3)
    kernel: Any = store_transformed_kernel
    if transform.feedback is not None:
        kernel = store_feedback_kernel
        num_slots, is_weighted = len(inputs.slot_mapping), arguments["weighted"]
        of_feedback, (rows, num_warps, programs) = _feedback_arguments(
            transform.feedback, layout, num_slots, is_weighted=is_weighted
        )
        arguments |= of_feedback
        grid = (max(programs, -(-num_rows // rows), grid[0]), grid[1])
    return _Launch(kernel, grid, rows, num_warps, arguments)


def _transform_arguments(
    transform: KVTransform, positions: torch.Tensor, layout: PageLayout, absent: torch.Tensor
) -> dict[str, Any]:
    """Arguments of `store_transformed_kernel`; `absent` replaces None."""
    tables, first = transform.mean_tables, transform.first_keys
    first_keys = first_values = absent
    if first is not None and transform.first_values is not None:
        first_keys, first_values = first.contiguous(), transform.first_values.contiguous()
    k_weights = transform.k_weights
    v_weights = transform.v_weights if layout.v_dtype.is_nvfp4 else None
    block = block_size(layout.head_size) if transform.rotate else 0
    return {
        "positions": positions.contiguous(),
        **(MeanTables(absent, absent, absent, absent) if tables is None else tables)._asdict(),
        "first_keys": first_keys,
        "first_values": first_values,
        "k_weights": absent if k_weights is None else k_weights.contiguous(),
        "v_weights": absent if v_weights is None else v_weights.contiguous(),
        "num_first": 0 if first is None else len(first),
        "num_segments": 0 if tables is None else len(tables.cos),
        "centred": tables is not None,
        "segment": transform.segment,
        "block": block,
        "norm": ctypes.c_float(block**-0.5).value if block else 1.0,
        "knows_first": first is not None,
        "mark": MARK,
        "tolerance": MATCH_TOLERANCE,
        "weighted": k_weights is not None,
        "weighted_v": v_weights is not None,
    }


def _ring_arguments(
    recent: RingSlots | None, layout: PageLayout, rows: int, absent: torch.Tensor
) -> dict[str, Any]:
    """The same for the rings; a program copies as many values as it encodes."""
    padded, padded_v = (1 << (n - 1).bit_length() for n in (layout.head_size, layout.head_size_v))
    rings = RingSlots(absent, absent, absent, absent, absent) if recent is None else recent
    return {
        **{f"ring_{name}": tensor for name, tensor in rings._asdict().items()},
        "num_kept": 0 if recent is None else len(recent.rows),
        "ring_size": 0 if recent is None else recent.keys.shape[2],
        "pairs": max(1, rows * ROW // max(padded, padded_v)),
        "padded": padded,
        "padded_v": padded_v,
    }


def _feedback_arguments(
    feedback: torch.Tensor, layout: PageLayout, num_slots: int, *, is_weighted: bool
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Further arguments of `store_feedback_kernel`; its rows, warps and programs for K.

    Args:
        is_weighted: whether K's block scales are chosen by weighted error.
    """
    heads, size = layout.num_kv_heads, layout.head_size
    tile = _SMALL_FEEDBACK
    if num_slots * heads >= _LARGE_FEEDBACK_FROM:
        tile = _LARGE_FEEDBACK
    elif num_slots * heads < _SMALL_FEEDBACK_FROM and is_weighted:
        tile = _ROW_FEEDBACK
    tokens, rows, num_warps = tile
    parts = 1 << (size // ROW - 1).bit_length()
    rows = min(max(rows, parts), parts * tokens)
    programs = heads * -(-num_slots // tokens)
    scratch = torch.empty(programs, size, tokens, dtype=torch.float32, device=feedback.device)
    arguments = {
        "feedback": feedback.contiguous(),
        "scratch": scratch,
        "parts": parts,
        "tokens": tokens,
    }
    return arguments, (rows, num_warps, programs)


class _Geometry(NamedTuple):
    key: Side
    value: Side
    key_offsets: tuple[int, int]
    """Bytes of the page before the data and before the scales."""
    value_offsets: tuple[int, int]
    rows_per_token: int
    """Rows of K or V, whichever has more."""


@lru_cache(maxsize=256)
def _geometry(layout: PageLayout, pages_aligned: bool) -> _Geometry:
    key, key_offsets = side_of(layout, "k", pages_aligned)
    value, value_offsets = side_of(layout, "v", pages_aligned)
    return _Geometry(
        key,
        value,
        key_offsets,
        value_offsets,
        layout.num_kv_heads * -(-max(layout.head_size, layout.head_size_v) // ROW),
    )


def _is_dense(x: torch.Tensor) -> bool:
    """Whether the heads of `[tokens, heads, D]` lie side by side, in whole rows."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.shape[2] % ROW == 0
