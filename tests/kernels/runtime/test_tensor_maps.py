"""Rows of x as TMA reads them."""

from unittest.mock import patch

import pytest
import torch

from halfbyte.kernels.runtime import tensor_maps
from halfbyte.kernels.runtime.tensor_maps import (
    box_rows,
    row_stride,
    tensor_map,
    tensor_map_of_boxes,
    tensor_map_of_pages,
)

X = torch.arange(4 * 48, dtype=torch.float32).view(4, 48).bfloat16()
FLAT = torch.arange(512, dtype=torch.float32).bfloat16()


@pytest.mark.parametrize(
    ("x", "stride"),
    [
        (X, 48),
        (X[:, :32], 48),
        (X[1:, 8:24], 48),
        (X[2:3], 48),
    ],
    ids=["contiguous", "columns", "from-the-middle", "one-row"],
)
def test_rows_that_can_be_read_stay_where_they_are(x: torch.Tensor, stride: int) -> None:
    assert box_rows(x).data_ptr() == x.data_ptr()
    assert row_stride(box_rows(x)) == stride


@pytest.mark.parametrize(
    "x",
    [
        X[:, 1:41],
        X[:, ::2][:, :16],
        X[:, :40].t().contiguous().t(),
        X[:1].expand(3, 48),
        FLAT[: 4 * 44].view(4, 44)[:, :40],
        torch.as_strided(FLAT, (3, 48), (16, 1)),
    ],
    ids=["unaligned", "every-second", "transposed", "one-row-for-all", "odd-stride", "overlapping"],
)
def test_others_are_copied(x: torch.Tensor) -> None:
    found = box_rows(x)
    assert torch.equal(found, x)
    assert found.data_ptr() % 16 == 0
    assert found.is_contiguous()
    assert row_stride(found) == x.shape[1]


def test_a_single_row_may_have_any_stride() -> None:
    x = torch.as_strided(FLAT, (1, 48), (7, 1))
    assert box_rows(x).data_ptr() == x.data_ptr()
    assert row_stride(x) == 48


def test_rows_that_cannot_be_aligned_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8 values, not 44"):
        box_rows(X[:, :44])


def test_strides_are_in_bytes() -> None:
    bf16 = torch.bfloat16
    with patch.object(tensor_maps, "_encode", lambda *told: told):
        matrix = tensor_map(4096, 10, 192, 200, bf16, 32)
        boxes = tensor_map_of_boxes(4096, 10, 192, 200, bf16, 32, 3)
        pages = tensor_map_of_pages.__wrapped__(4096, 7, 36, 64, 4608)
    assert matrix == (4096, (192, 10), (400,), (64, 32), bf16)
    assert boxes == (4096, (64, 10, 3), (400, 128), (64, 32, 3), bf16)
    assert pages == (4096, (64, 36, 7), (64, 4608), (64, 36, 1), torch.uint8)
