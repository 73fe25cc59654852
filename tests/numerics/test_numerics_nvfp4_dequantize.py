"""NVFP4 decoded: every scale with every code, and odd global scales."""

import numpy as np
import pytest
import torch

from halfbyte.numerics import e2m1, nvfp4
from numerics import brute_force


def positive_products() -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Data and scales of blocks `[126, 16]` with every code and positive scale; both as values."""
    codes = torch.arange(16, dtype=torch.uint8).expand(126, -1)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(-1, 1).view(torch.float8_e4m3fn)
    return e2m1.pack(codes), scales, e2m1.decode(codes).numpy(), scales.float().numpy()


@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize_as_stored_rounds_the_scales_first(is_decode: bool, dtype: torch.dtype) -> None:
    data, scales, q, s = positive_products()
    rows = np.random.default_rng(0).uniform(0.001, 1000, (126, 1)).astype(np.float32)
    for stored in (np.full(1, 0.37, np.float32), rows):
        expected = torch.from_numpy(q * (s * stored if is_decode else s / stored)).to(dtype)
        found = nvfp4.dequantize_as_stored(data, scales, torch.from_numpy(stored), is_decode, dtype)
        assert found.dtype == dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("is_decode", [True, False])
def test_readers_agree_where_every_product_does(is_decode: bool) -> None:
    data, scales, q, s = positive_products()
    # Products next to ties of bfloat16, one for each mantissa: elsewhere all readers agree.
    mantissas = np.unique(np.frexp(q[:, 1:8] * s)[0])
    ties = np.random.default_rng(0).integers(128, 256, (len(mantissas), 16)) + 0.5
    near = torch.from_numpy(ties / mantissas[:, None]).float()
    stored = near if is_decode else 1 / near
    for decode in (near, near.nextafter(torch.tensor(torch.inf))):
        found = nvfp4.readers_agree(stored, decode, is_decode=is_decode)
        ours = [nvfp4.dequantize(data, scales, g, torch.bfloat16) for g in decode.flatten()]
        theirs = [
            nvfp4.dequantize_as_stored(data, scales, g, is_decode, torch.bfloat16)
            for g in stored.flatten()
        ]
        expected = [torch.equal(x, y) for x, y in zip(ours, theirs, strict=True)]
        assert found.flatten().tolist() == expected
        assert 0 < sum(expected) < len(expected)


def every_product() -> tuple[torch.Tensor, torch.Tensor, list[list[float]]]:
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    row = torch.tensor(brute_force.pack(range(16)), dtype=torch.uint8)
    scales = torch.tensor(finite, dtype=torch.uint8)[:, None]
    products = [
        [brute_force.e2m1_value(code) * brute_force.e4m3_value(byte) for code in range(16)]
        for byte in finite
    ]
    return row.expand(len(finite), 8), scales, products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dequantize_every_scale_times_every_code_is_exact(dtype: torch.dtype) -> None:
    data, scales, products = every_product()
    values = nvfp4.dequantize(data, scales.view(torch.float8_e4m3fn), 1.0, dtype)
    expected = torch.tensor(products, dtype=torch.float64)
    assert values.dtype == dtype
    assert torch.equal(values.double(), expected)
    assert torch.equal(torch.signbit(values), torch.signbit(expected))


@pytest.mark.parametrize("g", [0.1, 1 / 3, 1e-30, 7.3e4, 2.0**-149])
def test_dequantize_odd_global_scales_round_once(g: float) -> None:
    data, scales, products = every_product()
    expected = np.array(products, np.float32) * np.float32(g)
    values = nvfp4.dequantize(data, scales, g)
    assert torch.equal(values.view(torch.int32), torch.from_numpy(expected).view(torch.int32))
    for dtype in (torch.bfloat16, torch.float16):
        rounded = nvfp4.dequantize(data, scales, g, dtype)
        assert torch.equal(rounded, torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_dequantize_nan_scale_reads_back_nan_whatever_the_codes(byte: int) -> None:
    data = torch.arange(8, dtype=torch.uint8)
    scale = torch.tensor([byte], dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert nvfp4.dequantize(data, scale, 0.5, dtype).isnan().all()


def test_dequantize_takes_scales_as_float8_or_bytes_and_strided() -> None:
    data, scales = nvfp4.quantize(torch.randn(4, 64), 0.01)
    values = nvfp4.dequantize(data, scales, 0.01)
    assert torch.equal(nvfp4.dequantize(data, scales.view(torch.uint8), 0.01), values)
    pages = torch.zeros(4, 99, dtype=torch.uint8)
    pages[:, 3:35], pages[:, 50:54] = data, scales.view(torch.uint8)
    assert torch.equal(nvfp4.dequantize(pages[:, 3:35], pages[:, 50:54], 0.01), values)


@pytest.mark.parametrize(
    ("data", "scales"),
    [
        pytest.param(torch.zeros(2, 8), torch.zeros(2, 1, dtype=torch.uint8), id="float-data"),
        pytest.param(
            torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), id="columns"
        ),
        pytest.param(
            torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8), id="rows"
        ),
        pytest.param(
            torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(2, 0, dtype=torch.uint8), id="half"
        ),
        pytest.param(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1), id="float32-scales"),
    ],
)
def test_dequantize_refuses_what_does_not_belong_together(
    data: torch.Tensor, scales: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=r"data|scales"):
        nvfp4.dequantize(data, scales, 1.0)
