"""CUDA C++ compiled at run time: no build step, no toolkit, once per machine and kernel.

NVRTC and the driver are reached through `cuda-bindings`, which PyTorch's CUDA builds depend on.
Sources are the `.cu` files of the package and what they include, all named by their place in it
(`kernels/runtime/basics.cuh`); what varies (head size, dtype, ...) is a macro.

A model without CUDA graphs launches hundreds of times per step, and the host's time counts:
`launch` goes to the driver through ctypes, which takes a fraction of what the bindings' objects do.
"""

import ctypes
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from ctypes import addressof
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import torch

from halfbyte.dispatch import capability_of_gpu
from halfbyte.kernels.runtime import cubin_cache

Argument = ctypes.Structure | ctypes.c_void_p | ctypes.c_int | ctypes.c_uint64

_FOLDER = Path(__file__).parents[2]
_INCLUDE = re.compile(rb'^#include "(.*)"', re.MULTILINE)
_OVERLAP = 6
"""`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`."""
_INVALID_CONTEXT = 201
"""`CUDA_ERROR_INVALID_CONTEXT`."""
_POINTERS = [Struct(f"{count}P").pack for count in range(9)]
"""Pack addresses of arguments, by how many there are."""


class _LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of `cuda.h`, with a value that is a number."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of `cuda.h`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class CompileError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


class Kernel(NamedTuple):
    """A loaded function."""

    function: int
    """`CUfunction`."""
    shared_bytes: int
    """Of dynamic shared memory, that it may use."""
    device: int
    """That it was loaded for."""


def _included(text: bytes) -> dict[bytes, bytes]:
    """Texts of the headers that a source includes, and of those that they include, by name."""
    headers: dict[bytes, bytes] = {}
    names = _INCLUDE.findall(text)
    while names:
        name = names.pop()
        if name not in headers:
            headers[name] = (_FOLDER / name.decode()).read_bytes()
            names += _INCLUDE.findall(headers[name])
    return dict(sorted(headers.items()))


class Program(NamedTuple):
    """A source, and what it is compiled with."""

    file: bytes
    text: bytes
    headers: list[bytes]
    """Their texts."""
    header_files: list[bytes]
    architecture: str
    options: list[bytes]

    @classmethod
    def of(cls, name: str, macros: dict[str, int | None], architecture: str) -> "Program":
        """A source of the package; needs neither a GPU nor a compiler.

        Args:
            name: place of the source in the package, such as `attention/decode/plan.cu`.
            macros: defined for the source; None defines without a value.
            architecture: such as `sm_80` or `sm_90a`.
        """
        options = [f"-arch={architecture}", "--std=c++17", "--extra-device-vectorization"]
        options += [f"-D{key}" + ("" if v is None else f"={v}") for key, v in macros.items()]
        text = (_FOLDER / name).read_bytes()
        headers = _included(text)
        return cls(
            file=name.encode(),
            text=text,
            headers=list(headers.values()),
            header_files=list(headers),
            architecture=architecture,
            options=[option.encode() for option in options],
        )

    def made_from(self) -> list[bytes]:
        """All that the cubin depends on."""
        from cuda.bindings import nvrtc

        compiler = [str(_check(nvrtc.nvrtcVersion())), *_versions_of_packages()]
        sources = [self.text, *self.headers, *self.header_files]
        return [*(text.encode() for text in compiler), *sources, *self.options]

    def compiled(self) -> bytes:
        """The cubin; raises CompileError."""
        from cuda.bindings import nvrtc

        program = _check(
            nvrtc.nvrtcCreateProgram(
                self.text, self.file, len(self.headers), self.headers, self.header_files
            )
        )
        (status,) = nvrtc.nvrtcCompileProgram(program, len(self.options), self.options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            message = log.rstrip(b"\0").decode().strip()
            raise CompileError(f"{self.file.decode()} for {self.architecture}: {message}")
        cubin = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
        nvrtc.nvrtcDestroyProgram(program)
        return cubin


@cache
def _versions_of_packages() -> list[str]:
    """To the last digit, which NVRTC itself does not tell; empty where it came another way."""
    versions = []
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with suppress(PackageNotFoundError):
            versions.append(version(package))
    return versions


@lru_cache(maxsize=4096)  # what was forgotten would be loaded again, perhaps within a capture
def load(
    name: str,
    macros: tuple[tuple[str, int | None], ...],
    functions: tuple[tuple[str, int], ...],
    device: int,
) -> dict[str, Kernel]:
    """Compile for a device and load; cached per process.

    Args:
        name, macros: as for `Program.of`, the macros as pairs.
        functions: `(name, bytes of dynamic shared memory)` of the kernels wanted.
        device: index of the CUDA device.
    """
    from cuda.bindings import driver

    capability = capability_of_gpu(device)
    suffix = "a" if capability >= 90 else ""
    program = Program.of(name, dict(macros), f"sm_{capability}{suffix}")
    cubin = cubin_cache.cubin(name, program.made_from(), program.compiled)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes sure that the context exists
        module = _check(driver.cuModuleLoadData(cubin))
        kernels = {}
        for function_name, shared_bytes in functions:
            function = _check(driver.cuModuleGetFunction(module, function_name.encode()))
            if shared_bytes > 48 * 1024:
                attribute = driver.CUfunction_attribute
                _check(
                    driver.cuFuncSetAttribute(
                        function,
                        attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        shared_bytes,
                    )
                )
            kernels[function_name] = Kernel(int(function), shared_bytes, device)
    return kernels


def launch(
    kernel: Kernel,
    grid: int,
    threads: int,
    arguments: Sequence[Argument],
    *,
    overlap: bool = False,
) -> None:
    """Launch on the current stream of the kernel's GPU, with arguments as their ctypes types say.

    Args:
        overlap: let it start before the kernel in front of it has ended, on GPUs that can
            ("programmatic dependent launch", SM90 and later); it must wait with
            `griddepcontrol.wait` before it reads.

    Raises:
        RuntimeError: the driver refuses it.
    """
    function, shared_bytes, device = kernel
    # As PyTorch's compiled code does; `torch.cuda.current_stream` takes ten times as long.
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, threads, arguments, overlap=overlap)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    overlap = overlap and capability_of_gpu(device) >= 90
    config = _launch_config(grid, threads, shared_bytes, stream, overlap)
    pointers = _POINTERS[len(arguments)](*[addressof(argument) for argument in arguments])
    told = addressof(config), function, pointers, None
    status = _launcher()(*told)
    if status == _INVALID_CONTEXT:  # this thread has done nothing on a GPU yet
        _bind_context(device)
        status = _launcher()(*told)
    if status:
        from cuda.bindings import driver

        _check((driver.CUresult(status),))


@lru_cache(maxsize=4096)
def _launch_config(
    grid: int, threads: int, shared_bytes: int, stream: int, overlap: bool
) -> _LaunchConfig:
    """What the driver is told; never written to again, as other threads may be reading it."""
    config = _LaunchConfig((grid, 1, 1), (threads, 1, 1), shared_bytes, stream)
    if overlap:
        config.attributes = ctypes.pointer(_LaunchAttribute(id=_OVERLAP, value=1))
        config.attribute_count = 1
    return config


def _bind_context(device: int) -> None:
    """Give the thread PyTorch's context of a device, also while a graph is captured."""
    from cuda.bindings import driver

    context = _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(device))))
    _check(driver.cuCtxSetCurrent(context))


@cache
def _launcher() -> Any:
    """`cuLaunchKernelEx`; other threads of Python run while it waits for launches in front."""
    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    function = driver.cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    return function


def _check(result: tuple[Any, ...]) -> Any:
    """The values of a binding's result; its status must be success (0)."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name} ({int(status)})")
    return values[0] if len(values) == 1 else tuple(values)
