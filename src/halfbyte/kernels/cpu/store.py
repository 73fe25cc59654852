"""Launcher of the store of K and V for CPUs (`cpu/store.cpp`)."""

import struct
from functools import lru_cache

import torch

from halfbyte.kernels.cpu.library import FLOATS, library, pack_layout
from halfbyte.kernels.cpu.transform import CpuTransform
from halfbyte.layouts import PageLayout, page_stride

_SIDE = "P3qif"
"""`Input` of the source."""
_CALL = struct.Struct("2P4q2i2Pq" + 2 * _SIDE)


def store_tokens_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: PageLayout,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    transform: CpuTransform | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """As `halfbyte.kvcache.reshape_and_cache`, on arguments already checked, all on the CPU.

    Bitwise equal to the reference, except for the payload of a NaN in formats that
    are not quantized.

    Args:
        k_scale, v_scale: floats, or float32 tensors of one element.
        transform: of K, whose format then is an NVFP4 one.
        positions: int64 `[n]`, for a transform.

    Raises:
        ValueError: a slot past the last page (then nothing is written), a float scale that
            `KVCacheDType.check_scale` refuses, a scale of several elements, or pages whose
            alignment does not suit a 16- or 32-bit format.
    """
    loaded = library()
    assert loaded is not None
    _check_alignment(pages, layout)
    capacity = pages.shape[0] * layout.block_size
    call = _CALL.pack(
        pages.data_ptr(),
        slot_mapping.data_ptr(),
        slot_mapping.stride(0),
        slot_mapping.shape[0],
        pages.stride(0),
        capacity,
        torch.get_num_threads(),
        0,
        0 if transform is None else transform.address,
        0 if positions is None else positions.data_ptr(),
        0 if positions is None else positions.stride(0),
        key.data_ptr(),
        *key.stride(),
        FLOATS[key.dtype],
        float(layout.k_dtype.check_scale(k_scale, "k_scale")),
        value.data_ptr(),
        *value.stride(),
        FLOATS[value.dtype],
        float(layout.v_dtype.check_scale(v_scale, "v_scale")),
    )
    past = loaded.halfbyte_store(pack_layout(layout), call)
    if past >= 0:
        raise ValueError(f"slot_mapping: slot {past} is past the last, {capacity - 1}")


@lru_cache(maxsize=256)
def _alignment(layout: PageLayout) -> int:
    return max(layout.k_dtype.storage_dtype.itemsize, layout.v_dtype.storage_dtype.itemsize)


def _check_alignment(pages: torch.Tensor, layout: PageLayout) -> None:
    """Raise ValueError for pages that are not aligned as 16- or 32-bit formats need.

    `kernels/formats/kv_tiles.page_stride_of` checks the same for GPUs, but needs Triton.
    """
    alignment = _alignment(layout)
    stride = page_stride(pages)
    if alignment > 1 and (pages.data_ptr() | stride) % alignment:
        raise ValueError(
            f"pages: the base {pages.data_ptr():#x} and the stride {stride} must be multiples of "
            f"{alignment} bytes for K in {layout.k_dtype} and V in {layout.v_dtype}"
        )
