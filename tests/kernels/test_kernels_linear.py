"""The W4A16 kernels: the order of weights and compilation anywhere, products on a GPU."""

import pytest
import torch

from halfbyte.kernels import linear_plan
from halfbyte.kernels.linear_plan import FewPlan
from halfbyte.kernels.linear_weights import (
    DTYPES,
    ROW_SCALE,
    PackedWeight,
    pack_weight,
    pairs_of_word,
    unpack_weight,
)
from halfbyte.numerics import e2m1, e4m3, nvfp4

DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
COMMON_SCALE = 2.0**-9


def random_weight(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, and every scale there is, 0 included."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, generator=generator)
    return data, scales.view(torch.float8_e4m3fn)


def packed_weight(n: int, k: int, dtype: torch.dtype, device: str = "cpu") -> PackedWeight:
    data, scales = random_weight(n, k)
    common = torch.tensor([COMMON_SCALE], device=device)
    return pack_weight(data.to(device), scales.to(device), common, (n,), dtype)


@DTYPE
@pytest.mark.parametrize(("n", "k"), [(1, 16), (64, 128), (100, 208), (130, 400)])
def test_weights_come_back_bit_for_bit(n: int, k: int, dtype: torch.dtype) -> None:
    data, scales = random_weight(n, k)
    packed = pack_weight(data, scales, torch.ones(1), (n,), dtype)
    assert packed.weight.shape[0] * 64 >= n > packed.weight.shape[0] * 64 - 64
    assert packed.weight.shape[1] * 64 >= k > packed.weight.shape[1] * 64 - 128
    restored, restored_scales = unpack_weight(packed)
    assert torch.equal(restored, data)
    assert torch.equal(restored_scales.view(torch.uint8), scales.view(torch.uint8))


@DTYPE
def test_lanes_find_their_operands(dtype: torch.dtype) -> None:
    """What the kernels do to a word and to a word of scales gives the values, exactly."""
    n, k = 128, 256
    data, scales = random_weight(n, k)
    packed = pack_weight(data, scales, torch.ones(1), (n,), dtype)
    wanted = e2m1.decode_packed(data).double().unflatten(1, (-1, 16))
    wanted = (wanted * e4m3.decode(scales, torch.float64)[..., None]).flatten(1) / ROW_SCALE
    found = torch.full((n, k), torch.nan, dtype=torch.float64)
    lanes = torch.arange(32)
    g, c = lanes // 4, lanes % 4
    for nb in range(2):
        for kb in range(4):
            for tile in range(4):
                scale_words = packed.weight_scale[nb, kb, tile // 2, :, tile % 2].long()[g]
                for step in range(4):
                    words = packed.weight[nb, kb, tile, :, step].long() & 0xFFFFFFFF
                    scale = _scales_of_word(scale_words[:, step // 2], dtype)[step % 2]
                    rows, start = 64 * nb + 16 * tile + g, 64 * kb + 16 * step + 2 * c
                    for i, pair in enumerate(pairs_of_word(words, dtype)):
                        factor = _halves(scale, dtype)[:, i & 1]
                        values = _halves(pair, dtype) * factor[:, None]
                        for j in range(2):
                            found[rows + 8 * (i & 1), start + 8 * (i >> 1) + j] = values[:, j]
    assert torch.equal(found, wanted)


def _scales_of_word(word: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`unpack_scales` of `linear_values.cuh`."""
    word = word & 0xFFFFFFFF

    def rotate_right(places: int) -> torch.Tensor:
        return (word >> places) | (word << (32 - places))

    if dtype == torch.bfloat16:
        keep, exponent = 0x0FF00FF0, 0x70007000
        return (word & keep) | exponent, (rotate_right(8) & keep) | exponent
    return (word << 3) & 0x7F807F80, rotate_right(5) & 0x7F807F80


def _halves(pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bits of pairs as float64 `[..., 2]`."""
    both = torch.stack((pairs & 0xFFFF, pairs >> 16 & 0xFFFF), dim=-1)
    return both.to(torch.int32).to(torch.int16).view(dtype).double()


@DTYPE
def test_rows_get_the_scale_of_their_part(dtype: torch.dtype) -> None:
    data, scales = random_weight(80, 32)
    packed = pack_weight(data, scales, torch.tensor([0.5, 3.0]), (70, 10), dtype)
    assert packed.row_scale.shape == (128,)
    assert (packed.row_scale[:70] == 0.5 * 2048).all()
    assert (packed.row_scale[70:80] == 3.0 * 2048).all()
    assert (packed.row_scale[80:] == 0).all()


def test_codes_of_zero_scales_are_cleared_and_kept() -> None:
    data = torch.full((16, 32), 0x77, dtype=torch.uint8)
    scales = torch.full((16, 4), 0x38, dtype=torch.uint8)
    scales[3, 2] = 0
    packed = pack_weight(
        data, scales.view(torch.float8_e4m3fn), torch.ones(1), (16,), torch.bfloat16
    )
    assert packed.zeroed is not None
    assert packed.zeroed[0].tolist() == [3 * 4 + 2]
    assert torch.equal(unpack_weight(packed)[0], data)
    plain = pack_weight(
        torch.zeros_like(data), torch.zeros_like(scales), torch.ones(1), (16,), torch.bfloat16
    )
    assert plain.zeroed is None
    assert not plain.weight.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "bfloat16 or float16 activations, got torch.float32"),
        ({"scale_byte": 0x7F}, "found a NaN or a sign"),
        ({"scale_byte": 0xC0}, "found a NaN or a sign"),
        ({"columns": 3}, "do not belong together"),
        ({"part_sizes": (32, 16)}, "do not belong together"),
    ],
    ids=["dtype", "nan", "negative", "shape", "parts"],
)
def test_bad_weights_are_refused(change: dict, message: str) -> None:
    data, scales = random_weight(32, 64)
    scales.view(torch.uint8)[5, 1] = change.get("scale_byte", 0x38)
    with pytest.raises(ValueError, match=message):
        pack_weight(
            data,
            scales[:, : change.get("columns", 4)],
            torch.ones(len(change.get("part_sizes", (32,)))),
            change.get("part_sizes", (32,)),
            change.get("dtype", torch.bfloat16),
        )


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_kernels_compile(capability: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from halfbyte.kernels import nvrtc

    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    join = 1 if capability >= 90 else 2
    for is_bf16, plan in (
        (1, FewPlan(1, 1, 0, 1, warps=12, stages=2)),
        (0, FewPlan(2, 4, join, 1)),
        (0, FewPlan(4, 2, 2, 1, warps=8, ctas=2)),
        (1, FewPlan(8, 8, join, 1, warps=8, stages=2)),
    ):
        macros: dict[str, int | None] = {"X_BF16": is_bf16, **dict(plan.macros())}
        assert nvrtc.compile_source("linear_unpack", macros, architecture)[:4] == b"\x7fELF"
        for m, round_units in ((1, 6), (16, 6), (16, 2)):
            of_shape = plan._replace(round_units=round_units).macros_of_shape(192, 1024, m)
            found = nvrtc.compile_source("linear", {**macros, **dict(of_shape)}, architecture)
            assert found[:4] == b"\x7fELF"


def expected64(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in float64, of the weights as loaded."""
    weight = nvfp4.dequantize(*unpack_weight(packed), COMMON_SCALE, torch.float64)
    out = x.double() @ weight.t()
    return out if bias is None else out + bias.double()


def assert_rounded_once(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within the result's rounding, and float32 sums of it."""
    unit = torch.finfo(out.dtype).eps / 2
    bound = unit * wanted.abs() + 2e-5 * wanted.abs().max()
    assert ((out.double() - wanted).abs() <= bound).all()


@pytest.mark.gpu
@DTYPE
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (300, 528), (64, 128), (2048, 14336), (40, 16)])
def test_few_rows(n: int, k: int, with_bias: bool, dtype: torch.dtype) -> None:
    from halfbyte.kernels.linear import linear_few

    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    bias = torch.randn(n, device="cuda", dtype=dtype) if with_bias else None
    for m in (1, 2, 5, 8, 9, 16, 17, 33, 64, 100):
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        out = linear_few(x, *tensors, bias, n)
        assert_rounded_once(out, expected64(x, packed, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 5, 11, 20])
def test_what_lies_where_rows_would_be_does_not_matter(m: int) -> None:
    """Shared memory for rows of x that are not there keeps what it had: NaN of the call before."""
    from halfbyte.kernels.linear import linear_few, machine_of

    n, k = 6144, 4096
    packed = packed_weight(n, k, torch.bfloat16, "cuda")
    arguments = (packed.weight, packed.weight_scale, packed.row_scale, None, n)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    plan = linear_plan.few_plan(n, k, m, machine_of(0))
    rows = plan.columns
    linear_few(x.new_full((rows, k), torch.nan), *arguments, plan=plan)
    out = linear_few(x, *arguments, plan=plan)
    assert_rounded_once(out, expected64(x, packed, None))


@pytest.mark.gpu
def test_rows_of_any_stride() -> None:
    from halfbyte.kernels.linear import linear_few

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
        out = linear_few(x, *arguments)
        assert_rounded_once(out, expected64(x, packed, None))


@pytest.mark.gpu
@DTYPE
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_every_way_to_cut_the_work(tiles: int, split: int, dtype: torch.dtype) -> None:
    from halfbyte.kernels.linear import linear_few, machine_of

    n, k = 448, 1152
    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    x = torch.randn(8 * tiles + 3, k, device="cuda", dtype=dtype)
    wanted = expected64(x, packed, None)
    clusters = torch.cuda.get_device_capability()[0] >= 9
    for join in (0,) if split == 1 else (1, 2) if clusters else (2,):
        for groups, rounds, warps, stages, ctas in (
            (3, 2, 8, 2, 1),
            (14, 1, 4, 3, 1),
            (14, 1, 8, 1, 2),
            (1, 5, 16, 1, 1),
        ):
            if ctas > 1 and tiles > 2:
                continue
            plan = FewPlan(tiles, split, join, groups, warps, stages, ctas, rounds)
            if plan.shared_bytes(n, k, x.shape[0]) > machine_of(0).bytes_of_cta(ctas):
                continue
            out = linear_few(x, *tensors, None, n, plan=plan)
            assert_rounded_once(out, wanted)


@pytest.mark.gpu
@DTYPE
def test_sums_of_many_rows_are_joined_in_pieces(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.kernels import linear

    n, k = 448, 1152
    packed = packed_weight(n, k, dtype, "cuda")
    arguments = (packed.weight, packed.weight_scale, packed.row_scale, None, n)
    x = torch.randn(101, k, device="cuda", dtype=dtype)
    plan = FewPlan(2, 4, 2, 14, warps=8, round_units=1)
    at_once = linear.linear_few(x, *arguments, plan=plan)
    monkeypatch.setattr(linear, "_MOST_PARTIAL_BYTES", 30 * 4 * 4 * 448)
    assert torch.equal(linear.linear_few(x, *arguments, plan=plan), at_once)


@pytest.mark.gpu
@DTYPE
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    from halfbyte.kernels.linear import linear_few

    n, k = 1024, 2048
    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    x = torch.randn(4096, k, device="cuda", dtype=dtype)
    all_rows = linear_few(x, *tensors, None, n, batch_invariant=True)
    for m in (1, 2, 7, 16, 17, 64, 65, 1000):
        start = 4096 - m
        out = linear_few(x[start:], *tensors, None, n, batch_invariant=True)
        assert torch.equal(out, all_rows[start:])


@pytest.mark.gpu
@DTYPE
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (300, 528), (64, 16)])
def test_unpacked_weights_are_the_dequantized_ones(n: int, k: int, dtype: torch.dtype) -> None:
    from halfbyte.kernels.linear import unpack

    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    wanted = nvfp4.dequantize(*unpack_weight(packed), COMMON_SCALE, dtype)
    assert torch.equal(unpack(*tensors, 0, n, k, dtype), wanted)
    start = n // 128 * 64
    assert torch.equal(unpack(*tensors, start, 33, k, dtype), wanted[start : start + 33])


@pytest.mark.gpu
@DTYPE
def test_weights_larger_than_the_workspace(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.kernels import linear

    n, k = 300, 256
    packed = packed_weight(n, k, dtype, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    x = torch.randn(500, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    whole = [linear.linear_unpacked(x, *tensors, b, n) for b in (None, bias)]
    monkeypatch.setattr(linear, "_MOST_UNPACKED_BYTES", 128 * 2 * k)
    for out, b in zip(whole, (None, bias), strict=True):
        pieces = linear.linear_unpacked(x, *tensors, b, n)
        torch.testing.assert_close(pieces, out, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 500])
def test_in_a_graph(m: int) -> None:
    from halfbyte.kernels.linear import linear_few, linear_unpacked

    n, k = 640, 1024
    packed = packed_weight(n, k, torch.bfloat16, "cuda")
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    product = linear_few if m <= 64 else linear_unpacked
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
        if product is linear_few:
            assert torch.equal(out, again)
        else:  # cuBLAS may choose otherwise in a graph
            torch.testing.assert_close(out, again, rtol=2e-2, atol=1e-3 * float(again.abs().max()))
