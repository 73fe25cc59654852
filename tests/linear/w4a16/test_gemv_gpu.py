"""W4A16 GEMV and dequantized weights on a GPU: products, strides of x, graphs."""

import pytest
import torch

from halfbyte.linear.w4a16.gemv import plan as linear_plan
from halfbyte.linear.w4a16.gemv.plan import GemvPlan
from halfbyte.linear.w4a16.packed_weight import PackedWeight
from linear.w4a16.test_w4a16_packed_weight import DTYPE, dequantized, packed_weight

pytestmark = pytest.mark.gpu


def expected64(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in float64, of the weights as loaded."""
    weight = dequantized(packed, torch.float64)
    out = x.double() @ weight.t()
    return out if bias is None else out + bias.double()


def assert_rounded_once(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within the result's rounding, and float32 sums of it."""
    unit = torch.finfo(out.dtype).eps / 2
    bound = unit * wanted.abs() + 2e-5 * wanted.abs().max()
    assert ((out.double() - wanted).abs() <= bound).all()


@DTYPE
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (300, 528), (64, 128), (2048, 14336), (40, 16)])
def test_small_m(n: int, k: int, with_bias: bool, dtype: torch.dtype) -> None:
    from halfbyte.linear.w4a16.gemv.launcher import run

    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    bias = torch.randn(n, device="cuda", dtype=dtype) if with_bias else None
    for m in (1, 2, 5, 8, 9, 16, 17, 33, 64, 100):
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        out = run(x, *tensors, bias, n)
        assert_rounded_once(out, expected64(x, packed, bias))


@pytest.mark.parametrize("m", [1, 3, 5, 11, 20])
def test_what_lies_where_rows_would_be_does_not_matter(m: int) -> None:
    """Shared memory of absent tokens still has the previous call's contents: NaN here."""
    from halfbyte.linear.w4a16.gemv.launcher import run
    from halfbyte.linear.w4a16.gpu import gpu_of

    n, k = 6144, 4096
    packed = packed_weight(n, k, torch.bfloat16, "cuda")
    arguments = (packed.weight, packed.weight_scale, packed.row_scale, None, n)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    plan = linear_plan.make_plan(n, k, m, gpu_of(0))
    rows = plan.columns
    run(x.new_full((rows, k), torch.nan), *arguments, plan=plan)
    out = run(x, *arguments, plan=plan)
    assert_rounded_once(out, expected64(x, packed, None))


def test_rows_of_any_stride() -> None:
    from halfbyte.linear.w4a16.gemv.launcher import run

    packed = packed_weight(128, 208, torch.bfloat16, "cuda")
    arguments = (packed.weight, packed.weight_scale, packed.row_scale, None, 128)
    memory = torch.randn(24 * 300, device="cuda", dtype=torch.bfloat16)
    for m, stride, start in (
        (1, 3, 0),
        (3, 208, 0),
        (3, 256, 8),
        (9, 300, 0),
        (5, 209, 1),
        (4, 0, 0),
    ):
        x = torch.as_strided(memory, (m, 208), (stride, 1), start)
        out = run(x, *arguments)
        assert_rounded_once(out, expected64(x, packed, None))


@DTYPE
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_every_split_of_the_work(tiles: int, split: int, dtype: torch.dtype) -> None:
    from halfbyte.linear.w4a16.gemv.launcher import run
    from halfbyte.linear.w4a16.gpu import gpu_of

    n, k = 448, 1152
    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    x = torch.randn(8 * tiles + 3, k, device="cuda", dtype=dtype)
    wanted = expected64(x, packed, None)
    clusters = torch.cuda.get_device_capability()[0] >= 9
    for join in (0,) if split == 1 else (1, 2) if clusters and split == 2 else (2,):
        for groups, rounds, warps, stages, ctas in (
            (3, 2, 8, 2, 1),
            (14, 1, 4, 3, 1),
            (14, 1, 8, 1, 2),
            (1, 5, 16, 1, 1),
        ):
            if ctas > 1 and tiles > 2:
                continue
            plan = GemvPlan(tiles, split, join, groups, warps, stages, ctas, rounds)
            if plan.shared_bytes(n, k, x.shape[0]) > gpu_of(0).bytes_of_cta(ctas):
                continue
            out = run(x, *tensors, None, n, plan=plan)
            assert_rounded_once(out, wanted)


@DTYPE
def test_sums_of_many_tokens_are_reduced_in_parts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.linear.w4a16.gemv import launcher as linear

    n, k = 448, 1152
    packed = packed_weight(n, k, dtype, "cuda")
    arguments = (packed.weight, packed.weight_scale, packed.row_scale, None, n)
    x = torch.randn(101, k, device="cuda", dtype=dtype)
    plan = GemvPlan(2, 4, 2, 14, warps=8, round_units=1)
    at_once = linear.run(x, *arguments, plan=plan)
    monkeypatch.setattr(linear, "_MAX_PARTIAL_BYTES", 30 * 4 * 4 * 448)
    assert torch.equal(linear.run(x, *arguments, plan=plan), at_once)


@DTYPE
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    from halfbyte.linear.w4a16.gemv.launcher import run

    n, k = 1024, 2048
    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    x = torch.randn(4096, k, device="cuda", dtype=dtype)
    all_rows = run(x, *tensors, None, n, batch_invariant=True)
    for m in (1, 2, 7, 16, 17, 64, 65, 1000):
        start = 4096 - m
        out = run(x[start:], *tensors, None, n, batch_invariant=True)
        assert torch.equal(out, all_rows[start:])


@DTYPE
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (300, 528), (64, 16)])
def test_unpacked_weights_are_the_dequantized_ones(n: int, k: int, dtype: torch.dtype) -> None:
    from halfbyte.linear.w4a16.dequant.launcher import unpack

    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    wanted = dequantized(packed, dtype)
    assert torch.equal(unpack(*tensors, 0, n, k, dtype), wanted)
    start = n // 128 * 64
    assert torch.equal(unpack(*tensors, start, 33, k, dtype), wanted[start : start + 33])


@DTYPE
def test_weights_larger_than_the_workspace(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.linear.w4a16.dequant import launcher as linear_unpack

    n, k = 300, 256
    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    x = torch.randn(500, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    whole = [linear_unpack.linear_unpacked(x, *tensors, b, n) for b in (None, bias)]
    monkeypatch.setattr(linear_unpack, "_MAX_UNPACKED_BYTES", 128 * 2 * k)
    for out, b in zip(whole, (None, bias), strict=True):
        pieces = linear_unpack.linear_unpacked(x, *tensors, b, n)
        torch.testing.assert_close(pieces, out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("m", [1, 16, 500])
def test_in_a_graph(m: int) -> None:
    from halfbyte.linear.w4a16.dequant.launcher import linear_unpacked
    from halfbyte.linear.w4a16.gemv.launcher import run

    n, k = 640, 1024
    packed = packed_weight(n, k, torch.bfloat16, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    product = run if m <= 64 else linear_unpacked
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    product(x, *tensors, None, n)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = x * 2
        out = product(hidden, *tensors, None, n)
        for _ in range(3):  # kernels that overlap read what the ones before them wrote
            out = product(hidden + 0 * out.sum(), *tensors, None, n)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        again = product(x * 2, *tensors, None, n)
        if product is run:
            assert torch.equal(out, again)
        else:  # cuBLAS may choose otherwise in a graph
            torch.testing.assert_close(out, again, rtol=2e-2, atol=1e-3 * float(again.abs().max()))
