"""The C++ kernels for CPUs (`cpu/*.cpp`), one shared library reached through ctypes.

It is built with the package where a C++ compiler is at hand. AVX-512, AVX2 or plain vectors are
chosen when it runs.
"""

import ctypes
import logging
import struct
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from halfbyte.layouts import KVCacheDType, PageLayout

LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, "avx512vnni": 3, "avx512bf16": 4}
"""Instruction sets; each may use what is before it."""

FORMATS = {
    name: number
    for number, name in enumerate(
        (
            KVCacheDType.FLOAT32,
            KVCacheDType.FLOAT16,
            KVCacheDType.BFLOAT16,
            KVCacheDType.FP8_E4M3,
            KVCacheDType.FP8_E5M2,
            KVCacheDType.NVFP4,
            KVCacheDType.NVFP4_4OVER6,
            KVCacheDType.FP4_BLOCK16,
            KVCacheDType.MXFP4,
        )
    )
}
"""`Format` of the sources."""

FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The formats that tensors have."""

logger = logging.getLogger("halfbyte")

_LAYOUT = struct.Struct("12q8i")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The kernels; None where the package was installed without a C++ compiler."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_cpu{suffix}"
        if path.is_file():
            loaded = ctypes.CDLL(str(path))
            loaded.halfbyte_attention.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
            loaded.halfbyte_attention.restype = None
            loaded.halfbyte_fits.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 5
            loaded.halfbyte_fits.restype = ctypes.c_int
            loaded.halfbyte_store.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
            loaded.halfbyte_store.restype = ctypes.c_int64
            loaded.halfbyte_linear.argtypes = [ctypes.c_char_p]
            loaded.halfbyte_linear.restype = None
            loaded.halfbyte_linear_dequantize.argtypes = [ctypes.c_char_p]
            loaded.halfbyte_linear_dequantize.restype = None
            loaded.halfbyte_linear_has_wide_vectors.argtypes = []
            loaded.halfbyte_linear_has_wide_vectors.restype = ctypes.c_int
            loaded.halfbyte_cpu_level.argtypes = []
            loaded.halfbyte_cpu_level.restype = ctypes.c_int
            loaded.halfbyte_set_cpu_level.argtypes = [ctypes.c_int]
            loaded.halfbyte_set_cpu_level.restype = None
            loaded.halfbyte_use_openmp.argtypes = [ctypes.c_void_p]
            loaded.halfbyte_use_openmp.restype = None
            loaded.halfbyte_use_openmp(_openmp_of_torch())
            return loaded
    return None


@lru_cache(maxsize=1)
def say_missing() -> None:
    """One line in the log, whatever misses the kernels first."""
    logger.warning("the CPU kernels were not built (no C++ compiler?): the reference stands in")


def level() -> str | None:
    """The instruction set of `LEVELS` that runs; None where the kernels were not built."""
    loaded = library()
    return None if loaded is None else list(LEVELS)[loaded.halfbyte_cpu_level()]


def set_level(name: str | None) -> str:
    """Use an instruction set of `LEVELS`, or the last before it that this CPU has.

    With None, as at first, what is fastest here: on Intel's CPUs "avx512vnni" before "avx512bf16".

    Returns:
        `level()`.

    Raises:
        RuntimeError: the kernels were not built.
    """
    loaded = library()
    if loaded is None:
        raise RuntimeError("the CPU kernels were not built")
    loaded.halfbyte_set_cpu_level(-1 if name is None else LEVELS[name])
    return list(LEVELS)[loaded.halfbyte_cpu_level()]


@lru_cache(maxsize=256)
def pack_layout(layout: PageLayout) -> bytes:
    """`Layout` of the sources, field by field."""
    regions = {region.name: region for region in layout.regions}
    places = []
    for name in ("k_data", "k_scale", "v_data", "v_scale"):
        region = regions.get(name)
        places += (
            [0, 0, 0]
            if region is None
            else [region.offset, region.token_stride, region.head_stride]
        )
    quarter = 0
    if layout.v_scale_layout == "sm100":
        quarter = layout.v_dtype.scale_bytes(layout.head_size_v) // 4
    return _LAYOUT.pack(
        *places,
        FORMATS[layout.k_dtype],
        FORMATS[layout.v_dtype],
        layout.num_kv_heads,
        layout.head_size,
        layout.head_size_v,
        layout.block_size,
        quarter,
        0,
    )


def _openmp_of_torch() -> ctypes.c_void_p | None:
    """The entry of the OpenMP that PyTorch runs on, if it is GNU's or speaks its language."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except (AttributeError, OSError, TypeError):  # no such OpenMP; no dlopen(NULL) on Windows
        return None
