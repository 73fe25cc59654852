"""`halfbyte.numerics.block_fp4`: `mxfp4` and `fp4_block16`, bit for bit."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.numerics import block_fp4
from numerics import brute_force

MAX = brute_force.MAX_FLOAT32


class Format(NamedTuple):
    size: int
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    dequantize: Callable[..., torch.Tensor]
    reference: Callable[[Sequence[np.float32]], brute_force.Block]


MXFP4 = Format(32, block_fp4.quantize_mxfp4, block_fp4.dequantize_mxfp4, brute_force.mxfp4_block)
FP4_BLOCK16 = Format(
    16,
    block_fp4.quantize_fp4_block16,
    block_fp4.dequantize_fp4_block16,
    brute_force.fp4_block16_block,
)
FORMATS = {"mxfp4": MXFP4, "fp4_block16": FP4_BLOCK16}
each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def check(fmt: Format, x: torch.Tensor) -> None:
    data, scales = fmt.quantize(x)
    values = brute_force.float32_scalars(x)
    blocks = [fmt.reference(values[i : i + fmt.size]) for i in range(0, len(values), fmt.size)]
    expected_data, expected_scales = brute_force.stack_blocks(blocks, x.shape)
    assert data.dtype == scales.dtype == torch.uint8
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0)
    torch.testing.assert_close(data, expected_data, rtol=0, atol=0)


def blocks_with_amax(amaxes: Sequence[float], size: int) -> torch.Tensor:
    """One block per amax, its other values spread below it, half of the maxima negative."""
    spread = torch.linspace(-1, 1, size).double()
    spread[0] = 0.0
    x = torch.tensor(amaxes, dtype=torch.float64)[:, None] * spread
    x[::2] = -x[::2]
    return x.float()


def around(values: Sequence[float]) -> list[float]:
    x = np.array(values, np.float32)
    near = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
    return [float(v) for v in near if np.isfinite(v)]


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_quantize_random(fmt: Format, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    check(fmt, (torch.randn(6, 2, 64, generator=generator) * 3).to(dtype))


@each_format
@pytest.mark.parametrize("factor", [1.0, 6.0, 4.0, 7.0, 5.0], ids="{}x2^k".format)
def test_quantize_at_boundaries_of_the_exponent(fmt: Format, factor: float) -> None:
    amaxes = around([factor * 2.0**k for k in range(-20, 20)])
    check(fmt, blocks_with_amax(amaxes, fmt.size))


@each_format
@pytest.mark.parametrize("factor", [1.0, 6.0])
def test_quantize_at_boundaries_of_tiny_exponents(fmt: Format, factor: float) -> None:
    amaxes = around([factor * 2.0**k for k in range(-149, -118)])
    check(fmt, blocks_with_amax(amaxes, fmt.size))


@each_format
@pytest.mark.parametrize("factor", [1.0, 6.0])
def test_quantize_at_boundaries_of_huge_exponents(fmt: Format, factor: float) -> None:
    amaxes = [v for v in around([factor * 2.0**k for k in range(118, 126)]) if v <= MAX]
    check(fmt, blocks_with_amax([*amaxes, 2.0**127, MAX], fmt.size))


@each_format
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 100])
def test_quantize_subnormal_blocks_take_the_smallest_scale(fmt: Format, steps: int) -> None:
    x = torch.zeros(fmt.size)
    x[1], x[2] = steps * 2.0**-149, -steps * 2.0**-149
    _, scales = fmt.quantize(x)
    assert scales.tolist() == [0]
    check(fmt, x)


def test_fp4_block16_just_above_the_smallest_scale() -> None:
    x = torch.zeros(16)
    x[0] = float(np.nextafter(np.float32(6 * 2.0**-127), np.float32(1)))
    _, scales = block_fp4.quantize_fp4_block16(x)
    assert scales.tolist() == [1]


@each_format
def test_quantize_ties(fmt: Format) -> None:
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(fmt.size // 8)
    data, scales = fmt.quantize(torch.stack([ties, -ties, 1024 * ties]))
    packed = torch.tensor([0x07, 0x22, 0x44, 0x66], dtype=torch.uint8).repeat(fmt.size // 8)
    signs = torch.full_like(packed, 0x88)
    assert data.tolist() == [packed.tolist(), (packed | signs).tolist(), packed.tolist()]
    assert scales.tolist() == [[127], [127], [137]]


def test_mxfp4_saturates_between_six_and_eight() -> None:
    x = torch.tensor([7.99, -7.0, 6.5] + [1.0] * 29)
    data, scales = block_fp4.quantize_mxfp4(x)
    assert scales.tolist() == [127]
    assert block_fp4.dequantize_mxfp4(data, scales)[:3].tolist() == [6.0, -6.0, 6.0]


@each_format
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_quantize_zeros(fmt: Format, zero: float) -> None:
    data, scales = fmt.quantize(torch.full((2, 64), zero))
    assert not data.any()
    assert not scales.any()
    assert torch.equal(fmt.dequantize(data, scales), torch.zeros(2, 64))


@each_format
def test_quantize_signs_of_zeros_and_of_what_rounds_to_zero(fmt: Format) -> None:
    x = torch.zeros(fmt.size)
    x[:6] = torch.tensor([6.0, -0.0, -(2.0**-149), 2.0**-149, -0.2, 0.2])
    data, _ = fmt.quantize(x)
    assert data.tolist()[:3] == [0x07, 0x08, 0x08]


@each_format
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_quantize_nan_marks_its_block_alone(fmt: Format, nan: float) -> None:
    x = torch.randn(3 * fmt.size)
    x[fmt.size + 3], x[fmt.size + 4] = nan, math.inf
    data, scales = fmt.quantize(x)
    assert (scales == 0xFF).tolist() == [False, True, False]
    assert not data[fmt.size // 2 : fmt.size].any()
    back = fmt.dequantize(data, scales)
    assert back[fmt.size : 2 * fmt.size].isnan().all()
    assert back.isnan().sum() == fmt.size
    check(fmt, x)


@each_format
def test_quantize_infinity_takes_the_largest_code(fmt: Format) -> None:
    x = torch.ones(fmt.size)
    x[0], x[1] = math.inf, -math.inf
    check(fmt, x)
    data, _ = fmt.quantize(x)
    assert data[0].item() == 0xF7


@each_format
@pytest.mark.parametrize("x", [math.inf, -math.inf, MAX, 3.6 * 2.0**126])
def test_quantized_infinity_reads_back_finite(fmt: Format, x: float) -> None:
    data, scales = fmt.quantize(torch.full((fmt.size,), x))
    assert fmt.dequantize(data, scales).isfinite().all()


@each_format
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_quantize_any_block(fmt: Format, data: st.DataObject) -> None:
    size = fmt.size
    element = st.one_of(st.floats(width=32), st.floats(-8, 8, width=32))
    check(fmt, torch.tensor(data.draw(st.lists(element, min_size=size, max_size=size))))


@each_format
def test_dequantize_every_scale_times_every_code(fmt: Format) -> None:
    codes = [i % 16 for i in range(fmt.size)]
    data = torch.tensor(brute_force.pack(codes), dtype=torch.uint8).expand(256, -1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    with np.errstate(over="ignore"):
        expected = np.array(
            [
                [np.float32(brute_force.e2m1_value(c) * brute_force.e8m0_value(b)) for c in codes]
                for b in range(256)
            ]
        )
    values = fmt.dequantize(data, scales)
    valid = values[:255].view(torch.int32)
    assert torch.equal(valid, torch.from_numpy(expected[:255]).view(torch.int32))
    assert values[255].isnan().all()


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_dtype(fmt: Format, dtype: torch.dtype) -> None:
    data, scales = fmt.quantize(torch.randn(4, 64))
    values = fmt.dequantize(data, scales, dtype)
    assert values.dtype == dtype
    assert torch.equal(values.float(), fmt.dequantize(data, scales))


@each_format
@settings(deadline=None, max_examples=60)
@given(exponent=st.integers(-100, 100), seed=st.integers(0, 999))
def test_quantize_inverts_dequantize(fmt: Format, exponent: int, seed: int) -> None:
    codes = torch.randint(0, 16, (fmt.size,), generator=torch.Generator().manual_seed(seed))
    codes[seed % fmt.size] = 7
    codes[codes == 8] = 0
    data = torch.tensor(brute_force.pack(codes.tolist()), dtype=torch.uint8)
    scales = torch.tensor([exponent + 127], dtype=torch.uint8)
    data_again, scales_again = fmt.quantize(fmt.dequantize(data, scales))
    assert torch.equal(data_again, data)
    assert torch.equal(scales_again, scales)


@each_format
@pytest.mark.parametrize("shape", [(0, 32), (2, 0), (3, 0, 64)])
def test_quantize_empty(fmt: Format, shape: tuple[int, ...]) -> None:
    data, scales = fmt.quantize(torch.empty(shape))
    assert data.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // fmt.size)
    assert fmt.dequantize(data, scales).shape == shape


@each_format
def test_quantize_non_contiguous(fmt: Format) -> None:
    wide = torch.randn(64, 3, 70)
    check(fmt, wide[:2, :, 3:67].transpose(0, 1))
    check(fmt, wide.transpose(0, 2)[:5, ::2])


@each_format
def test_quantize_refuses_partial_blocks_and_integers(fmt: Format) -> None:
    with pytest.raises(ValueError, match=str(fmt.size)):
        fmt.quantize(torch.ones(2, fmt.size - 8))
    with pytest.raises(TypeError, match="int32"):
        fmt.quantize(torch.ones(fmt.size, dtype=torch.int32))


@each_format
def test_dequantize_refuses_what_does_not_belong_together(fmt: Format) -> None:
    data, scales = fmt.quantize(torch.randn(2, 64))
    with pytest.raises(ValueError, match="scales"):
        fmt.dequantize(data, scales[:, :1])
    with pytest.raises(ValueError, match="data"):
        fmt.dequantize(data.float(), scales)
