"""The W4A16 GEMV kernel with SM90 features on the CPU: TMA, barriers, clusters."""

import ctypes

import pytest
import torch

import cuda_on_host
from halfbyte.linear.w4a16.gemv.plan import GemvPlan, make_plan
from halfbyte.linear.w4a16.packed_weight import pack_weight
from linear.gpus import H200
from linear.w4a16.test_gemv_on_host import (
    BF16,
    DTYPE,
    FP16,
    assert_product,
    assert_products,
    multiply,
    name,
    random_bias,
    random_x,
)
from linear.w4a16.test_w4a16_packed_weight import COMMON_SCALE, packed_weight, random_weight
from slow import one_in

pytestmark = cuda_on_host.needs_compiler

ROWS = (1, 2, 8, 9, 16, 17, 33)
SHAPES = (
    (40, 16),
    (64, 128),
    (100, 400),
    (130, 528),
    (300, 656),
    (33, 1296),
    (64, 2000),
    (70, 2416),
)
"""Of weights. If two CTAs share them, x of the last two comes in the max number of slices, and two
blocks of k at a time."""

# CTA shapes, with groups and rounds to be filled in; some occur in no plan.
PLANS = (
    (BF16, GemvPlan(1, 1, 0, 0, warps=4, stages=2)),
    (FP16, GemvPlan(4, 1, 0, 0, warps=5, stages=1)),
    (BF16, GemvPlan(1, 2, 1, 0, warps=4, stages=2)),
    (FP16, GemvPlan(1, 2, 1, 0, warps=3, stages=1)),
    (BF16, GemvPlan(1, 8, 2, 0, warps=2, stages=2)),
    (FP16, GemvPlan(2, 2, 1, 0, warps=5, stages=3)),
    (BF16, GemvPlan(2, 2, 1, 0, warps=4, stages=1, ctas=2)),
    (FP16, GemvPlan(4, 2, 1, 0, warps=2, stages=2)),
    (BF16, GemvPlan(4, 2, 1, 0, warps=8, stages=1)),
    (FP16, GemvPlan(8, 2, 1, 0, warps=1, stages=2)),
    (BF16, GemvPlan(2, 4, 2, 0, warps=3, stages=2)),
)

COMPILED_IN = {
    "one-round": (2, 300, 1024, 1, 3, 4),
    "several-rounds": (3, 300, 1296, 8, 2, 2),
    "through-memory": (4, 130, 1296, 9, 1, 3),
    "two-tiles-of-columns": (5, 300, 1024, 16, 3, 4),
    "two-blocks-of-x": (5, 70, 2416, 33, 2, 2),
    "no-cluster": (1, 130, 1296, 33, 2, 2),
    # Every warp has the same number of items, all of one unit.
    "even": (0, 192, 1024, 1, 6, 1),
    "even-pair": (2, 192, 1024, 8, 3, 2),
    "even-through-memory": (4, 192, 2048, 9, 6, 1),
    "as-many-but-across-units": (0, 192, 512, 1, 2, 3),
}
"""Which of the `PLANS`, n, k, m, groups and units of a round."""

EXCHANGE = """
#include "linear/w4a16/gemv/sums.cuh"

struct Exchange { float* out; int made, expected, synced, waits; };

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) exchange(Exchange p) {
  extern __shared__ __align__(128) u8 shared[];
  const u32 barrier = shared_address(shared);
  if (threadIdx.x == 0) {
    if (p.made) barrier_init(barrier, 1);
    barrier_expect(barrier, p.expected);
  }
  if (p.synced) cluster_sync();
  const float x[4] = {1, 2, 3, (float)blockIdx.x};
  const u32 other = (blockIdx.x + 1) % SPLIT;
  const u32 to = map_to_rank(barrier + 16, other);
  if (threadIdx.x == 0) send_floats(x, to, map_to_rank(barrier, other));
  if (p.waits) barrier_wait(barrier, 0);
  p.out[blockIdx.x * 32 + threadIdx.x] = __uint_as_float(load16(barrier + 16).w);
}
"""


class Exchange(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("made", "expected", "synced", "waits")),
    )


@pytest.mark.parametrize(("dtype", "shape"), one_in(3, PLANS), ids=name)
def test_products_are_right_however_the_work_is_cut(dtype: torch.dtype, shape: GemvPlan) -> None:
    assert_products(dtype, shape, ROWS, SHAPES, H200)


@pytest.mark.parametrize(
    "case", one_in(2, (pytest.param(case, id=name) for name, case in COMPILED_IN.items()))
)
def test_shapes_that_are_compiled_in_change_nothing(case: tuple[int, ...]) -> None:
    index, n, k, m, groups, round_units = case
    dtype, shape = PLANS[index]
    plan = shape._replace(groups=groups, round_units=round_units)
    packed = packed_weight(n, k, dtype)
    x, bias = random_x(m, k, dtype, 0), random_bias(n, dtype)
    out = multiply(x, packed, bias, plan, compiled_in=True, gpu=H200)
    assert_product(out, x, packed, bias)
    assert torch.equal(multiply(x, packed, bias, plan, gpu=H200), out)


@DTYPE
@pytest.mark.parametrize(
    ("n", "k", "m", "join"),
    [(300, 1040, 1, 1), (300, 1040, 40, 1), (100, 528, 8, 0), (40, 4096, 16, 2)],
)
def test_plans_for_an_h200(n: int, k: int, m: int, join: int, dtype: torch.dtype) -> None:
    assert make_plan(n, k, m, H200).join == join
    packed = packed_weight(n, k, dtype)
    x = random_x(m, k, dtype, 0)
    assert_product(multiply(x, packed, None, None, gpu=H200), x, packed, None)


@pytest.mark.parametrize(("dtype", "shape"), PLANS[1:8:2], ids=name)
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype, shape: GemvPlan) -> None:
    """Products of the first 512 k and of the next cancel: the remainder depends on the order."""
    data, scales = random_weight(100, 1040)
    data[:, 256:512] = data[:, :256]
    scales[:, 32:64] = scales[:, :32]
    packed = pack_weight(data, scales, torch.tensor([COMMON_SCALE]), (100,), dtype)
    plan = shape._replace(groups=2, round_units=1)
    x = random_x(max(ROWS), 1040, dtype, 1)
    x[:, 512:1024] = -x[:, :512]
    x[:, 1024:] *= 2**-12
    together = multiply(x, packed, None, plan, gpu=H200)
    for m in ROWS:
        assert torch.equal(multiply(x[-m:], packed, None, plan, gpu=H200), together[-m:])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "exchange.cu").write_text(EXCHANGE)
    macros: dict[str, int | None] = {**dict(GemvPlan(1, 4, 1, 0).macros()), "X_BF16": 1}
    return cuda_on_host.build("exchange.cu", macros, folder)


def exchange(
    library: ctypes.CDLL, made: int = 1, expected: int = 16, synced: int = 1, waits: int = 1
) -> torch.Tensor:
    """The values that the CTAs of two clusters received: the index of the sender."""
    out = torch.zeros(8 * 32)
    parameters = Exchange(out.data_ptr(), made, expected, synced, waits)
    cuda_on_host.launch(library.exchange, 8, 32, parameters, shared_bytes=32)
    return out.view(8, 32)


def test_ctas_of_a_cluster_send_to_each_other(library: ctypes.CDLL) -> None:
    for _ in range(20):
        assert (exchange(library) == torch.tensor([[3, 0, 1, 2, 7, 4, 5, 6]]).t()).all()


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("made", 0, "the barrier at offset 0 is not there yet"),
        ("expected", 32, r"thread \d+ waits for ever"),
        ("expected", 0, "16 bytes more than expected|ends before all bytes|CTA that has ended"),
        ("synced", 0, "the barrier at offset 0 is not there yet"),
        ("waits", 0, "16 bytes less than expected|ends before all bytes|CTA that has ended"),
    ],
)
def test_what_is_wrong_in_a_cluster_says_so(
    library: ctypes.CDLL, argument: str, value: int, message: str
) -> None:
    def repeat() -> None:
        for _ in range(50):
            exchange(library, **{argument: value})

    with pytest.raises(RuntimeError, match=message):
        repeat()
    exchange(library)
