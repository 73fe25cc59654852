"""The W4A16 kernels: weight layout and compilation, on any machine."""

from pathlib import Path

import pytest
import torch

from halfbyte.linear.w4a16.gemv.plan import GemvPlan, make_plan
from halfbyte.linear.w4a16.packed_weight import (
    ROW_SCALE,
    PackedWeight,
    pack_weight,
    unpack_weight,
)
from halfbyte.linear.w4a16.packed_words import DTYPES, pairs_of_word
from halfbyte.numerics import e2m1, e4m3, nvfp4
from linear.gpus import H200
from machine_code import assert_copies_have_descriptors, compiled, disassembled
from slow import slow

DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
COMMON_SCALE = 2.0**-9
ROW_FACTORS = (1.0, 3.0, 0.5)
"""Factors of the global scales of rows, repeated."""


def random_weight(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, and every scale there is, 0 included."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, generator=generator)
    return data, scales.view(torch.float8_e4m3fn)


def packed_weight(n: int, k: int, dtype: torch.dtype, device: str = "cpu") -> PackedWeight:
    """A packed weight with one part per row, so that every row has its own global scale."""
    data, scales = random_weight(n, k)
    common = COMMON_SCALE * torch.tensor(ROW_FACTORS).repeat(n)[:n]
    parts = common.to(device), (1,) * n
    return pack_weight(data.to(device), scales.to(device), *parts, dtype)


def dequantized(packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The dequantized values of a `packed_weight`."""
    data, scales = unpack_weight(packed)
    weight = torch.empty(packed.n, packed.k, dtype=dtype, device=data.device)
    for i, factor in enumerate(ROW_FACTORS):
        rows = slice(i, None, len(ROW_FACTORS))
        scale = COMMON_SCALE * factor
        weight[rows] = nvfp4.dequantize(data[rows], scales[rows], scale, dtype)
    return weight


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
    """Unpacking words of codes and of scales as the kernels do gives the exact values."""
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
    """`unpack_scales` of `linear/w4a16/values.cuh`."""
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


@pytest.mark.parametrize("capability", [slow(80), slow(89), 90, slow(100), slow(120)])
def test_kernels_compile(capability: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")

    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    join = 1 if capability >= 90 else 2
    for is_bf16, plan in (
        (1, GemvPlan(1, 1, 0, 1, warps=12, stages=2)),
        (0, GemvPlan(2, 2, join, 1)),
        (0, GemvPlan(4, 2, 2, 1, warps=8, ctas=2)),
        (1, GemvPlan(8, 8, 2, 1, warps=8, stages=2)),
    ):
        macros: dict[str, int | None] = {"X_BF16": is_bf16, **dict(plan.macros())}
        assert compiled("linear/w4a16/dequant/dequant.cu", macros, architecture)[:4] == b"\x7fELF"
        for m, round_units in ((1, 6), (16, 6), (16, 2)):
            of_shape = plan._replace(round_units=round_units).macros_of_shape(192, 1024, m)
            found = compiled(
                "linear/w4a16/gemv/gemv.cu", {**macros, **dict(of_shape)}, architecture
            )
            assert found[:4] == b"\x7fELF"


@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (4096, 14336), (4096, 4096)])
def test_copies_of_weights_have_descriptors(n: int, k: int, m: int, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")

    plan = make_plan(n, k, m, H200)
    shape = dict(plan.macros_of_shape(n, k, m))
    macros: dict[str, int | None] = {"X_BF16": 1, **dict(plan.macros()), **shape}
    code = disassembled(compiled("linear/w4a16/gemv/gemv.cu", macros, "sm_90a"), tmp_path)
    assert_copies_have_descriptors(code)
