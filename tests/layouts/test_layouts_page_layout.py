"""`PageLayout`: every byte of a page belongs to exactly one element, the specified one."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.layouts import PageLayout, PageViews
from halfbyte.layouts.page_layout import page_stride

ELEMENT_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
BLOCKS = {"nvfp4": 16, "nvfp4_4over6": 16, "fp4_block16": 16, "mxfp4": 32}
PAIRS = [
    *[(dtype, dtype) for dtype in (*ELEMENT_BYTES, *BLOCKS)],
    ("fp8", "nvfp4"),
    ("nvfp4", "fp8_e5m2"),
    ("bfloat16", "nvfp4"),
    ("mxfp4", "float16"),
    ("fp4_e2m1", "fp4_block16"),
]
each_pair = pytest.mark.parametrize(
    ("k_dtype", "v_dtype"), PAIRS, ids=[f"{k}-{v}" for k, v in PAIRS]
)
each_order = pytest.mark.parametrize("order", ["HND", "NHD"])


def widths(dtype: str, head_size: int) -> tuple[int, int]:
    """Bytes of the values and of the scales of one head of one token."""
    dtype = {"fp8": "fp8_e4m3", "fp4_e2m1": "nvfp4"}.get(dtype, dtype)
    if dtype in BLOCKS:
        return head_size // 2, head_size // BLOCKS[dtype]
    return int(head_size * ELEMENT_BYTES[dtype]), 0


def make(k: str = "nvfp4", v: str = "nvfp4", **changes: Any) -> PageLayout:
    fields = {"head_size": 64, "head_size_v": 32, "num_kv_heads": 3, "block_size": 4} | changes
    return PageLayout(k, v, **fields)


def as_bytes(view: torch.Tensor | None) -> torch.Tensor | None:
    return None if view is None else view.view(torch.uint8)


def expected_offsets(layout: PageLayout, k_dtype: str, v_dtype: str) -> dict[str, torch.Tensor]:
    """Byte in the page of [token, head, byte] of each region, by the specification."""
    n, h = layout.block_size, layout.num_kv_heads
    k_data, k_scale = widths(k_dtype, layout.head_size)
    v_data, v_scale = widths(v_dtype, layout.head_size_v)
    result, start = {}, 0
    for name, width in (
        ("k_data", k_data),
        ("k_scale", k_scale),
        ("v_data", v_data),
        ("v_scale", v_scale),
    ):
        head, token = (n * width, width) if layout.order == "HND" else (width, h * width)
        result[name] = torch.tensor(
            [
                [[start + i * token + j * head + b for b in range(width)] for j in range(h)]
                for i in range(n)
            ],
            dtype=torch.int64,
        )
        start += n * h * width
    return result


@each_pair
@each_order
def test_every_byte_lies_where_the_design_says(k_dtype: str, v_dtype: str, order: str) -> None:
    layout = make(k_dtype, v_dtype, order=order)
    pages = torch.randint(0, 256, (3, layout.page_bytes + 24), dtype=torch.uint8)
    views = layout.views(pages)
    for name, offsets in expected_offsets(layout, k_dtype, v_dtype).items():
        view = as_bytes(getattr(views, name))
        if view is None:
            assert offsets.numel() == 0
            continue
        assert torch.equal(view, pages[:, offsets])


@each_pair
@each_order
@pytest.mark.parametrize("padding", [0, 40])
def test_regions_tile_the_page_and_leave_padding_alone(
    k_dtype: str, v_dtype: str, order: str, padding: int
) -> None:
    layout = make(k_dtype, v_dtype, order=order)
    pages = torch.zeros(2, layout.page_bytes + padding, dtype=torch.uint8)
    for view in layout.views(pages):
        if view is not None:
            flat = view.view(torch.uint8)
            for page, token, head in torch.cartesian_prod(*map(torch.arange, flat.shape[:3])):
                flat[page, token, head] += 1
    assert (pages[:, : layout.page_bytes] == 1).all()
    assert (pages[:, layout.page_bytes :] == 0).all()


@each_pair
@each_order
def test_writing_one_element_changes_its_bytes_alone(
    k_dtype: str, v_dtype: str, order: str
) -> None:
    layout = make(k_dtype, v_dtype, order=order)
    offsets = expected_offsets(layout, k_dtype, v_dtype)
    for name, region in offsets.items():
        if region.numel() == 0:
            continue
        pages = torch.zeros(3, layout.page_bytes + 8, dtype=torch.uint8)
        view = getattr(layout.views(pages), name)
        view[1, 2, 1, 5 % view.shape[-1]] = 1
        size = view.element_size()
        element = region[2, 1].reshape(-1, size)[5 % view.shape[-1]]
        untouched = torch.ones_like(pages, dtype=torch.bool)
        untouched[1, element] = False
        assert not pages[untouched].any()
        assert pages[1, element].any()


@each_pair
@each_order
def test_views_share_storage_and_say_their_dtype(k_dtype: str, v_dtype: str, order: str) -> None:
    layout = make(k_dtype, v_dtype, order=order)
    pages = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    views = layout.views(pages)
    assert isinstance(views, PageViews)
    for data, scale, dtype, head_size in (
        (views.k_data, views.k_scale, layout.k_dtype, 64),
        (views.v_data, views.v_scale, layout.v_dtype, 32),
    ):
        width = head_size // 2 if dtype.value in BLOCKS else head_size
        assert data.shape == (2, 4, 3, width)
        assert data.dtype == (torch.uint8 if dtype.is_quantized else getattr(torch, str(dtype)))
        assert data.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()
        if dtype.value not in BLOCKS:
            assert scale is None
            continue
        assert scale is not None
        assert scale.shape == (2, 4, 3, head_size // BLOCKS[dtype.value])
        assert scale.dtype == torch.uint8
        assert scale.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()


@each_pair
@each_order
def test_page_bytes(k_dtype: str, v_dtype: str, order: str) -> None:
    layout = make(k_dtype, v_dtype, order=order)
    expected = 4 * 3 * (sum(widths(k_dtype, 64)) + sum(widths(v_dtype, 32)))
    assert layout.page_bytes == expected
    assert layout.bytes_per_token == expected / 4


def test_nvfp4_strides_of_the_design() -> None:
    n, h, d = 16, 8, 128
    data, scale = d // 2, d // 16
    pages = torch.zeros(5, 2 * n * h * (data + scale) + 100, dtype=torch.uint8)
    hnd = PageLayout("nvfp4", "nvfp4", d, None, h, n, "HND").views(pages)
    nhd = PageLayout("nvfp4", "nvfp4", d, None, h, n, "NHD").views(pages)
    stride = pages.stride(0)
    assert hnd.k_scale is not None
    assert nhd.k_scale is not None
    assert hnd.k_data.stride() == (stride, d // 2, n * d // 2, 1)
    assert hnd.k_scale.stride() == (stride, d // 16, n * d // 16, 1)
    assert nhd.k_data.stride() == (stride, h * d // 2, d // 2, 1)
    assert nhd.k_scale.stride() == (stride, h * d // 16, d // 16, 1)
    for views in (hnd, nhd):
        assert views.k_scale is not None
        assert views.v_scale is not None
        assert views.k_data.storage_offset() == 0
        assert views.k_scale.storage_offset() == n * h * data
        assert views.v_data.storage_offset() == n * h * (data + scale)
        assert views.v_scale.storage_offset() == n * h * (2 * data + scale)


def test_nvfp4_page_of_128_is_3_56_times_smaller() -> None:
    nvfp4 = make(head_size=128, head_size_v=128)
    bf16 = make("bfloat16", "bfloat16", head_size=128, head_size_v=128)
    assert nvfp4.page_bytes == 4 * 3 * 2 * 72
    assert bf16.page_bytes * 9 == nvfp4.page_bytes * 32


@each_order
@pytest.mark.parametrize(("k_dtype", "v_dtype"), [("nvfp4", "nvfp4"), ("bfloat16", "nvfp4")])
def test_pages_may_be_slices_of_a_wider_page_major_buffer(
    k_dtype: str, v_dtype: str, order: str
) -> None:
    layout = make(k_dtype, v_dtype, order=order)
    size = layout.page_bytes
    pool = torch.zeros(4, 3 * size + 16, dtype=torch.uint8)
    layers = [pool[1:, i * size : (i + 1) * size] for i in range(3)]
    for view in layout.views(layers[1]):
        if view is not None:
            view.view(torch.uint8).fill_(7)
    assert (layers[1] == 7).all()
    assert pool.sum() == 7 * 3 * size
    alone = torch.randint(0, 256, (3, size), dtype=torch.uint8)
    layers[2].copy_(alone)
    for one, other in zip(layout.views(layers[2]), layout.views(alone), strict=True):
        if one is not None and other is not None:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@each_order
def test_views_of_no_pages(order: str) -> None:
    for dtype in ("nvfp4", "bfloat16"):
        layout = make(dtype, dtype, order=order)
        views = layout.views(torch.zeros(0, layout.page_bytes, dtype=torch.uint8))
        assert views.k_data.shape[:3] == (0, 4, 3)


@each_order
@pytest.mark.parametrize("stride", [0, 1, 10**6])
def test_a_single_page_may_have_any_stride(order: str, stride: int) -> None:
    layout = make(order=order)
    page = torch.randint(0, 256, (1, layout.page_bytes), dtype=torch.uint8)
    strided = page.as_strided(page.shape, (stride, 1))
    assert page_stride(strided) == 0
    for one, other in zip(layout.views(strided), layout.views(page), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_stride_of_several_pages() -> None:
    pool = torch.zeros(3, 100, dtype=torch.uint8)
    assert page_stride(pool[:, 20:30]) == page_stride(pool[:2]) == 100
    assert page_stride(pool[::2]) == 200
    assert page_stride(pool[:1]) == page_stride(pool[:0]) == 0


def test_the_side_of_an_unknown_format_is_named() -> None:
    layout = make("fp8", "nvfp4")
    fp8, nvfp4 = layout.k_dtype, layout.v_dtype
    assert layout.unknown_format({fp8, nvfp4}) is None
    assert layout.unknown_format({fp8}) == "does not know the format of V, nvfp4"
    assert layout.unknown_format({nvfp4}) == "does not know the format of K, fp8_e4m3"


def test_heads_of_one_value() -> None:
    assert make("bfloat16", "fp8", head_size=1, head_size_v=1).page_bytes == 4 * 3 * 3


def test_head_size_v_defaults_to_head_size() -> None:
    layout = PageLayout("nvfp4", "nvfp4", 64, None, 2, 16)
    assert layout.head_size_v == 64
    assert (layout.order, layout.v_scale_layout) == ("HND", "linear")


def test_sizes_become_plain_integers() -> None:
    layout = make(block_size=torch.tensor(4), head_size=np.int64(64))
    assert layout == make()
    assert all(type(x) is int for x in (layout.block_size, layout.head_size, layout.page_bytes))


def test_layouts_are_values() -> None:
    assert make("fp8") == make("fp8_e4m3")
    assert hash(make("fp8")) == hash(make("fp8_e4m3"))
    assert make() != make(order="NHD")
    layout = make()
    _ = layout.page_bytes
    assert layout == make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.head_size = 128  # type: ignore[misc]
    assert dataclasses.replace(layout, order="NHD") == make(order="NHD")


def test_bytes_are_proportional_to_the_heads() -> None:
    layout = make("fp8", "nvfp4", order="NHD", head_size_v=64, v_scale_layout="sm100")
    changed = dataclasses.replace(layout, num_kv_heads=1)
    assert changed.page_bytes * 3 == layout.page_bytes


@each_order
def test_sm100_leaves_k_and_the_geometry_alone(order: str) -> None:
    linear = make(head_size=64, head_size_v=64, order=order)
    sm100 = make(head_size=64, head_size_v=64, order=order, v_scale_layout="sm100")
    assert sm100.regions == linear.regions
    pages = torch.randint(0, 256, (2, linear.page_bytes), dtype=torch.uint8)
    for one, other in zip(linear.views(pages), sm100.views(pages), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("head_size_v", [64, 128, 256])
def test_sm100_position_is_a_permutation_by_the_formula(head_size_v: int) -> None:
    layout = make(head_size_v=head_size_v, block_size=16, v_scale_layout="sm100")
    row, column = layout.v_scale_position(torch.device("cpu"))
    num_blocks = head_size_v // 16
    expected = [
        [
            (4 * (t // 4) + s // (num_blocks // 4), 4 * (s % (num_blocks // 4)) + t % 4)
            for s in range(num_blocks)
        ]
        for t in range(16)
    ]
    positions = torch.stack([row, column], dim=-1)
    assert positions.tolist() == [[list(p) for p in line] for line in expected]
    assert len({p for line in expected for p in line}) == 16 * num_blocks


def test_linear_position_is_the_identity() -> None:
    row, column = make(block_size=3).v_scale_position(torch.device("cpu"))
    assert row.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert column.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"order": "NDH"}, "order.*'NDH'", id="order"),
        pytest.param({"v_scale_layout": "sm90"}, "v_scale_layout.*'sm90'", id="v-scale-layout"),
        pytest.param({"block_size": 0}, "block_size.*0", id="block-size-0"),
        pytest.param({"num_kv_heads": -1}, "num_kv_heads.*-1", id="heads-negative"),
        pytest.param({"head_size": 0}, "head_size.*0", id="head-size-0"),
        pytest.param({"head_size": 64.0}, "head_size: expected an integer, got 64.0", id="float"),
        pytest.param({"head_size": 72}, "head_size.*16.*72", id="head-size-72"),
        pytest.param({"head_size_v": 8}, "head_size_v.*16.*8", id="head-size-v-8"),
        pytest.param({"k": "mxfp4", "head_size": 48}, "head_size.*32.*48", id="mxfp4-48"),
        pytest.param({"k": "auto"}, "auto", id="auto"),
        pytest.param({"v": "int8"}, "int8.*nvfp4", id="unknown-dtype"),
        pytest.param({"v_scale_layout": "sm100"}, "sm100.*64", id="sm100-head-size-32"),
        pytest.param(
            {"v_scale_layout": "sm100", "head_size_v": 64, "block_size": 6},
            "sm100.*block_size",
            id="sm100-block-size-6",
        ),
        pytest.param(
            {"v_scale_layout": "sm100", "head_size_v": 64, "v": "fp8"}, "sm100.*fp8", id="sm100-fp8"
        ),
        pytest.param(
            {
                "k": "fp8",
                "v": "bfloat16",
                "head_size": 3,
                "num_kv_heads": 1,
                "block_size": 1,
            },
            "v_data.*3",
            id="misaligned-region",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_pages_that_cannot_hold_the_layout_are_refused() -> None:
    layout = make()
    size = layout.page_bytes
    for pages in (
        torch.zeros(2, size, dtype=torch.int8),
        torch.zeros(2, size),
        torch.zeros(2 * size, dtype=torch.uint8),
        torch.zeros(2, 1, size, dtype=torch.uint8),
        torch.zeros(2, size - 1, dtype=torch.uint8),
        torch.zeros(size, 2, dtype=torch.uint8).t(),
        torch.zeros(2, 2 * size, dtype=torch.uint8)[:, ::2],
        torch.zeros(2 * size, dtype=torch.uint8).as_strided((2, size), (size - 1, 1)),
        torch.zeros(1, size - 1, dtype=torch.uint8),
        torch.zeros(1, 2 * size, dtype=torch.uint8)[:, ::2],
    ):
        with pytest.raises(ValueError, match="pages"):
            layout.views(pages)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_misaligned_pages_are_refused(dtype: str) -> None:
    layout = make(dtype, dtype)
    size = layout.page_bytes
    wide = torch.zeros(2, size + 4, dtype=torch.uint8)
    layout.views(wide)
    with pytest.raises(ValueError, match="multiples of"):
        layout.views(wide[:, 1 : size + 1])
    with pytest.raises(ValueError, match="multiples of"):
        layout.views(torch.zeros(2, size + 1, dtype=torch.uint8))
    assert layout.views(torch.zeros(1, size + 1, dtype=torch.uint8)).k_data.shape[0] == 1
    make("nvfp4", "fp8").views(torch.zeros(2, size + 1, dtype=torch.uint8)[:, 1:])
