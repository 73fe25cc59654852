"""C++ on CPUs: every format, with AVX-512, AVX2 or plain loops.

The source is `kernels/cpu/store/store.cpp`.
"""

import ctypes
from typing import ClassVar

import torch

from halfbyte.dispatch import Answer
from halfbyte.kernels.cpu.library import FLOATS, FORMATS, is_built, library, pack_layout
from halfbyte.kvcache.store.base import Scale, StoreBackend, StoreConfig, StoreInputs
from halfbyte.layouts import KVCacheDType


class _Input(ctypes.Structure):
    """`Input` of the source."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("token", "head", "element")),
        ("format", ctypes.c_int32),
        ("global_scale", ctypes.c_float),
    )


class _Call(ctypes.Structure):
    """`Call` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages", "slots")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "num_slots")),
        *((name, ctypes.c_int64) for name in ("page_stride", "capacity")),
        *((name, ctypes.c_int32) for name in ("threads", "unused")),
        *((name, ctypes.c_void_p) for name in ("transform", "positions")),
        ("position_stride", ctypes.c_int64),
        *((name, _Input) for name in ("key", "value")),
    )


def run(inputs: StoreInputs) -> None:
    """Quantize and write tokens; all tensors are on the CPU.

    Bitwise equal to the reference, except for the payload of a NaN in formats that
    are not quantized.

    Args:
        inputs: checked. Scales may be floats, or float32 tensors of one element.

    Raises:
        ValueError: a slot past the last page (then nothing is written), a float scale that
            `KVCacheDType.check_scale` refuses, a scale of several elements, or pages whose
            alignment does not suit a 16- or 32-bit format.
    """
    loaded = library()
    assert loaded is not None
    pages, slots, layout, positions = (
        inputs.pages,
        inputs.slot_mapping,
        inputs.layout,
        inputs.positions,
    )
    layout.check_alignment(pages)
    capacity = pages.shape[0] * layout.block_size
    transform = None if inputs.transform is None else inputs.transform.for_cpu
    call = _Call(
        pages=pages.data_ptr(),
        slots=slots.data_ptr(),
        slot_stride=slots.stride(0),
        num_slots=slots.shape[0],
        page_stride=pages.stride(0),
        capacity=capacity,
        threads=torch.get_num_threads(),
        transform=0 if transform is None else transform.address,
        positions=0 if positions is None else positions.data_ptr(),
        position_stride=0 if positions is None else positions.stride(0),
        key=_input("k_scale", inputs.key, inputs.k_scale, layout.k_dtype),
        value=_input("v_scale", inputs.value, inputs.v_scale, layout.v_dtype),
    )
    past = loaded.halfbyte_store(pack_layout(layout), bytes(call))
    if past >= 0:
        raise ValueError(f"slot_mapping: slot {past} is past the last, {capacity - 1}")
    if inputs.recent is not None:
        inputs.recent.write(inputs.key, inputs.value)


def _input(name: str, x: torch.Tensor, scale: Scale, dtype: KVCacheDType) -> _Input:
    """K or V, and its global scale, which errors call `name`."""
    token, head, element = x.stride()
    return _Input(
        x=x.data_ptr(),
        token=token,
        head=head,
        element=element,
        format=FLOATS[x.dtype],
        global_scale=float(dtype.check_scale(scale, name)),
    )


class CpuStore(StoreBackend):
    """`store.cpp`; built with the package."""

    name: ClassVar[str] = "cpu"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the kernel was built; every machine has a CPU."""
        return is_built("writes packed pages")

    @classmethod
    def can_implement(cls, config: StoreConfig) -> Answer:
        """Every format, from floats of 16 and 32 bits."""
        return config.answer_of("cpu", FORMATS)

    @classmethod
    def store(cls, inputs: StoreInputs) -> None:
        """See `StoreBackend.store`; raises for slots past the last page."""
        run(inputs)
