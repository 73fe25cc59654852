"""CUDA on the CPU: barriers and shuffles do what they say, and what goes wrong says so."""

import ctypes
from pathlib import Path

import pytest
import torch

from cuda_on_host import build, guarded, launch, needs_compiler

pytestmark = needs_compiler

SOURCE = """
struct Params { int* out; float x; float y; };

extern "C" __global__ void __launch_bounds__(128) total(Params p) {
  __shared__ int sums[4];
  int x = threadIdx.x * blockIdx.x;
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) p.out[blockIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
}

extern "C" __global__ void running_total(Params p) {
  int x = threadIdx.x;
  for (int o = 1; o < 32; o <<= 1) {
    const int y = __shfl_up_sync(~0u, x, o);
    if (threadIdx.x >= o) x += y;
  }
  p.out[threadIdx.x] = x;
}

extern "C" __global__ void without_barrier(Params p) {
  __shared__ int values[128];
  values[threadIdx.x] = threadIdx.x;
  p.out[threadIdx.x] = values[127 - threadIdx.x];
}

extern "C" __global__ void one_warp_ends(Params p) {
  if (threadIdx.x < 32) return;
  __syncthreads();
}

extern "C" __global__ void two_barriers(Params p) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}

extern "C" __global__ void half_a_warp(Params p) {
  if (threadIdx.x % 32 < 16) __shfl_sync(~0u, 1, 0);
}

extern "C" __global__ void a_mask(Params p) { __shfl_sync(0xFFFFu, 1, 0); }

extern "C" __global__ void convert(Params p) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(p.out[0]) : "f"(p.x), "f"(p.y));
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;"
               : "=r"(p.out[1])
               : "f"(p.x), "f"((p.y)));
}
"""


class Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("x", ctypes.c_float), ("y", ctypes.c_float))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "some.cu").write_text(SOURCE)
    return build("some.cu", {}, folder)


def run(library: ctypes.CDLL, name: str, grid: int = 1, threads: int = 128) -> list[int]:
    out = torch.zeros(128, dtype=torch.int32)
    launch(getattr(library, name), grid, threads, Params(out.data_ptr()))
    return out.tolist()


def test_threads_meet(library: ctypes.CDLL) -> None:
    assert run(library, "total", grid=5)[:5] == [i * 127 * 64 for i in range(5)]
    assert run(library, "running_total", threads=32)[:32] == [i * (i + 1) // 2 for i in range(32)]


def test_missing_barrier_shows(library: ctypes.CDLL) -> None:
    assert run(library, "without_barrier") != list(range(127, -1, -1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_warp_ends", "thread 0 is at its end .*, thread 32 at a barrier"),
        ("two_barriers", r"at a barrier \(line 35\), thread 32 at a barrier \(line 37\)"),
        ("half_a_warp", r"thread \d+ is at a warp's operation .*, thread \d+ at its end"),
        ("a_mask", "some of a warp's lanes"),
    ],
)
def test_threads_that_do_not_meet_are_an_error(
    library: ctypes.CDLL, name: str, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(library, name)
    assert run(library, "total")[0] == 0, "the next launch begins afresh"


def test_memory_that_is_not_there_is_an_error(library: ctypes.CDLL) -> None:
    out = guarded((32,), torch.int32)
    launch(library.running_total, 1, 32, Params(out.data_ptr()))
    assert out[-1] == 31 * 16
    with pytest.raises(RuntimeError, match=r"block 0, thread \d+: nothing lies at"):
        launch(library.running_total, 1, 64, Params(out.data_ptr()))


def test_conversions_round_as_torch_does(library: ctypes.CDLL) -> None:
    bits = torch.randint(-(2**31), 2**31, (2000,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)
    exponents = torch.arange(-30, 20).repeat(20)
    halfway = (torch.arange(1000) / 8 - 60) * 2.0**exponents
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65504, 65519.9, 65520, 3.4e38, 2**-25])
    x = torch.cat([x[~x.isnan()], halfway, edges, (1 + torch.arange(64) / 2**12) * 3])
    out = torch.zeros(2, dtype=torch.int32)
    for high, low in zip(x.tolist(), x.flip(0).tolist(), strict=True):
        launch(library.convert, 1, 32, Params(out.data_ptr(), high, low))
        for packed, dtype in zip(out, (torch.float16, torch.bfloat16), strict=True):
            expected = torch.tensor([low, high]).to(dtype)
            assert packed.view(1).view(torch.int16).tolist() == expected.view(torch.int16).tolist()


def test_unknown_assembly_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.cu").write_text('void f() { asm volatile("bar.sync 1, 64;"); }')
    with pytest.raises(ValueError, match=r"no C\+\+ here: bar.sync 1, 64;"):
        build("other.cu", {}, tmp_path)


def test_errors_of_the_compiler_name_the_line_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text("int x;\nint y = z;\n")
    with pytest.raises(RuntimeError, match=r"wrong.cu:2:.*z"):
        build("wrong.cu", {}, tmp_path)
