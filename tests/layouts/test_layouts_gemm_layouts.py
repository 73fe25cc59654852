"""Padding of weights and trtllm-gen's order of rows, entry by entry."""

import pytest
import torch

from halfbyte.layouts.gemm_layouts import deinterleave_rows, interleave_rows, pad_weight
from halfbyte.numerics import nvfp4


@pytest.mark.parametrize(
    ("n", "k", "row_multiple", "k_multiple", "padded"),
    [
        (5, 16, 32, 32, (32, 32)),
        (32, 64, 32, 32, (32, 64)),
        (33, 48, 128, 128, (128, 128)),
        (8, 16, 8, 16, (8, 16)),
        (0, 16, 32, 32, (0, 32)),
    ],
)
def test_pad_weight(
    n: int, k: int, row_multiple: int, k_multiple: int, padded: tuple[int, int]
) -> None:
    weight, scales = nvfp4.quantize(torch.randn(n, k), 0.01)
    wide, wide_scales = pad_weight(weight, scales, row_multiple, k_multiple)
    assert wide.shape == (padded[0], padded[1] // 2)
    assert wide_scales.shape == (padded[0], padded[1] // 16)
    assert wide_scales.dtype == torch.float8_e4m3fn
    values = nvfp4.dequantize(wide, wide_scales, 0.01)
    assert torch.equal(values[:n, :k], nvfp4.dequantize(weight, scales, 0.01))
    assert not wide[n:].any()
    assert not wide[:, k // 2 :].any()
    assert not wide_scales.view(torch.uint8)[n:].any()
    assert not wide_scales.view(torch.uint8)[:, k // 16 :].any()


def test_pad_weight_copies_nothing_that_fits() -> None:
    weight, scales = nvfp4.quantize(torch.randn(32, 64), 0.01)
    assert pad_weight(weight, scales, 32, 32)[0] is weight


def test_pad_weight_does_not_split_blocks() -> None:
    weight, scales = nvfp4.quantize(torch.randn(4, 16), 0.01)
    with pytest.raises(ValueError, match="k_multiple: expected a multiple of 16, got 24"):
        pad_weight(weight, scales, 8, 24)


def test_interleave_rows_formula() -> None:
    rows = torch.arange(96, dtype=torch.uint8)[:, None].expand(-1, 3)
    interleaved = interleave_rows(rows)
    for row in range(96):
        assert interleaved[32 * (row // 32) + 8 * (row % 4) + row % 32 // 4].tolist() == [row] * 3


def test_interleave_rows_table() -> None:
    """Source rows of the first rows: FlashInfer's `srcToDstBlk32RowMap`, inverted."""
    first = interleave_rows(torch.arange(32, dtype=torch.uint8))
    assert first[:10].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 1, 5]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", [0, 32, 256])
def test_deinterleave_rows_inverts(rows: int, dtype: torch.dtype) -> None:
    matrix = torch.randint(0, 256, (rows, 5), dtype=torch.uint8)
    back = deinterleave_rows(interleave_rows(matrix.view(dtype)))
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), matrix)


def test_interleave_rows_needs_whole_tiles() -> None:
    with pytest.raises(ValueError, match="multiple of 32, got 33"):
        interleave_rows(torch.zeros(33, 4, dtype=torch.uint8))
