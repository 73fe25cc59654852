"""The C++ kernels for CPUs (`cpu/*.cpp`), one shared library called through ctypes.

It is built with the package if a C++ compiler is available. The instruction set (AVX-512, AVX2 or
portable) is selected at run time.
"""

import ctypes
import logging
import struct
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from halfbyte.dispatch import CPU, Answer, current_compute_capability
from halfbyte.layouts import KVCacheDType, PageLayout
from halfbyte.layouts.formats import KV_FORMATS

LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, "avx512vnni": 3, "avx512bf16": 4}
"""Instruction sets; each includes the ones before it."""

FORMATS = {
    KVCacheDType(name): row.cpu_id for name, row in KV_FORMATS.items() if row.cpu_id is not None
}
"""The values of the C++ enum `Format`."""

FLOATS = {
    dtype.storage_dtype: number for dtype, number in FORMATS.items() if not dtype.is_quantized
}
"""The C++ formats of tensor dtypes."""

logger = logging.getLogger("halfbyte")

_LAYOUT = struct.Struct("12q8i")
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "halfbyte_attention": ([ctypes.c_char_p] * 2, None),
    "halfbyte_dense": ([ctypes.c_char_p], None),
    "halfbyte_fits": ([ctypes.c_void_p] * 3 + [ctypes.c_int64] * 5, ctypes.c_int),
    "halfbyte_store": ([ctypes.c_char_p] * 2, ctypes.c_int64),
    "halfbyte_linear": ([ctypes.c_char_p], None),
    "halfbyte_linear_dequantize": ([ctypes.c_char_p], None),
    "halfbyte_linear_has_wide_vectors": ([], ctypes.c_int),
    "halfbyte_cpu_level": ([], ctypes.c_int),
    "halfbyte_set_cpu_level": ([ctypes.c_int], None),
    "halfbyte_use_openmp": ([ctypes.c_void_p], None),
}
"""Argument and result types of the functions."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The kernels; None where the package was installed without a C++ compiler.

    Raises:
        ImportError: they were built from other sources.
    """
    folder = Path(__file__).parents[1]
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_cpu{suffix}"
        if path.is_file():
            return _load(path)
    return None


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, (arguments, result) in _FUNCTIONS.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise ImportError(
                f"{path} was built from other sources than these: install halfbyte again"
            ) from None
        function.argtypes, function.restype = arguments, result
    loaded.halfbyte_use_openmp(_openmp_of_torch())
    return loaded


@lru_cache(maxsize=1)
def warn_not_built() -> None:
    """Log once that the C++ kernels were not built."""
    logger.warning("the CPU kernels were not built (no C++ compiler?): the reference runs instead")


def is_built(purpose: str) -> Answer:
    """Whether the kernels were built; on machines without a GPU, logs a warning once if not.

    Args:
        purpose: the reason of a positive answer.
    """
    if library() is not None:
        return True, purpose
    if current_compute_capability() == CPU:  # with a GPU they are rarely used
        warn_not_built()
    return False, "was not built: the package was installed without a C++ compiler"


def level() -> str | None:
    """The instruction set of `LEVELS` in use; None if the kernels were not built."""
    loaded = library()
    return None if loaded is None else list(LEVELS)[loaded.halfbyte_cpu_level()]


def set_level(name: str | None) -> str:
    """Use an instruction set of `LEVELS`, or the highest below it that this CPU has.

    None (the default) selects the fastest: on Intel's CPUs "avx512vnni" before "avx512bf16".

    Returns:
        `level()`.

    Raises:
        RuntimeError: the kernels were not built.
    """
    loaded = library()
    if loaded is None:
        raise RuntimeError("the CPU kernels were not built")
    loaded.halfbyte_set_cpu_level(-1 if name is None else LEVELS[name])
    return str(level())


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
    """`GOMP_parallel` of the OpenMP that PyTorch uses; None if it has no such function."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except (AttributeError, OSError, TypeError):  # no such OpenMP; no dlopen(NULL) on Windows
        return None
