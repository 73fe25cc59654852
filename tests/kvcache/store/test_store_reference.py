"""`reshape_and_cache` and `read_tokens`: every byte at the right address, no other byte changed."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from halfbyte.kvcache import (
    FullAttentionSpec,
    PagedKVPool,
    SlidingWindowSpec,
    read_tokens,
    reshape_and_cache,
)
from halfbyte.kvcache.quant_methods.block_fp4 import MXFP4KVCacheMethod
from halfbyte.kvcache.store import reference
from halfbyte.layouts import PageLayout
from kvcache.page_arithmetic import (
    BLOCK_SIZES,
    DTYPES,
    QUANTIZED,
    WITH_GLOBAL_SCALE,
    Geometry,
    data_width,
    decode,
    encode,
    sentinel,
)
from kvcache.store.store_cases import reference_store
from kvcache.store.weighted_cases import LAYOUTS, assert_tokens_are_stored_alone

K_SCALE, V_SCALE = 0.0371, 0.0059
NUM_PAGES, BLOCK_SIZE, HEADS = 5, 8, 3
SLOTS = [17, -1, 3, 39, -7, 0, 16, 25, 8]

SAME = [Geometry(dtype, dtype, 64, 64, HEADS, BLOCK_SIZE) for dtype in DTYPES]
MIXED = [
    Geometry("fp8_e4m3", "nvfp4", 64, 64, HEADS, BLOCK_SIZE),
    Geometry("nvfp4", "fp8_e5m2", 48, 80, HEADS, BLOCK_SIZE),
    Geometry("bfloat16", "nvfp4_4over6", 40, 64, HEADS, BLOCK_SIZE),
    Geometry("mxfp4", "float32", 96, 20, HEADS, BLOCK_SIZE),
    Geometry("fp4_block16", "mxfp4", 16, 32, HEADS, BLOCK_SIZE),
    Geometry("nvfp4", "nvfp4", 192, 128, 1, BLOCK_SIZE),
]
SM100 = [
    Geometry("nvfp4", "nvfp4", 64, 64, HEADS, BLOCK_SIZE, v_scale_layout="sm100"),
    Geometry("fp8_e4m3", "nvfp4_4over6", 32, 192, HEADS, BLOCK_SIZE, v_scale_layout="sm100"),
    Geometry("nvfp4", "nvfp4", 128, 256, 2, 16, v_scale_layout="sm100"),
]
GEOMETRIES = [
    replace(geometry, order=order) for geometry in SAME + MIXED + SM100 for order in ("HND", "NHD")
]
each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Pages(NamedTuple):
    """Pages within a buffer of sentinel bytes."""

    pages: torch.Tensor
    buffer: torch.Tensor
    stride: int
    start: int


def allocate(geometry: Geometry, before: int = 0, after: int = 0) -> Pages:
    stride = before + geometry.page_bytes + after
    buffer = sentinel(NUM_PAGES, stride)
    return Pages(buffer[:, before : before + geometry.page_bytes], buffer, stride, before)


def random_kv(
    geometry: Geometry, count: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = geometry.num_kv_heads
    key = torch.randn(count, heads, geometry.head_size) * 3
    value = torch.randn(count, heads, geometry.head_size_v)
    return key.to(dtype), value.to(dtype)


def expected_buffer(
    geometry: Geometry, place: Pages, key: torch.Tensor, value: torch.Tensor, slots: list[int]
) -> torch.Tensor:
    """The buffer after a write, by arithmetic on flat bytes."""
    flat = place.buffer.flatten().clone()
    k_data, k_scales = encode(geometry.k_dtype, key, K_SCALE)
    v_data, v_scales = encode(geometry.v_dtype, value, V_SCALE)
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        page, token = divmod(slot, geometry.block_size)
        page_start = page * place.stride + place.start
        encoded_k = k_data[i], None if k_scales is None else k_scales[i]
        encoded_v = v_data[i], None if v_scales is None else v_scales[i]
        geometry.put(flat, page_start, token, "k", encoded_k)
        geometry.put(flat, page_start, token, "v", encoded_v)
    return flat.reshape(place.buffer.shape)


def check_write(
    geometry: Geometry,
    place: Pages,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: list[int],
) -> None:
    expected = expected_buffer(geometry, place, key, value, slots)
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    reshape_and_cache(key, value, place.pages, slot_mapping, geometry.layout, K_SCALE, V_SCALE)
    assert torch.equal(place.buffer, expected)


@each_geometry
@pytest.mark.parametrize(
    ("before", "after"), [(0, 0), (0, 48), (64, 32)], ids=["exact", "padded", "pool_slice"]
)
def test_reshape_and_cache_writes_the_oracles_bytes_only(
    geometry: Geometry, before: int, after: int
) -> None:
    key, value = random_kv(geometry, len(SLOTS))
    check_write(geometry, allocate(geometry, before, after), key, value, SLOTS)


@each_geometry
def test_read_tokens_decodes_bytes_put_by_arithmetic(geometry: Geometry) -> None:
    place = allocate(geometry, 16, 32)
    key, value = random_kv(geometry, len(SLOTS))
    place.buffer.copy_(expected_buffer(geometry, place, key, value, SLOTS))
    k_encoded = encode(geometry.k_dtype, key, K_SCALE)
    v_encoded = encode(geometry.v_dtype, value, V_SCALE)
    order = [8, 0, 2, 3, 3, 5]
    slots = torch.tensor([SLOTS[i] for i in order])
    for out in (torch.float32, torch.bfloat16, torch.float16):
        k, v = read_tokens(place.pages, slots, geometry.layout, K_SCALE, V_SCALE, out)
        assert (k.dtype, v.dtype) == (out, out)
        assert torch.equal(k, decode(geometry.k_dtype, k_encoded, K_SCALE, out)[order])
        assert torch.equal(v, decode(geometry.v_dtype, v_encoded, V_SCALE, out)[order])


def test_read_tokens_returns_float32_by_default() -> None:
    geometry = GEOMETRIES[0]
    key, value = random_kv(geometry, 1)
    place = allocate(geometry)
    check_write(geometry, place, key, value, [5])
    k, v = read_tokens(place.pages, torch.tensor([5]), geometry.layout, K_SCALE, V_SCALE)
    assert (k.dtype, v.dtype) == (torch.float32, torch.float32)


@each_geometry
def test_read_tokens_of_no_slots_is_empty(geometry: Geometry) -> None:
    slots = torch.tensor([], dtype=torch.int64)
    k, v = read_tokens(allocate(geometry).pages, slots, geometry.layout, K_SCALE, V_SCALE)
    assert k.shape == (0, geometry.num_kv_heads, geometry.head_size)
    assert v.shape == (0, geometry.num_kv_heads, geometry.head_size_v)


@each_geometry
def test_reshape_and_cache_ignores_tokens_without_slots(geometry: Geometry) -> None:
    key, value = random_kv(geometry, 6)
    check_write(geometry, allocate(geometry), key, value, [7, 30])


@each_geometry
@pytest.mark.parametrize("count", [0, 4])
def test_reshape_and_cache_of_no_slots_writes_nothing(geometry: Geometry, count: int) -> None:
    key, value = random_kv(geometry, count)
    check_write(geometry, allocate(geometry), key, value, [])


@each_geometry
def test_reshape_and_cache_of_padding_alone_writes_nothing(geometry: Geometry) -> None:
    key, value = random_kv(geometry, 3)
    check_write(geometry, allocate(geometry), key, value, [-1, -1, -(10**12)])


@each_dtype
@pytest.mark.parametrize("input_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_reshape_and_cache_takes_every_float_input(dtype: str, input_dtype: torch.dtype) -> None:
    geometry = Geometry(dtype, dtype, 64, 32, HEADS, BLOCK_SIZE)
    key, value = random_kv(geometry, len(SLOTS), input_dtype)
    check_write(geometry, allocate(geometry), key, value, SLOTS)


@each_dtype
def test_reshape_and_cache_takes_transposed_and_fused_inputs(dtype: str) -> None:
    geometry = Geometry(dtype, dtype, 64, 32, HEADS, BLOCK_SIZE)
    count = len(SLOTS)
    key = torch.randn(HEADS, 64, count).permute(2, 0, 1)
    fused = torch.randn(count, HEADS * 64 + HEADS * 32)
    value = fused[:, HEADS * 64 :].unflatten(1, (HEADS, 32))
    assert not key.is_contiguous()
    assert not value.is_contiguous()
    check_write(geometry, allocate(geometry), key, value, SLOTS)


@each_dtype
def test_reshape_and_cache_takes_strided_slots(dtype: str) -> None:
    geometry = Geometry(dtype, dtype, 64, 64, HEADS, BLOCK_SIZE)
    place = allocate(geometry)
    key, value = random_kv(geometry, 3)
    slots = torch.tensor([[4, 99], [11, 98], [33, 97]])[:, 0]
    expected = expected_buffer(geometry, place, key, value, [4, 11, 33])
    reshape_and_cache(key, value, place.pages, slots, geometry.layout, K_SCALE, V_SCALE)
    assert torch.equal(place.buffer, expected)


@each_dtype
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one_element"])
def test_global_scales_may_be_tensors(dtype: str, shape: tuple[int, ...]) -> None:
    geometry = Geometry(dtype, dtype, 64, 32, HEADS, BLOCK_SIZE)
    place = allocate(geometry)
    key, value = random_kv(geometry, len(SLOTS))
    expected = expected_buffer(geometry, place, key, value, SLOTS)
    k_scale, v_scale = torch.full(shape, K_SCALE), torch.full(shape, V_SCALE)
    layout = geometry.layout
    reshape_and_cache(key, value, place.pages, torch.tensor(SLOTS), layout, k_scale, v_scale)
    assert torch.equal(place.buffer, expected)
    slots = torch.tensor([slot for slot in SLOTS if slot >= 0])
    with_floats = read_tokens(place.pages, slots, layout, K_SCALE, V_SCALE)
    with_tensors = read_tokens(place.pages, slots, layout, k_scale, v_scale)
    for expected_side, side in zip(with_floats, with_tensors, strict=True):
        assert side.shape == expected_side.shape
        assert torch.equal(side, expected_side)


@each_dtype
def test_global_scale_is_ignored_by_formats_without_one(dtype: str) -> None:
    geometry = Geometry(dtype, dtype, 64, 64, HEADS, BLOCK_SIZE)
    first, second = allocate(geometry), allocate(geometry)
    second.buffer.copy_(first.buffer)
    key, value = random_kv(geometry, len(SLOTS))
    slots = torch.tensor(SLOTS)
    reshape_and_cache(key, value, first.pages, slots, geometry.layout, 1.0, 1.0)
    reshape_and_cache(key, value, second.pages, slots, geometry.layout, 0.1, 0.3)
    assert torch.equal(first.buffer, second.buffer) == (dtype not in WITH_GLOBAL_SCALE)


@each_geometry
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_and_inf_change_no_byte_of_other_blocks(geometry: Geometry, bad: float) -> None:
    place = allocate(geometry)
    key, value = random_kv(geometry, 2)
    slots = [6, 7]
    clean_bytes = expected_buffer(geometry, place, key, value, slots)
    key[0, 0, 3] = bad
    value[0, 0, 3] = bad
    check_write(geometry, place, key, value, slots)
    touched = (place.buffer != clean_bytes).nonzero()[:, 1].tolist()
    # The first block (32 values at most) of head 0 and its scale are all that may differ.
    allowed: set[int] = set()
    for side, dtype, head_size in (
        ("k", geometry.k_dtype, geometry.head_size),
        ("v", geometry.v_dtype, geometry.head_size_v),
    ):
        start = geometry.address(f"{side}_data", 6, 0)
        scales = geometry.scale_addresses(side, 6, 0)
        if scales:
            itemsize = QUANTIZED[dtype].scale_itemsize
            per_block = data_width(dtype, head_size) * itemsize // len(scales)
            allowed.update([*range(start, start + per_block), *scales[:itemsize]])
        else:
            width = data_width(dtype, head_size) // head_size
            allowed.update(range(start + 3 * width, start + 4 * width))
    assert touched
    assert set(touched) <= allowed


@each_dtype
def test_nan_reads_back_as_nan_in_its_own_block(dtype: str) -> None:
    geometry = Geometry(dtype, dtype, 64, 64, HEADS, BLOCK_SIZE)
    place = allocate(geometry)
    key, value = random_kv(geometry, 3)
    key[1, 2, 40] = math.nan
    slots = torch.tensor([2, 3, 4])
    reshape_and_cache(key, value, place.pages, slots, geometry.layout, K_SCALE, V_SCALE)
    k, v = read_tokens(place.pages, slots, geometry.layout, K_SCALE, V_SCALE)
    nan_at = {tuple(index) for index in k.isnan().nonzero().tolist()}
    size = BLOCK_SIZES.get(dtype, 1)
    start = 40 // size * size
    assert nan_at == {(1, 2, d) for d in range(start, start + size)}
    assert not v.isnan().any()


@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float16_pages_saturate_wider_inputs(input_dtype: torch.dtype) -> None:
    geometry = Geometry("float16", "float16", 4, 4, 1, BLOCK_SIZE)
    place = allocate(geometry)
    x = torch.tensor([[[1e30, -1e30, math.inf, -65504.0]]]).to(input_dtype)
    slot = torch.tensor([0])
    reshape_and_cache(x, x, place.pages, slot, geometry.layout, 1.0, 1.0)
    k, v = read_tokens(place.pages, slot, geometry.layout, 1.0, 1.0)
    expected = torch.tensor([[[65504.0, -65504.0, 65504.0, -65504.0]]])
    assert torch.equal(k, expected)
    assert torch.equal(v, expected)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda data, scales: (data[..., :1], scales), r"data torch.uint8 \[..., 1\].*\[..., 32\]"),
        (lambda data, scales: (data, scales.float()), r"scales torch.float32 .*uint8 \[..., 2\]"),
        (lambda data, scales: (data, None), r"scales None, its pages have torch.uint8"),
    ],
    ids=["width", "dtype", "missing"],
)
def test_method_that_does_not_fit_the_page_writes_nothing(
    returned: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(MXFP4KVCacheMethod):
        def quantize(self, x: torch.Tensor, global_scale: float | torch.Tensor) -> Any:
            return returned(*super().quantize(x, global_scale))

    monkeypatch.setattr(reference, "_method", Wrong)
    geometry = Geometry("mxfp4", "mxfp4", 64, 64, HEADS, BLOCK_SIZE)
    place = allocate(geometry)
    before = place.buffer.clone()
    key, value = random_kv(geometry, 2)
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=f"mxfp4: quantize returned {message}"):
        reshape_and_cache(
            key, value, place.pages, slots, geometry.layout, 1.0, 1.0, backend="reference"
        )
    assert torch.equal(place.buffer, before)


def test_a_write_to_one_layer_touches_no_other_layer_of_the_pool() -> None:
    full = FullAttentionSpec(16, 2, 64, 32, kv_cache_dtype="nvfp4", v_cache_dtype="fp8")
    window = SlidingWindowSpec(16, 4, 32, kv_cache_dtype="mxfp4", sliding_window=20)
    plain = FullAttentionSpec(16, 1, 40, kv_cache_dtype="bfloat16")
    specs = [full, window, plain, replace(full, kv_cache_dtype="fp8_e5m2")]
    pool = PagedKVPool(specs, num_pages=3)
    for layer in range(len(specs)):
        pool.buffer.copy_(sentinel(*pool.buffer.shape))
        before = pool.buffer.clone()
        layout = pool.layout(layer)
        pages = pool.layer_pages(layer)
        key = torch.randn(2, layout.num_kv_heads, layout.head_size)
        value = torch.randn(2, layout.num_kv_heads, layout.head_size_v)
        slots = torch.tensor([layout.block_size, 3 * layout.block_size - 1])
        reshape_and_cache(key, value, pages, slots, layout, K_SCALE, V_SCALE)
        start = pages.storage_offset()
        inside = torch.zeros_like(before, dtype=torch.bool)
        inside[:, start : start + layout.page_bytes] = True
        assert torch.equal(pool.buffer[~inside], before[~inside])
        assert not torch.equal(pool.buffer, before)


LAYOUT = Geometry("nvfp4", "nvfp4", 64, 32, HEADS, BLOCK_SIZE).layout
KEY, VALUE = torch.ones(2, HEADS, 64), torch.ones(2, HEADS, 32)
SLOT_MAPPING = torch.tensor([0, 1])


def test_slots_end_with_the_last_page() -> None:
    layout = PageLayout("nvfp4", "nvfp4", 32, 16, 2, 4)
    pages = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
    key, value = torch.ones(1, 2, 32), torch.ones(1, 2, 16)
    for slot in (-1, 0, 11):
        reshape_and_cache(
            key, value, pages, torch.tensor([slot]), layout, 1.0, 1.0, backend="reference"
        )
    with pytest.raises(ValueError, match="slot 12 is past the last, 11"):
        reshape_and_cache(
            key, value, pages, torch.tensor([12]), layout, 1.0, 1.0, backend="reference"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"slot_mapping": torch.tensor([0, 40])}, "slot 40", id="slot_past_the_end"),
        pytest.param({"slot_mapping": torch.tensor([0, 1, 2])}, "3 slots", id="more_slots"),
        pytest.param({"slot_mapping": SLOT_MAPPING.int()}, "int64", id="int32_slots"),
        pytest.param({"slot_mapping": SLOT_MAPPING[None]}, "slot_mapping", id="2d_slots"),
        pytest.param({"key": KEY.int()}, "key", id="int_key"),
        pytest.param({"value": VALUE.to(torch.uint8)}, "value", id="uint8_value"),
        pytest.param({"key": KEY[:, :, :32]}, "key", id="key_head_size"),
        pytest.param({"value": torch.ones(2, HEADS, 64)}, "value", id="value_head_size"),
        pytest.param({"key": KEY[:, :2]}, "key", id="key_heads"),
        pytest.param({"key": KEY.flatten(1)}, "key", id="2d_key"),
        pytest.param({"value": VALUE[:1]}, "slot_mapping", id="fewer_values_than_slots"),
        pytest.param(
            {"pages": torch.zeros(5, LAYOUT.page_bytes - 1, dtype=torch.uint8)},
            "pages",
            id="narrow_pages",
        ),
        pytest.param({"pages": torch.zeros(5, LAYOUT.page_bytes)}, "pages", id="float_pages"),
        pytest.param(
            {"pages": torch.zeros(5, 1, LAYOUT.page_bytes, dtype=torch.uint8)},
            "pages",
            id="3d_pages",
        ),
        pytest.param(
            {"pages": torch.zeros(LAYOUT.page_bytes, 5, dtype=torch.uint8).t()},
            "pages",
            id="transposed_pages",
        ),
        pytest.param({"k_scale": 0.0}, "scale", id="zero_k_scale"),
        pytest.param({"v_scale": math.nan}, "scale", id="nan_v_scale"),
        pytest.param({"v_scale": -1.0}, "scale", id="negative_v_scale"),
        pytest.param({"k_scale": None}, "k_scale: expected a positive", id="no_k_scale"),
        pytest.param({"k_scale": torch.tensor(0.0)}, "k_scale: expected", id="zero_in_tensor"),
        pytest.param({"v_scale": torch.tensor(-0.1)}, "v_scale: expected", id="below_0_in_tensor"),
        pytest.param({"v_scale": torch.tensor(1)}, "v_scale: expected float32", id="int_scale"),
        pytest.param({"layout": None}, "layout: expected a PageLayout", id="no_layout"),
        pytest.param({"slot_mapping": [0, 1]}, "slot_mapping: expected a tensor", id="list"),
    ],
)
def test_reshape_and_cache_refuses_and_leaves_the_pages(
    change: dict[str, torch.Tensor | float], message: str
) -> None:
    arguments = {
        "key": KEY,
        "value": VALUE,
        "pages": sentinel(NUM_PAGES, LAYOUT.page_bytes),
        "slot_mapping": SLOT_MAPPING,
        "layout": LAYOUT,
        "k_scale": K_SCALE,
        "v_scale": V_SCALE,
        **change,
    }
    pages = arguments["pages"]
    assert isinstance(pages, torch.Tensor)
    before = pages.clone()
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(**arguments)  # type: ignore[arg-type]
    assert torch.equal(pages, before)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reshape_and_cache_refuses_misaligned_pages(dtype: str) -> None:
    geometry = Geometry(dtype, dtype, 64, 32, HEADS, BLOCK_SIZE)
    pages = allocate(geometry, before=1, after=3).pages
    with pytest.raises(ValueError, match="multiple"):
        reshape_and_cache(KEY, VALUE, pages, SLOT_MAPPING, geometry.layout, 1.0, 1.0)


@pytest.mark.parametrize("layout", ["128", "48 and 32"])
def test_tokens_by_weighted_error_do_not_depend_on_others(layout: str) -> None:
    assert_tokens_are_stored_alone(reference_store, LAYOUTS[layout])
