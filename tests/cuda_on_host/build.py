"""CUDA sources on the CPU: loads and launches `compiler`'s libraries, also in place of NVRTC."""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cuda_on_host.compiler import SOURCES, library_of
from halfbyte.kernels.runtime import nvrtc, tensor_maps
from halfbyte.kernels.runtime.devices import Memory


class BoxMap(ctypes.Structure):
    """Replaces a `TensorMap` of two to four dimensions, the innermost first.

    Sizes and box are values, strides bytes. The swizzle follows from the width of a row; that the
    real map asks for the same one is not checked here.
    """

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
        ("value_bytes", ctypes.c_uint32),
        ("unused", ctypes.c_uint32 * 11),
    )


@contextmanager
def tensor_maps_on_host() -> Iterator[None]:
    """Make `tensor_maps` return `BoxMap`s; needs no driver."""

    def encode(
        address: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        dtype: torch.dtype,
    ) -> BoxMap:
        missing = 4 - len(sizes)
        sizes, box = (*sizes, *[1] * missing), (*box, *[1] * missing)
        return BoxMap(address, sizes, (*strides, *[0] * missing), box, dtype.itemsize)

    tensor_maps.tensor_map_of_pages.cache_clear()
    with patch.object(tensor_maps, "_encode", encode):
        yield
    tensor_maps.tensor_map_of_pages.cache_clear()


def build(
    name: str,
    macros: dict[str, int | None],
    folder: Path = SOURCES,
    capability: int = 90,
) -> ctypes.CDLL:
    """The kernels of a source, compiled once per process.

    Args:
        name, macros: as for `nvrtc.Program.of`.
        folder: of the source; what it includes lies there or in the package.
        capability: of the GPU that it is compiled for, such as 80.

    Raises:
        ValueError: inline assembly that has no C++ here.
        RuntimeError: the compiler refused the source.
    """
    return _build(name, (("__CUDA_ARCH__", 10 * capability), *macros.items()), folder)


def launch(
    function: Any,
    grid: int,
    threads: int,
    *arguments: ctypes.Structure,
    shared_bytes: int = 0,
    clusters_at_once: int = 1,
    late: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Run a kernel, such as `build(...).plan_work`, to its end.

    Args:
        grid: CTAs.
        threads: of a CTA, a multiple of 32.
        arguments: the kernel's.
        shared_bytes: of dynamic shared memory.
        clusters_at_once: that run at the same time, in the order of their CTAs; the next ones begin
            when they have ended.
        late: memory that the previous kernel is still writing, contiguous, and its contents before
            that, which asynchronous copies and `load_early` find until their thread has waited for
            that kernel. At least one thread has to wait for it.

    Raises:
        RuntimeError: threads that did not come to the same barrier or operation of a warp, or that
            wait for ever; memory that is not theirs; a barrier in shared memory that is used
            before it is made, or at which other bytes arrive than it was told to expect; something
            that only a GPU has.
    """
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    written, before = (None, None) if late is None else late
    function.set_late(
        ctypes.c_void_p(None if written is None else written.data_ptr()),
        ctypes.c_void_p(None if before is None else before.data_ptr()),
        ctypes.c_size_t(0 if written is None else written.nbytes),
    )
    message = function(clusters_at_once, grid, threads, shared_bytes, pointers)
    if message is not None:
        raise RuntimeError(message.decode())
    if late is not None and not function.count_waits():
        raise RuntimeError("it may end before the previous kernel, for which no thread waits")


@contextmanager
def overlapping_kernels(
    capability: int,
    is_compiled_in: Callable[[str], bool] = lambda macro: True,
    ctas_at_once: int = 1,
) -> Iterator[None]:
    """Let `nvrtc.load` build for the host and `nvrtc.launch` run there, whose launches overlap.

    Args:
        capability: of the GPU that is emulated.
        is_compiled_in: which macros are given to the compiler; each combination takes a run of it.
        ctas_at_once: that run at the same time, of launches that limit an SM's CTAs because they
            fill the GPU.
    """

    def load(
        name: str, macros: Any, functions: Any, device: Any, *, largest_share: bool = False
    ) -> dict[str, nvrtc.Kernel]:
        kept = {key: value for key, value in macros if is_compiled_in(key)}
        library = build(name, kept, capability=capability)
        return {entry: nvrtc.Kernel(getattr(library, entry), size, 0) for entry, size in functions}

    def run(
        kernel: nvrtc.Kernel,
        grid: int,
        threads: int,
        arguments: Sequence[ctypes.Structure],
        *,
        overlap: bool,
        ctas_per_sm: int = 0,
    ) -> None:
        assert overlap  # `nvrtc.launch` takes it back before SM90
        at_once = ctas_at_once if ctas_per_sm else 1
        size = kernel.shared_bytes
        function = kernel.function
        launch(function, grid, threads, *arguments, shared_bytes=size, clusters_at_once=at_once)

    with patch.object(nvrtc, "load", load), patch.object(nvrtc, "launch", run):
        yield


def guarded(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN, directly followed by unmapped memory."""
    count = prod(size)
    pages = -(-count * dtype.itemsize // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages * mmap.PAGESIZE
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError("mprotect: could not guard a page")
    all_bytes = torch.frombuffer(memory, dtype=torch.uint8, count=pages * mmap.PAGESIZE)
    return all_bytes.fill_(0xFF).view(dtype)[-count:].view(*size)


def allocate(memory: Memory, device: object) -> torch.Tensor:
    """Replaces `devices.allocate`; returns `guarded` tensors.

    Arguments must suit PyTorch's allocation for compiled code, which accepts only tuples of ints
    alone and no `torch.Size`; the one for the CPU is as strict as that for GPUs.
    """
    torch._C._dynamo.guards._empty_strided_cpu(*memory)  # type: ignore[attr-defined]
    return guarded(memory.shape, memory.dtype)


@cache
def _build(name: str, macros: tuple[tuple[str, int | None], ...], folder: Path) -> ctypes.CDLL:
    path, kernels = library_of(name, macros, folder)
    loaded = ctypes.CDLL(str(path))
    for kernel in kernels:
        function = getattr(loaded, f"launch_{kernel}")
        function.restype = ctypes.c_char_p
        function.set_late, function.count_waits = loaded.set_late, loaded.count_waits
        setattr(loaded, kernel, function)
    return loaded
