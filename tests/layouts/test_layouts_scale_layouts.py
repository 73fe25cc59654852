"""`sm100` positions and the 128x4 swizzle, entry by entry."""

import pytest
import torch

from halfbyte.layouts import swizzle_128x4, unswizzle_128x4, v_scale_position

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_tokens", [4, 16, 64])
@pytest.mark.parametrize("num_blocks", [4, 8, 16])
def test_v_scale_position_sm100_formula(num_tokens: int, num_blocks: int) -> None:
    row, column = v_scale_position(num_tokens, num_blocks, "sm100", CPU)
    assert row.dtype == column.dtype == torch.int64
    quarter = num_blocks // 4
    seen = set()
    for t in range(num_tokens):
        for s in range(num_blocks):
            position = (4 * (t // 4) + s // quarter, 4 * (s % quarter) + t % 4)
            assert (int(row[t, s]), int(column[t, s])) == position
            seen.add(position)
    assert seen == {(t, s) for t in range(num_tokens) for s in range(num_blocks)}


def test_v_scale_position_sm100_of_head_size_128() -> None:
    row, column = v_scale_position(16, 8, "sm100", CPU)
    assert row[5].tolist() == [4, 4, 5, 5, 6, 6, 7, 7]
    assert column[5].tolist() == [1, 5, 1, 5, 1, 5, 1, 5]


@pytest.mark.parametrize("shape", [(1, 1), (16, 8), (3, 5), (4, 0)])
def test_v_scale_position_linear(shape: tuple[int, int]) -> None:
    row, column = v_scale_position(*shape, "linear", CPU)
    assert row.shape == column.shape == shape
    assert row.tolist() == [[t] * shape[1] for t in range(shape[0])]
    assert column.tolist() == [list(range(shape[1]))] * shape[0]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(6, 4), (4, 6), (1, 8), (16, 2)])
def test_v_scale_position_sm100_refuses(num_tokens: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="sm100"):
        v_scale_position(num_tokens, num_blocks, "sm100", CPU)


def swizzled_bytes(scales: list[list[int]], columns: int) -> list[int]:
    rows = len(scales)
    tile_rows, tile_columns = -(-rows // 128), -(-columns // 4)
    result = [0] * (tile_rows * tile_columns * 512)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * tile_columns + c // 4
            inside = (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            result[tile * 512 + inside] = scales[r][c]
    return result


SHAPES = [(128, 4), (1, 1), (129, 5), (256, 8), (100, 12), (384, 3)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_swizzle_128x4_formula(rows: int, columns: int) -> None:
    scales = torch.randint(1, 256, (rows, columns), dtype=torch.uint8)
    swizzled = swizzle_128x4(scales)
    assert swizzled.shape == (-(-rows // 128) * 128, -(-columns // 4) * 4)
    assert swizzled.is_contiguous()
    assert swizzled.flatten().tolist() == swizzled_bytes(scales.tolist(), columns)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_unswizzle_128x4_inverts(rows: int, columns: int, dtype: torch.dtype) -> None:
    scales = torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(dtype)
    swizzled = swizzle_128x4(scales)
    assert swizzled.dtype == dtype
    back = unswizzle_128x4(swizzled, rows, columns)
    assert (back.dtype, back.shape) == (dtype, scales.shape)
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_swizzle_128x4_reads_strided_scales() -> None:
    scales = torch.randint(0, 256, (8, 140), dtype=torch.uint8).t()[1:135]
    assert torch.equal(swizzle_128x4(scales), swizzle_128x4(scales.contiguous()))


@pytest.mark.parametrize("shape", [(0, 4), (0, 0), (3, 0)])
def test_swizzle_128x4_of_nothing(shape: tuple[int, int]) -> None:
    scales = torch.zeros(shape, dtype=torch.uint8)
    swizzled = swizzle_128x4(scales)
    assert swizzled.numel() == 0
    assert unswizzle_128x4(swizzled, *shape).shape == shape


def test_unswizzle_128x4_refuses_the_wrong_size() -> None:
    with pytest.raises(ValueError, match="129 x 4"):
        unswizzle_128x4(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)
