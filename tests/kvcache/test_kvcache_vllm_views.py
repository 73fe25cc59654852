"""vLLM's five-dimensional form: where the views lie, and what they decode to."""

import pytest
import torch

from halfbyte.kvcache import (
    dequant_nvfp4_kv_cache,
    nvfp4_kv_cache_full_dim,
    nvfp4_kv_cache_split_views,
    reshape_and_cache,
)
from halfbyte.layouts.page_layout import Order
from halfbyte.numerics import nvfp4
from kvcache.page_arithmetic import Geometry, sentinel

NUM_PAGES = 3
each_order = pytest.mark.parametrize("order", ["NHD", "HND"])
each_shape = pytest.mark.parametrize(
    ("block_size", "heads", "head_size"),
    [(16, 3, 64), (4, 8, 128), (8, 1, 16), (1, 4, 48), (1, 1, 32)],
    ids=str,
)


def paged(
    order: Order, block_size: int, heads: int, head_size: int, before: int = 0, after: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(buffer [pages, stride], five-dimensional view of it)`, filled with random bytes."""
    full_dim = head_size * 9 // 16
    content = 2 * block_size * heads * full_dim
    buffer = sentinel(NUM_PAGES, before + content + after)
    dims = (block_size, heads) if order == "NHD" else (heads, block_size)
    pages = buffer[:, before : before + content].unflatten(1, (2, *dims, full_dim))
    assert pages.data_ptr() == buffer.data_ptr() + before
    return buffer, pages


def expected_strides(order: Order, block_size: int, heads: int, width: int) -> tuple[int, ...]:
    """Strides of dim_1 and dim_2 of a region with `width` bytes per token and head."""
    return (heads * width, width) if order == "NHD" else (block_size * width, width)


@pytest.mark.parametrize(
    ("head_size", "full_dim"), [(16, 9), (64, 36), (80, 45), (128, 72), (256, 144)]
)
def test_full_dim_is_half_a_byte_and_a_sixteenth_per_value(head_size: int, full_dim: int) -> None:
    assert nvfp4_kv_cache_full_dim(head_size) == full_dim


@pytest.mark.parametrize("head_size", [0, -16, 8, 72, 100])
def test_full_dim_refuses(head_size: int) -> None:
    with pytest.raises(ValueError, match="head_size"):
        nvfp4_kv_cache_full_dim(head_size)


@each_order
@each_shape
@pytest.mark.parametrize(("before", "after"), [(0, 0), (32, 80)], ids=["exact", "padded"])
def test_split_views_addresses(
    order: Order, block_size: int, heads: int, head_size: int, before: int, after: int
) -> None:
    buffer, cache = paged(order, block_size, heads, head_size, before, after)
    data, scales = nvfp4_kv_cache_split_views(cache)
    side_bytes = block_size * heads * head_size * 9 // 16
    for side in range(2):
        start = before + side * side_bytes
        for view, width, offset in (
            (data[side], head_size // 2, start),
            (scales[side], head_size // 16, start + block_size * heads * head_size // 2),
        ):
            assert view.shape == (*cache.shape[:1], *cache.shape[2:4], width)
            dims = expected_strides(order, block_size, heads, width)
            assert view.stride() == (buffer.shape[1], *dims, 1)
            assert view.data_ptr() == buffer.data_ptr() + offset
    assert {view.dtype for view in data} == {torch.uint8}
    assert {view.dtype for view in scales} == {torch.float8_e4m3fn}


@each_order
@each_shape
def test_split_views_bytes_are_where_page_arithmetic_puts_them(
    order: Order, block_size: int, heads: int, head_size: int
) -> None:
    buffer, cache = paged(order, block_size, heads, head_size, 16, 32)
    geometry = Geometry("nvfp4", "nvfp4", head_size, head_size, heads, block_size, order)
    data, scales = nvfp4_kv_cache_split_views(cache)
    for side, name in enumerate("kv"):
        for token in range(block_size):
            for head in range(heads):
                at = (token, head) if order == "NHD" else (head, token)
                start = 16 + geometry.address(f"{name}_data", token, head)
                expected = buffer[:, start : start + head_size // 2]
                assert torch.equal(data[side][:, at[0], at[1]], expected)
                start = 16 + geometry.address(f"{name}_scale", token, head)
                expected = buffer[:, start : start + head_size // 16]
                assert torch.equal(scales[side].view(torch.uint8)[:, at[0], at[1]], expected)


@each_order
@each_shape
def test_split_views_of_one_side(order: Order, block_size: int, heads: int, head_size: int) -> None:
    _, cache = paged(order, block_size, heads, head_size, 0, 48)
    both = nvfp4_kv_cache_split_views(cache)
    for side in range(2):
        one = nvfp4_kv_cache_split_views(cache[:, side])
        for (view,), pair in zip(one, both, strict=True):
            assert view.data_ptr() == pair[side].data_ptr()
            assert (view.shape, view.stride()) == (pair[side].shape, pair[side].stride())


@each_order
@each_shape
def test_split_views_of_a_permuted_cache_are_permuted_views(
    order: Order, block_size: int, heads: int, head_size: int
) -> None:
    _, cache = paged(order, block_size, heads, head_size, 0, 48)
    straight = nvfp4_kv_cache_split_views(cache)
    swapped = nvfp4_kv_cache_split_views(cache.transpose(2, 3))
    for straight_pair, swapped_pair in zip(straight, swapped, strict=True):
        for a, b in zip(straight_pair, swapped_pair, strict=True):
            assert b.shape == a.transpose(1, 2).shape
            assert b.data_ptr() == a.data_ptr()
            assert torch.equal(b.view(torch.uint8), a.transpose(1, 2).view(torch.uint8))


@each_order
def test_split_views_are_zero_copy_both_ways(order: Order) -> None:
    buffer, cache = paged(order, 8, 2, 64)
    (k_data, v_data), (k_scale, v_scale) = nvfp4_kv_cache_split_views(cache)
    for value, view in enumerate((k_data, k_scale, v_data, v_scale), start=1):
        view.view(torch.uint8).fill_(value)
    data, scale = 8 * 2 * 32, 8 * 2 * 4
    one_page = [1] * data + [2] * scale + [3] * data + [4] * scale
    assert torch.equal(buffer, torch.tensor([one_page] * NUM_PAGES, dtype=torch.uint8))


@each_order
def test_split_views_read_what_reshape_and_cache_wrote(order: Order) -> None:
    block_size, heads, head_size = 8, 3, 64
    buffer, cache = paged(order, block_size, heads, head_size, 0, 32)
    layout = Geometry("nvfp4", "nvfp4", head_size, head_size, heads, block_size, order).layout
    key, value = torch.randn(2, 4, heads, head_size)
    slots = torch.tensor([5, 8, 0, 23])
    reshape_and_cache(key, value, buffer, slots, layout, 0.02, 0.01)
    data, scales = nvfp4_kv_cache_split_views(cache)
    for side, (x, g) in enumerate(((key, 0.02), (value, 0.01))):
        values = dequant_nvfp4_kv_cache(data[side], scales[side], g, head_size, block_size)
        if order == "HND":
            values = values.transpose(1, 2)
        expected = nvfp4.dequantize(*nvfp4.quantize(x, g), g)
        assert torch.equal(values.flatten(0, 1)[slots], expected)


def test_split_views_of_no_pages() -> None:
    data, scales = nvfp4_kv_cache_split_views(torch.empty(0, 2, 16, 4, 36, dtype=torch.uint8))
    assert [tuple(view.shape) for view in data] == [(0, 16, 4, 32)] * 2
    assert [tuple(view.shape) for view in scales] == [(0, 16, 4, 4)] * 2


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((3, 2, 16, 4, 36), torch.int8, id="int8"),
        pytest.param((3, 2, 16, 4, 36), torch.float8_e4m3fn, id="float8"),
        pytest.param((3, 16, 36), torch.uint8, id="3d"),
        pytest.param((3, 2, 1, 16, 4, 36), torch.uint8, id="6d"),
        pytest.param((3, 3, 16, 4, 36), torch.uint8, id="three_sides"),
        pytest.param((2, 3, 16, 4, 36), torch.uint8, id="sides_first"),
        pytest.param((3, 2, 16, 4, 40), torch.uint8, id="full_dim_40"),
        pytest.param((3, 2, 16, 4, 0), torch.uint8, id="full_dim_0"),
    ],
)
def test_split_views_refuses(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="kv_cache"):
        nvfp4_kv_cache_split_views(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("raw_scales", [True, False], ids=["uint8", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequant_linear_is_the_oracles(raw_scales: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 8, 80)
    data, scales = nvfp4.quantize(x, 0.03)
    given = scales.view(torch.uint8) if raw_scales else scales
    for g in (0.03, torch.tensor(0.03), torch.tensor([0.03])):
        values = dequant_nvfp4_kv_cache(data, given, g, 80, 8, dtype=dtype)
        assert values.dtype == dtype
        assert torch.equal(values, nvfp4.dequantize(data, scales, 0.03, dtype))


def test_dequant_returns_float32_by_default() -> None:
    data, scales = nvfp4.quantize(torch.randn(4, 16), 0.03)
    assert dequant_nvfp4_kv_cache(data, scales, 0.03).dtype == torch.float32


@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
@pytest.mark.parametrize("block_size", [4, 16])
def test_dequant_sm100_undoes_the_interleave(head_size: int, block_size: int) -> None:
    x = torch.randn(2, 3, block_size, head_size)
    data, scales = nvfp4.quantize(x, 0.03)
    num_blocks = head_size // 16
    interleaved = torch.zeros_like(scales.view(torch.uint8))
    for t in range(block_size):
        for s in range(num_blocks):
            row = 4 * (t // 4) + s // (num_blocks // 4)
            column = 4 * (s % (num_blocks // 4)) + t % 4
            interleaved[..., row, column] = scales.view(torch.uint8)[..., t, s]
    expected = nvfp4.dequantize(data, scales, 0.03)
    for given in (interleaved, interleaved.view(torch.float8_e4m3fn)):
        values = dequant_nvfp4_kv_cache(
            data, given, 0.03, head_size, block_size, scale_layout="sm100"
        )
        assert torch.equal(values, expected)


def test_dequant_sm100_reads_an_hnd_cache() -> None:
    block_size, heads, head_size = 8, 2, 128
    buffer, cache = paged("HND", block_size, heads, head_size)
    geometry = Geometry("nvfp4", "nvfp4", head_size, head_size, heads, block_size, "HND", "sm100")
    key, value = torch.randn(2, block_size, heads, head_size)
    slots = torch.arange(block_size, 2 * block_size)
    reshape_and_cache(key, value, buffer, slots, geometry.layout, 0.02, 0.01)
    data, scales = nvfp4_kv_cache_split_views(cache)
    k = dequant_nvfp4_kv_cache(data[0], scales[0], 0.02)[1].transpose(0, 1)
    v = dequant_nvfp4_kv_cache(data[1], scales[1], 0.01, scale_layout="sm100")[1].transpose(0, 1)
    assert torch.equal(k, nvfp4.dequantize(*nvfp4.quantize(key, 0.02), 0.02))
    assert torch.equal(v, nvfp4.dequantize(*nvfp4.quantize(value, 0.01), 0.01))


@pytest.mark.parametrize(
    ("data_shape", "scale_shape", "keywords"),
    [
        pytest.param((2, 8, 32), (2, 8, 4), {"head_size": 32}, id="head_size"),
        pytest.param((2, 3, 8, 32), (2, 3, 8, 4), {"block_size": 16}, id="block_size"),
        pytest.param((2, 8, 32), (2, 8, 2), {}, id="scales_of_blocks_of_32"),
        pytest.param((2, 8, 32), (2, 4, 4), {}, id="fewer_scales"),
        pytest.param((2, 8, 24), (2, 8, 3), {"scale_layout": "sm100"}, id="sm100_head_size_48"),
        pytest.param((2, 6, 32), (2, 6, 4), {"scale_layout": "sm100"}, id="sm100_block_size_6"),
    ],
)
def test_dequant_refuses(
    data_shape: tuple[int, ...], scale_shape: tuple[int, ...], keywords: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=r"head_size|block_size|scales"):
        dequant_nvfp4_kv_cache(
            torch.zeros(data_shape, dtype=torch.uint8),
            torch.zeros(scale_shape, dtype=torch.uint8),
            1.0,
            **keywords,  # type: ignore[arg-type]
        )


def test_dequant_refuses_an_unknown_scale_layout() -> None:
    data, scales = nvfp4.quantize(torch.randn(4, 64), 0.03)
    with pytest.raises(ValueError, match="expected 'linear' or 'sm100', got"):
        dequant_nvfp4_kv_cache(data, scales, 0.03, scale_layout="sm90")  # type: ignore[arg-type]
