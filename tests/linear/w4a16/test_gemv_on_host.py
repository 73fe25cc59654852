"""The W4A16 GEMV kernel: launcher and CUDA source before SM90, run on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, c_int, c_void_p
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch

import cuda_on_host
from cuda_on_host import guarded
from halfbyte.linear.w4a16.dequant import launcher as linear_unpack
from halfbyte.linear.w4a16.gemv import launcher as linear
from halfbyte.linear.w4a16.gemv.plan import GemvPlan, Gpu, k_blocks, make_plan, row_units
from halfbyte.linear.w4a16.packed_weight import PackedWeight
from halfbyte.linear.w4a16.packed_words import DTYPES
from linear.gpus import RTX_3090
from linear.w4a16.test_w4a16_packed_weight import dequantized, packed_weight
from slow import one_in

pytestmark = cuda_on_host.needs_compiler

BF16, FP16 = DTYPES
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ROWS = (1, 2, 5, 8, 9, 16, 17, 33)
SHAPES = ((40, 16), (64, 128), (100, 400), (130, 528), (300, 656), (33, 1296))
"""Of weights."""
A100 = Gpu(80, 163 * 1024, 108, 0)

# CTA shapes, with groups and rounds to be filled in; some occur in no plan.
PLANS = (
    (BF16, GemvPlan(1, 1, 0, 0, warps=4, stages=2)),
    (FP16, GemvPlan(1, 1, 0, 0, warps=16, stages=2)),
    (FP16, GemvPlan(1, 2, 2, 0, warps=3, stages=1)),
    (BF16, GemvPlan(1, 4, 2, 0, warps=8, stages=3)),
    (BF16, GemvPlan(1, 8, 2, 0, warps=1, stages=2)),
    (FP16, GemvPlan(2, 1, 0, 0, warps=5, stages=3)),
    (BF16, GemvPlan(2, 2, 2, 0, warps=4, stages=2, ctas=4)),
    (FP16, GemvPlan(2, 4, 2, 0, warps=2, stages=4)),
    (BF16, GemvPlan(4, 1, 0, 0, warps=7, stages=1)),
    (FP16, GemvPlan(4, 2, 2, 0, warps=2, stages=3)),
    (BF16, GemvPlan(4, 4, 2, 0, warps=4, stages=2)),
    (FP16, GemvPlan(8, 1, 0, 0, warps=3, stages=2)),
)


OF_SHAPE = dict(PLANS[0][1]._replace(groups=1).macros_of_shape(64, 128, 1))

DIVIDE = """
#include "linear/w4a16/gemv/loader.cuh"

struct Numbers { const int *x, *by; int *out, count; };

extern "C" __global__ void divide(Numbers p) {
  for (int i = threadIdx.x; i < p.count; i += 32) p.out[i] = Divisor(p.by[i]).quotient(p.x[i]);
}
"""


class Numbers(Structure):
    _fields_ = (*((name, c_void_p) for name in ("x", "by", "out")), ("count", c_int))


def name(value: GemvPlan | torch.dtype) -> str:
    if isinstance(value, GemvPlan):
        tiles, split, _, _, warps, stages, *_ = value
        return f"{tiles}-tiles-{split}-ctas-{warps}-warps-{stages}-stages"
    return str(value)


@contextmanager
def on_host(compiled_in: bool = False, gpu: Gpu = A100) -> Iterator[None]:
    """Let the launcher's kernels run on the CPU; what it allocates begins as NaN.

    Args:
        compiled_in: whether the shape of the work is, for which every one takes the C++ compiler.
        gpu: that the launcher, and the kernels, find.
    """

    linear._gemv_kernels.cache_clear()
    linear.gemv_product.cache_clear()
    with (
        cuda_on_host.overlapping_kernels(
            gpu.compute_capability, lambda macro: compiled_in or macro not in OF_SHAPE
        ),
        cuda_on_host.tensor_maps_on_host(),
        patch.object(linear, "gpu_of", lambda device: gpu),
        patch.object(linear, "allocate", cuda_on_host.allocate),
    ):
        yield
    linear._gemv_kernels.cache_clear()
    linear.gemv_product.cache_clear()


def random_x(m: int, k: int, dtype: torch.dtype, seed: int, gap: int = 8) -> torch.Tensor:
    """`[m, k]`, with NaN between rows, `gap` of them, and none after the last one."""
    generator = torch.Generator().manual_seed(seed)
    x = guarded((m * (k + gap) - gap,), dtype).as_strided((m, k), (k + gap, 1))
    return x.copy_(torch.randn(m, k, generator=generator))


def random_bias(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


def multiply(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    plan: GemvPlan | None,
    compiled_in: bool = False,
    gpu: Gpu = A100,
) -> torch.Tensor:
    """The product by the launcher; memory after all tensors is unmapped."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        return guarded(t.shape, t.dtype).copy_(t)

    weight, weight_scale = moved(packed.weight), moved(packed.weight_scale)
    row_scale = moved(packed.row_scale)
    bias = None if bias is None else moved(bias)
    with on_host(compiled_in, gpu):
        return linear.run(x, weight, weight_scale, row_scale, bias, packed.n, plan=plan)


def assert_product(
    out: torch.Tensor, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None
) -> None:
    """Tolerance: float32 sums of 16 k, float32 sums of these, one rounding of the result."""
    weight = dequantized(packed, torch.float64)
    wanted = x.double() @ weight.t()
    sizes = x.double().abs() @ weight.t().abs()
    if bias is not None:
        wanted, sizes = wanted + bias.double(), sizes + bias.double().abs()
    kind = torch.finfo(out.dtype)
    bound = kind.eps / 2 * wanted.abs().clamp(min=kind.smallest_normal) + 2e-6 * sizes
    assert out.isfinite().all()
    worst = float(((out.double() - wanted).abs() / bound).max())
    assert worst <= 1, f"{worst:.1f} times the error that roundings may make"


def assert_products(
    dtype: torch.dtype,
    shape: GemvPlan,
    rows: tuple[int, ...],
    shapes: tuple[tuple[int, int], ...],
    gpu: Gpu,
) -> None:
    """Check products with random weights, plans and shapes, for a number of tokens."""
    rng = Random(repr(shape))
    for seed, m in enumerate(2 * rows):
        n, k = rng.choice([s for s in shapes if k_blocks(s[1]) >= shape.split])
        groups = rng.randint(1, row_units(n))
        plan = shape._replace(groups=groups)
        plan = plan._replace(round_units=rng.randint(1, plan.units(n)))
        packed = packed_weight(n, k, dtype)
        bias = random_bias(n, dtype) if seed % 3 == 0 else None
        x = random_x(m, k, dtype, seed, gap=8 * rng.randint(0, 20))
        assert_product(multiply(x, packed, bias, plan, gpu=gpu), x, packed, bias)


@pytest.mark.parametrize(("dtype", "shape"), one_in(2, PLANS), ids=name)
def test_products_are_right_however_the_work_is_cut(dtype: torch.dtype, shape: GemvPlan) -> None:
    """Padding between and after tokens of x is NaN, in global and in shared memory."""
    assert_products(dtype, shape, ROWS, SHAPES, A100)


@DTYPE
@pytest.mark.parametrize("m", [1, 8, 16, 40])
def test_plans_for_a_gpu_before_sm90(m: int, dtype: torch.dtype) -> None:
    n, k = 300, 1040
    assert make_plan(n, k, m, A100).join in (0, 2)
    packed = packed_weight(n, k, dtype)
    bias = random_bias(n, dtype)
    x = random_x(m, k, dtype, 0)
    out = multiply(x, packed, bias, None)
    assert_product(out, x, packed, bias)
    assert torch.equal(multiply(x, packed, bias, None, compiled_in=True), out)


@pytest.mark.parametrize("m", [1, 16])
def test_a_k_that_needs_more_ctas_than_usual(m: int) -> None:
    n, k = 40, 53248
    plan = make_plan(n, k, 16, RTX_3090)
    assert plan.split > 8
    packed = packed_weight(n, k, torch.bfloat16)
    x = random_x(m, k, torch.bfloat16, 0)
    assert_product(multiply(x, packed, None, plan, gpu=RTX_3090), x, packed, None)


@pytest.mark.parametrize(("dtype", "shape"), PLANS[::3], ids=name)
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype, shape: GemvPlan) -> None:
    packed = packed_weight(100, 1040, dtype)
    plan = shape._replace(groups=3, round_units=2)
    x = random_x(max(ROWS), 1040, dtype, 1)
    together = multiply(x, packed, None, plan)
    for m in ROWS:
        assert torch.equal(multiply(x[-m:], packed, None, plan), together[-m:])


def test_sums_of_many_tokens_are_reduced_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, shape = PLANS[2]
    packed = packed_weight(100, 400, dtype)
    plan = shape._replace(groups=2, round_units=2)
    x = random_x(33, 400, dtype, 2)
    at_once = multiply(x, packed, None, plan)
    monkeypatch.setattr(linear, "_MAX_PARTIAL_BYTES", 10 * 4 * 2 * 128)
    assert torch.equal(multiply(x, packed, None, plan), at_once)
    outer = multiply(x.reshape(3, 11, 400), packed, None, plan)
    assert torch.equal(outer, at_once.view(3, 11, 100))


def test_rows_of_x_may_have_more_dimensions() -> None:
    dtype, shape = PLANS[0]
    packed = packed_weight(100, 400, dtype)
    plan = shape._replace(groups=2, round_units=2)
    x = random_x(6, 400, dtype, 3)
    out = multiply(x, packed, None, plan)
    assert torch.equal(multiply(x.reshape(2, 3, 400), packed, None, plan), out.view(2, 3, 100))
    assert torch.equal(multiply(x[0], packed, None, plan), multiply(x[:1], packed, None, plan)[0])


@DTYPE
def test_unpacked_weights_are_the_dequantized_ones(dtype: torch.dtype) -> None:
    n, k = 300, 528
    packed = packed_weight(n, k, dtype)
    wanted = dequantized(packed, dtype)
    with on_host():
        for first, rows in ((0, n), (128, 33)):
            tensors = (packed.weight, packed.weight_scale, packed.row_scale)
            out = linear_unpack.unpack(*tensors, first, rows, k, dtype)
            assert torch.equal(out, wanted[first : first + rows])


def test_quotients_of_large_numbers(tmp_path: Path) -> None:
    """With reciprocals as inexact as on a GPU."""
    (tmp_path / "divide.cu").write_text(DIVIDE)
    library = cuda_on_host.build("divide.cu", {"X_BF16": 1, **dict(PLANS[0][1].macros())}, tmp_path)
    generator = torch.Generator().manual_seed(0)
    by = (2 ** (24 * torch.rand(20_000, generator=generator))).int()
    most = 2**24 // by
    # Around multiples, most of them large.
    x = (most * torch.rand(len(by), generator=generator).sqrt()).int() * by
    x = (x + torch.randint(-1, 2, x.shape, generator=generator)).clamp(0, 2**24).int()
    out = torch.empty_like(x)
    numbers = Numbers(x.data_ptr(), by.data_ptr(), out.data_ptr(), len(x))
    cuda_on_host.launch(library.divide, 1, 32, numbers)
    assert torch.equal(out, x // by)
