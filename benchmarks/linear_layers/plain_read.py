"""Time to only read the bytes of a weight: a lower bound for a linear layer.

Candidates are PyTorch's sum and, on NVIDIA GPUs, a small kernel with four 16-byte loads in flight
per thread and several grid sizes. The fastest is the plain read.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from benchmarks.linear_layers.ratios import judged_by
from benchmarks.timing import measure_in_turns, ready
from halfbyte.dispatch import is_installed
from halfbyte.kernels.runtime import nvrtc
from halfbyte.measure.timing import Call, copies

_THREADS = 512
_CTAS = (1, 2, 4)
"""Candidates of CTAs per SM."""
_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512)
read_all(const uint4* data, unsigned long long count, unsigned* out) {
  const unsigned long long step = gridDim.x * 512ull;
  unsigned acc = 0;
  for (unsigned long long i = blockIdx.x * 512ull + threadIdx.x; i < count; i += 4 * step) {
    uint4 v[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j * step < count) v[j] = __ldcs(data + i + j * step);
#pragma unroll
    for (int j = 0; j < 4; ++j) acc ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (acc == 0x12345678u) *out = acc;  // so that no load is left out
}
"""


def plain_read(num_bytes: int, device: torch.device) -> tuple[str, list[Call]]:
    """The fastest candidate that reads `num_bytes`, and calls of it on different data.

    Args:
        num_bytes: a multiple of 16.

    Returns:
        Name (`torch.sum`, or `kernel, 4 CTAs` per SM), and the calls.
    """
    data = [
        torch.randn(num_bytes // 4, device=device)  # neither NaN nor denormal
        for _ in range(max(2, copies(num_bytes, device)))
    ]
    variants: dict[str, Callable[[torch.Tensor], object]] = {"torch.sum": torch.sum}
    if device.type == "cuda" and is_installed("cuda.bindings"):
        out = torch.zeros(1, dtype=torch.int32, device=device)
        for ctas in _CTAS:
            variants[f"kernel, {ctas} CTAs"] = partial(_read, out=out, ctas=ctas)
    calls: dict[str, list[Call]] = {
        name: [partial(variant, tensor) for tensor in data] for name, variant in variants.items()
    }
    if len(calls) == 1:
        return next(iter(calls.items()))
    contenders = {name: ready(series, device, in_graph=True) for name, series in calls.items()}
    times = measure_in_turns(contenders, device, rounds=2)
    timing = judged_by(device.type == "cuda")[0]
    best = min(times, key=lambda name: times[name][timing])
    return best, calls[best]


def _read(data: torch.Tensor, out: torch.Tensor, ctas: int) -> None:
    device = data.device.index
    grid = ctas * torch.cuda.get_device_properties(device).multi_processor_count
    arguments: list[nvrtc.Argument] = [
        ctypes.c_void_p(data.data_ptr()),
        ctypes.c_uint64(data.nbytes // 16),
        ctypes.c_void_p(out.data_ptr()),
    ]
    nvrtc.launch(_kernel(device), grid, _THREADS, arguments)


@lru_cache(maxsize=8)
def _kernel(device: int) -> nvrtc.Kernel:
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_read(f"sm_{major}{minor}")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # creates the context if needed
        module = _check(driver.cuModuleLoadData(cubin))
        function = _check(driver.cuModuleGetFunction(module, b"read_all"))
        return nvrtc.Kernel(int(function), 0, device)


def compile_read(architecture: str) -> bytes:
    """Compile the kernel to a cubin, for an architecture such as `sm_90`; needs no GPU."""
    from cuda.bindings import nvrtc as compiler

    program = _check(compiler.nvrtcCreateProgram(_SOURCE.encode(), b"read.cu", 0, [], []))
    option = f"--gpu-architecture={architecture}".encode()
    _check(compiler.nvrtcCompileProgram(program, 1, [option]))
    cubin = b" " * _check(compiler.nvrtcGetCUBINSize(program))
    _check(compiler.nvrtcGetCUBIN(program, cubin))
    _check(compiler.nvrtcDestroyProgram(program))
    return cubin


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name} ({int(status)})")
    return values[0] if values else None
