"""CUDA C++ compiled at run time with NVRTC: no build step and no CUDA toolkit.

NVRTC and the driver are reached through `cuda-bindings`, which PyTorch's CUDA builds depend on.
Sources are the `.cu` files of the package and their includes, named by their path in the package
(`kernels/runtime/basics.cuh`). Parameters such as head size and dtype are macros.

Without CUDA graphs a model launches hundreds of kernels per step, so host time matters: `launch`
calls the driver through ctypes, in a fraction of the time of the bindings' objects.
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

from halfbyte.dispatch import compute_capability_of_gpu
from halfbyte.kernels.runtime import cubin_cache
from halfbyte.kernels.runtime.occupancy import bytes_for_ctas

Argument = ctypes.Structure | ctypes.c_void_p | ctypes.c_int | ctypes.c_uint64

_FOLDER = Path(__file__).parents[2]
_INCLUDE = re.compile(rb'^#include "(.*)"', re.MULTILINE)
_OVERLAP = 6
"""`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`."""
_INVALID_CONTEXT = 201
"""`CUDA_ERROR_INVALID_CONTEXT`."""
_POINTERS = [Struct(f"{count}P").pack for count in range(9)]
"""Packs `count` argument addresses, by `count`."""


class _LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of `cuda.h`, with an int as value."""

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
    """NVRTC could not compile a source; the message is its log."""


class Kernel(NamedTuple):
    """A loaded function."""

    function: int
    """`CUfunction`."""
    shared_bytes: int
    """Max bytes of dynamic shared memory."""
    device: int
    """Index of the GPU that it was loaded on."""


def _included(text: bytes) -> dict[bytes, bytes]:
    """Contents of all headers that a source includes, directly or indirectly, by name."""
    headers: dict[bytes, bytes] = {}
    names = _INCLUDE.findall(text)
    while names:
        name = names.pop()
        if name not in headers:
            headers[name] = (_FOLDER / name.decode()).read_bytes()
            names += _INCLUDE.findall(headers[name])
    return dict(sorted(headers.items()))


class Program(NamedTuple):
    """A source with its headers and compiler options."""

    file: bytes
    text: bytes
    headers: list[bytes]
    """Contents of the headers."""
    header_files: list[bytes]
    architecture: str
    options: list[bytes]

    @classmethod
    def of(cls, name: str, macros: dict[str, int | None], architecture: str) -> "Program":
        """A source of the package; needs neither a GPU nor a compiler.

        Args:
            name: path of the source in the package, such as `attention/decode/plan.cu`.
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
        """Everything that the cubin depends on."""
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
    """Full versions of the NVRTC packages (NVRTC itself only tells major and minor), if
    installed."""
    versions = []
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with suppress(PackageNotFoundError):
            versions.append(version(package))
    return versions


@lru_cache(maxsize=4096)  # an evicted kernel would be loaded again, perhaps during graph capture
def load(
    name: str,
    macros: tuple[tuple[str, int | None], ...],
    functions: tuple[tuple[str, int], ...],
    device: int,
    *,
    largest_share: bool = False,
) -> dict[str, Kernel]:
    """Compile for a device and load; cached per process.

    Args:
        name, macros: as for `Program.of`, the macros as pairs.
        functions: `(name, bytes of dynamic shared memory)` of the kernels wanted.
        device: index of the CUDA device.
        largest_share: whether they ask for an SM's largest share of shared memory; the rest is L1.
            The driver's choice may be just enough for a kernel's own CTAs, and then CTAs of the
            next kernel cannot start beside them.
    """
    from cuda.bindings import driver

    compute_capability = compute_capability_of_gpu(device)
    suffix = "a" if compute_capability >= 90 else ""
    program = Program.of(name, dict(macros), f"sm_{compute_capability}{suffix}")
    cubin = cubin_cache.cubin(name, program.made_from(), program.compiled)
    with torch.cuda.device(device):
        torch.empty(1, device=torch.device("cuda", device))  # makes sure that the context exists
        # Memory that PyTorch had kept comes without a CUDA call, the first of this thread.
        _bind_context(device)
        module = _check(driver.cuModuleLoadData(cubin))
        kernels = {}
        for function_name, shared_bytes in functions:
            function = int(_check(driver.cuModuleGetFunction(module, function_name.encode())))
            _allow_shared_bytes(function, shared_bytes)
            if largest_share:
                share = (
                    driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                )
                _check(driver.cuFuncSetAttribute(driver.CUfunction(function), share, 100))
            kernels[function_name] = Kernel(function, shared_bytes, device)
    return kernels


def _allow_shared_bytes(function: int, shared_bytes: int) -> None:
    """Raise the limit of a function's dynamic shared memory, which is 48 KiB at first."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUfunction(function)
    if _check(driver.cuFuncGetAttribute(attribute, handle)) < shared_bytes:
        _check(driver.cuFuncSetAttribute(handle, attribute, shared_bytes))


def launch(
    kernel: Kernel,
    grid: int,
    threads: int,
    arguments: Sequence[Argument],
    *,
    overlap: bool = False,
    ctas_per_sm: int = 0,
) -> None:
    """Launch on the current stream of the kernel's GPU.

    Args:
        overlap: programmatic dependent launch (SM90 and later, otherwise ignored): the kernel
            may start before earlier ones have ended, not the previous one alone. Before it
            executes `griddepcontrol.wait` it may only read weights, see `basics.cuh`.
        ctas_per_sm: max CTAs that share an SM if launches overlap; 0 for as many as fit. For grids
            that fill the GPU: such a kernel gets SMs one by one, as the previous one leaves them.
            If more of its CTAs fit on an SM than the grid has per SM, the first free SMs take too
            many, and the last ones get none.

    Raises:
        RuntimeError: the driver returned an error.
    """
    function, shared_bytes, device = kernel
    # As PyTorch's compiled code does; ten times as fast as `torch.cuda.current_stream`.
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, threads, arguments, overlap=overlap, ctas_per_sm=ctas_per_sm)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    overlap = overlap and compute_capability_of_gpu(device) >= 90
    if overlap and ctas_per_sm:
        shared_bytes = _shared_bytes_for(kernel, ctas_per_sm)
    config = _launch_config(grid, threads, shared_bytes, stream, overlap)
    pointers = _POINTERS[len(arguments)](*[addressof(argument) for argument in arguments])
    launch_arguments = addressof(config), function, pointers, None
    status = _launcher()(*launch_arguments)
    if status == _INVALID_CONTEXT:  # the first CUDA call of this thread
        _bind_context(device)
        status = _launcher()(*launch_arguments)
    if status:
        from cuda.bindings import driver

        _check((driver.CUresult(status),))


@lru_cache(maxsize=4096)
def _shared_bytes_for(kernel: Kernel, ctas_per_sm: int) -> int:
    """Dynamic shared memory with which no more CTAs of a kernel fit on an SM."""
    properties = torch.cuda.get_device_properties(kernel.device)
    shared_bytes = bytes_for_ctas(
        kernel.shared_bytes, ctas_per_sm, properties.shared_memory_per_multiprocessor
    )
    _allow_shared_bytes(kernel.function, shared_bytes)
    return shared_bytes


@lru_cache(maxsize=4096)
def _launch_config(
    grid: int, threads: int, shared_bytes: int, stream: int, overlap: bool
) -> _LaunchConfig:
    """The launch configuration; immutable after creation, because threads share it."""
    config = _LaunchConfig((grid, 1, 1), (threads, 1, 1), shared_bytes, stream)
    if overlap:
        config.attributes = ctypes.pointer(_LaunchAttribute(id=_OVERLAP, value=1))
        config.attribute_count = 1
    return config


def _bind_context(device: int) -> None:
    """Make PyTorch's context of a device current in this thread; works during graph capture."""
    from cuda.bindings import driver

    context = _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(device))))
    _check(driver.cuCtxSetCurrent(context))


@cache
def _launcher() -> Any:
    """`cuLaunchKernelEx` by ctypes, which releases the GIL while a full launch queue blocks it."""
    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    function = driver.cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    return function


def _check(result: tuple[Any, ...]) -> Any:
    """The values of a binding's result; raises RuntimeError unless the status is success (0)."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name} ({int(status)})")
    return values[0] if len(values) == 1 else tuple(values)
