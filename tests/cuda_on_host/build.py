"""CUDA sources on the CPU: compiled unchanged by a C++ compiler, except for inline assembly.

`cuda.h` has the part of CUDA that they need. Every `asm` statement becomes the C++ that
stands for its text in `assembly.py`, most of it in `ptx.h`, `wgmma.h` and `bulk.h`; a source with
another one is refused.
"""

import ctypes
import mmap
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cuda_on_host.assembly import ASSEMBLY, HERE
from halfbyte.kernels.runtime import nvrtc, tensor_maps
from halfbyte.kernels.runtime.devices import Memory

_SOURCES = Path(nvrtc.__file__).parents[2]
_HEADER = Path(__file__).with_name("bulk.h")
_COMPILER = shutil.which("c++") or shutil.which("g++")
_OPTIONS = (
    *("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"),
    "-fno-strict-aliasing",  # vectors are read from arrays of scalars, as CUDA allows
    "-fvisibility=hidden",  # keeps apart what several libraries define alike
    "-U_FORTIFY_SOURCE",  # whose longjmp refuses to go to another stack, as fibers do
)

needs_compiler = pytest.mark.skipif(
    _COMPILER is None or sys.platform != "linux", reason="needs a C++ compiler, on Linux"
)

_STATEMENT = re.compile(
    r'\basm\s*(?:volatile\s*)?\(\s*((?:(?:"[^"]*"|\w+(?:\(\w*\))?)\s*)+)(.*?)\)\s*;', re.DOTALL
)
_TEXT = re.compile(r'"([^"]*)"|(\w+)')
_OPERAND = re.compile(r'"[=+]?\w"\s*\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)')
_SHARED = re.compile(
    r"\b(extern\s+)?__shared__\s(?:__align__\((\d+)\)\s)?([\w\s]*?)(\w+)\s*((?:\[[^\]]*\]\s*)*);"
)
_INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)
_KERNEL = re.compile(r"__global__ void ([^{;]*?)(\w+)\([\w\s,]*\)\s*\{")
"""A kernel's declaration: attributes (with the cluster size), then its name."""


class BoxMap(ctypes.Structure):
    """Replaces a `TensorMap` of two or three dimensions, the innermost first.

    Sizes and box are values, strides bytes. The swizzle follows from the width of a row; that the
    real map asks for the same one is not checked here.
    """

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 3),
        ("strides", ctypes.c_uint64 * 2),
        ("box", ctypes.c_uint32 * 3),
        ("value_bytes", ctypes.c_uint32),
        ("unused", ctypes.c_uint32 * 16),
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
        missing = 3 - len(sizes)
        sizes, box = (*sizes, *[1] * missing), (*box, *[1] * missing)
        return BoxMap(address, sizes, (*strides, *[0] * missing), box, dtype.itemsize)

    tensor_maps.tensor_map_of_pages.cache_clear()
    with patch.object(tensor_maps, "_encode", encode):
        yield
    tensor_maps.tensor_map_of_pages.cache_clear()


def build(
    name: str,
    macros: dict[str, int | None],
    folder: Path = _SOURCES,
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
) -> None:
    """Run a kernel, such as `build(...).plan_work`, to its end.

    Args:
        grid: CTAs.
        threads: of a CTA, a multiple of 32.
        arguments: the kernel's.
        shared_bytes: of dynamic shared memory.
        clusters_at_once: that run at the same time, in the order of their CTAs; the next ones begin
            when they have ended.

    Raises:
        RuntimeError: threads that did not come to the same barrier or operation of a warp, or that
            wait for ever; memory that is not theirs; a barrier in shared memory that is used
            before it is made, or at which other bytes arrive than it was told to expect; something
            that only a GPU has.
    """
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    message = function(clusters_at_once, grid, threads, shared_bytes, pointers)
    if message is not None:
        raise RuntimeError(message.decode())


@contextmanager
def overlapping_kernels(
    capability: int, is_compiled_in: Callable[[str], bool] = lambda macro: True
) -> Iterator[None]:
    """Let `nvrtc.load` build for the host and `nvrtc.launch` run there, whose launches overlap.

    Args:
        capability: of the GPU that is emulated.
        is_compiled_in: which macros are given to the compiler; each combination takes a run of it.
    """

    def load(name: str, macros: Any, functions: Any, device: Any) -> dict[str, nvrtc.Kernel]:
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
    ) -> None:
        assert overlap  # `nvrtc.launch` takes it back before SM90
        launch(kernel.function, grid, threads, *arguments, shared_bytes=kernel.shared_bytes)

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
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda_on_host_")


@cache
def _build(name: str, macros: tuple[tuple[str, int | None], ...], folder: Path) -> ctypes.CDLL:
    assert _COMPILER is not None, "tests that come here need a compiler"
    build_folder = Path(tempfile.mkdtemp(dir=_folder().name))
    _translate(name, folder, build_folder)
    kernels = _KERNEL.findall((folder / name).read_text())
    main, library = build_folder / "main.cpp", build_folder / "library.so"
    main.write_text(
        f'#include "{_HEADER}"\n#include "{name}"\n'
        # Of what stands before a kernel's name, this leaves the size of its clusters, or nothing.
        "#undef __cluster_dims__\n#define __cluster_dims__(x, y, z) x\n"
        "inline int cluster_size(int x = 1) { return x; }\n"
        + "".join(
            f'extern "C" __attribute__((visibility("default"))) const char* launch_{kernel}'
            "(int at_once, int grid, int threads, int shared_bytes, const void* const* arguments) {"
            "\n"
            f"  const int cluster = cluster_size({' '.join(before.split())});\n"
            f"  return {HERE}launch({kernel}, cluster, at_once, grid, threads, shared_bytes, "
            "arguments);\n"
            "}\n"
            for before, kernel in kernels
        )
    )
    options = [f"-D{key}" + ("" if value is None else f"={value}") for key, value in macros]
    command = [_COMPILER, *_OPTIONS, f"-I{build_folder}", *options, str(main), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{name} on the host: {result.stderr}")
    loaded = ctypes.CDLL(str(library))
    for _, kernel in kernels:
        function = getattr(loaded, f"launch_{kernel}")
        function.restype = ctypes.c_char_p
        setattr(loaded, kernel, function)
    return loaded


def _translate(name: str, folder: Path, to: Path) -> None:
    """Write the host version of a source and of its includes, line by line."""
    source = folder / name
    if not source.exists():
        source = _SOURCES / name
    text = source.read_text()
    for included in _INCLUDE.findall(text):
        if not (to / included).exists():
            _translate(included, folder, to)
    text = _STATEMENT.sub(_host_statement, text)
    if re.search(r"\basm\b\s*(volatile\s*)?\(", text):
        raise ValueError(f"{name}: an asm statement of an unknown form")
    text = _SHARED.sub(_host_variable, text)
    (to / name).parent.mkdir(parents=True, exist_ok=True)
    (to / name).write_text(f'#line 1 "{source}"\n{text}')


def _host_variable(match: re.Match[str]) -> str:
    is_dynamic, alignment, kind, name = match[1], match[2], match[3], match[4]
    if is_dynamic:
        return f"{kind}* const {name} = ({kind}*){HERE}dynamic_shared({alignment});"
    return f"{match[0]} {HERE}begin_with_garbage(&{name}, sizeof {name});"


def _host_statement(match: re.Match[str]) -> str:
    """The C++ of an `asm` statement; adjacent literals, and a macro before them, are one text."""
    text = "".join(f"{macro} " if macro else part for part, macro in _TEXT.findall(match[1]))
    text = re.sub(", *", ", ", text)  # with or without a space
    operands = _OPERAND.findall(match[2])
    if text in ASSEMBLY:
        statement = re.sub(r"%(\d)", lambda number: operands[int(number[1])], ASSEMBLY[text])
    else:
        raise ValueError(f"inline assembly that has no C++ here: {text}")
    return f"{statement};" + "\n" * match[0].count("\n")
