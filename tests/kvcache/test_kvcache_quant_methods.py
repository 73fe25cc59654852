"""Cache formats by name, and the token-slot buffers of SGLang's interface."""

from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.kvcache import (
    KV_CACHE_QUANT_REGISTRY,
    KVCacheDType,
    KVCacheQuantMethod,
    KVScales,
    get_kv_cache_quant_method,
    quant_methods,
)
from halfbyte.numerics import fp8, nvfp4
from kvcache.page_arithmetic import (
    ALIASES,
    BLOCK_SIZES,
    DTYPES,
    UNQUANTIZED,
    WITH_GLOBAL_SCALE,
    data_width,
    decode,
    encode,
    head_bytes,
    scale_width,
    sentinel,
)

SIZE, HEADS, HEAD_DIM, LAYERS = 11, 3, 64, 2
K_SCALE, V_SCALE = 0.0371, 0.0059
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_scaled = pytest.mark.parametrize("dtype", WITH_GLOBAL_SCALE)
each_unscaled = pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype not in WITH_GLOBAL_SCALE]
)


class Attention(nn.Module):
    def __init__(self, layer_idx: int, k_scale: float | None, v_scale: float | None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.k_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        if k_scale is not None:
            self.k_scale = nn.Parameter(torch.tensor(k_scale), requires_grad=False)
        if v_scale is not None:
            self.register_buffer("v_scale", torch.tensor([v_scale]))


def model_with_scales(*scales: tuple[float | None, float | None]) -> nn.Module:
    layers = nn.ModuleList(
        nn.ModuleDict({"self_attn": Attention(i, k, v), "mlp": nn.Linear(4, 4)})
        for i, (k, v) in enumerate(scales)
    )
    return nn.ModuleDict({"layers": layers})


def layer_buffers(buffers: dict[str, Any], layer: int) -> list[torch.Tensor | None]:
    names = ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer")
    return [None if buffers[name] is None else buffers[name][layer] for name in names]


def test_registry_has_every_format() -> None:
    assert set(KV_CACHE_QUANT_REGISTRY) == set(DTYPES)
    assert set(DTYPES) == {dtype.value for dtype in KVCacheDType} - {"auto"}


@pytest.mark.parametrize("name", [*DTYPES, *ALIASES])
def test_get_kv_cache_quant_method_by_name_and_alias(name: str) -> None:
    method = get_kv_cache_quant_method(name)
    dtype = ALIASES.get(name, name)
    assert isinstance(method, KVCacheQuantMethod)
    assert type(method) is KV_CACHE_QUANT_REGISTRY[dtype]
    assert (method.name, method.dtype) == (dtype, KVCacheDType(dtype))
    assert method is not get_kv_cache_quant_method(name)


@each_dtype
def test_get_kv_cache_quant_method_by_member(dtype: str) -> None:
    assert get_kv_cache_quant_method(KVCacheDType(dtype)).name == dtype


@pytest.mark.parametrize("name", ["auto", "int4", "", "NVFP4"])
def test_get_kv_cache_quant_method_refuses_and_lists_the_valid(name: str) -> None:
    with pytest.raises(ValueError, match="nvfp4_4over6"):
        get_kv_cache_quant_method(name)


@each_dtype
def test_needs(dtype: str) -> None:
    method = get_kv_cache_quant_method(dtype)
    assert method.needs_global_scale() == (dtype in WITH_GLOBAL_SCALE)
    assert method.needs_dequant_workspace() is False
    assert BLOCK_SIZES.get(dtype, 1) == method.SCALE_BLOCK_SIZE


def test_method_with_blocks_of_another_format_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"SCALE_BLOCK_SIZE: expected 32, .* mxfp4, got 16"):
        type(get_kv_cache_quant_method("fp4_block16"))(KVCacheDType.MXFP4)


@pytest.mark.parametrize(
    ("dtype", "divisor"),
    [("nvfp4", 2688), ("nvfp4_4over6", 1536), ("fp8_e4m3", 448), ("fp8_e5m2", 57344)],
)
@pytest.mark.parametrize("amax", [1.0, 3.14159, 1e-6, 448.0, 65504.0])
def test_global_scale_from_amax(dtype: str, divisor: int, amax: float) -> None:
    scale = get_kv_cache_quant_method(dtype).global_scale_from_amax(amax)
    assert isinstance(scale, float)
    assert scale == float(torch.tensor(amax / divisor, dtype=torch.float32))


@each_dtype
def test_global_scale_of_an_all_zero_tensor_is_one(dtype: str) -> None:
    assert get_kv_cache_quant_method(dtype).global_scale_from_amax(0.0) == 1.0


@each_unscaled
def test_formats_without_a_global_scale_answer_one(dtype: str) -> None:
    assert get_kv_cache_quant_method(dtype).global_scale_from_amax(123.0) == 1.0


@each_dtype
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantize_and_dequantize_are_the_oracles(dtype: str, out: torch.dtype) -> None:
    x = torch.randn(5, HEADS, HEAD_DIM)
    method = get_kv_cache_quant_method(dtype)
    data, scales = method.quantize(x, K_SCALE)
    expected_data, expected_scales = encode(dtype, x, K_SCALE)
    assert data.dtype == UNQUANTIZED.get(dtype, torch.uint8)
    assert torch.equal(data.view(torch.uint8), expected_data)
    assert (scales is None) == (expected_scales is None)
    if scales is not None and expected_scales is not None:
        assert scales.dtype == torch.uint8
        assert torch.equal(scales, expected_scales)
    values = method.dequantize(data, scales, K_SCALE, out)
    assert values.dtype == out
    assert torch.equal(values, decode(dtype, (expected_data, expected_scales), K_SCALE, out))


@each_dtype
def test_create_buffers(dtype: str) -> None:
    method = get_kv_cache_quant_method(dtype)
    buffers = method.create_buffers(SIZE, HEADS, HEAD_DIM, LAYERS, "cpu")
    width = HEAD_DIM if dtype in UNQUANTIZED else data_width(dtype, HEAD_DIM)
    for name in ("k_buffer", "v_buffer"):
        assert [tuple(b.shape) for b in buffers[name]] == [(SIZE, HEADS, width)] * LAYERS
        assert {b.dtype for b in buffers[name]} == {UNQUANTIZED.get(dtype, torch.uint8)}
    for name in ("k_scale_buffer", "v_scale_buffer"):
        if dtype not in BLOCK_SIZES:
            assert buffers[name] is None
            continue
        shape = (SIZE, HEADS, scale_width(dtype, HEAD_DIM))
        assert [tuple(b.shape) for b in buffers[name]] == [shape] * LAYERS
        assert {b.dtype for b in buffers[name]} == {torch.uint8}
    assert buffers["store_dtype"] == UNQUANTIZED.get(dtype, torch.uint8)
    assert buffers["dq_k_buffer"] is None
    assert buffers["dq_v_buffer"] is None
    slot_bytes = 2 * HEADS * head_bytes(dtype, HEAD_DIM)
    assert buffers["layout"].page_bytes == slot_bytes
    assert [tuple(pages.shape) for pages in buffers["pages"]] == [(SIZE, slot_bytes)] * LAYERS
    assert not any(pages.any() for pages in buffers["pages"])


@each_dtype
def test_create_buffers_are_views_of_a_slots_own_bytes(dtype: str) -> None:
    buffers = get_kv_cache_quant_method(dtype).create_buffers(SIZE, HEADS, HEAD_DIM, 1, "cpu")
    pages = buffers["pages"][0]
    offset = 0
    order = ("k_buffer", "k_scale_buffer", "v_buffer", "v_scale_buffer")
    widths = (data_width(dtype, HEAD_DIM), scale_width(dtype, HEAD_DIM)) * 2
    for name, width in zip(order, widths, strict=True):
        if buffers[name] is not None:
            view = buffers[name][0]
            assert view.data_ptr() == pages.data_ptr() + offset
            assert view.stride(0) * view.element_size() == pages.shape[1]
        offset += HEADS * width


@each_dtype
@pytest.mark.parametrize(("size", "layers"), [(0, 2), (4, 0)])
def test_create_buffers_of_nothing(dtype: str, size: int, layers: int) -> None:
    method = get_kv_cache_quant_method(dtype)
    buffers = method.create_buffers(size, HEADS, HEAD_DIM, layers, "cpu")
    assert len(buffers["k_buffer"]) == len(buffers["pages"]) == layers
    assert all(buffer.shape[0] == size for buffer in buffers["v_buffer"])


@each_dtype
def test_compute_cell_size_is_the_bytes_of_a_slot(dtype: str) -> None:
    method = get_kv_cache_quant_method(dtype)
    buffers = method.create_buffers(SIZE, HEADS, HEAD_DIM, LAYERS, "cpu")
    real = sum(pages.numel() for pages in buffers["pages"])
    assert method.compute_cell_size(HEADS, HEAD_DIM, LAYERS) * SIZE == real
    kv_size = UNQUANTIZED.get(dtype, torch.uint8).itemsize
    assert method.compute_cell_size(HEADS, HEAD_DIM, LAYERS, kv_size) * SIZE == real


@each_dtype
@pytest.mark.parametrize("loc_dtype", [torch.int64, torch.int32], ids=str)
def test_quantize_and_store_round_trip(dtype: str, loc_dtype: torch.dtype) -> None:
    method = get_kv_cache_quant_method(dtype)
    buffers = method.create_buffers(SIZE, HEADS, HEAD_DIM, LAYERS, "cpu")
    for pages in buffers["pages"]:
        pages.copy_(sentinel(*pages.shape))
    before = [pages.clone() for pages in buffers["pages"]]
    loc = torch.tensor([7, -1, 0, 10], dtype=loc_dtype)
    key, value = torch.randn(2, 4, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    k, v, k_scales, v_scales = layer_buffers(buffers, 1)
    assert k is not None
    assert v is not None
    method.quantize_and_store(k, v, k_scales, v_scales, loc, key, value, K_SCALE, V_SCALE)
    rows = torch.tensor([7, 0, 10])
    k_read, v_read = method.dequantize_prev_kv(
        k[rows],
        None if k_scales is None else k_scales[rows],
        v[rows],
        None if v_scales is None else v_scales[rows],
        k_scale=K_SCALE,
        v_scale=V_SCALE,
    )
    assert (k_read.dtype, v_read.dtype) == (torch.bfloat16, torch.bfloat16)
    for read, x, g in ((k_read, key, K_SCALE), (v_read, value, V_SCALE)):
        assert torch.equal(read, decode(dtype, encode(dtype, x[[0, 2, 3]], g), g, torch.bfloat16))
    others = [i for i in range(SIZE) if i not in rows.tolist()]
    assert torch.equal(buffers["pages"][1][others], before[1][others])
    assert torch.equal(buffers["pages"][0], before[0])


@each_scaled
@pytest.mark.parametrize("given", ["k_scale", "v_scale", None])
def test_quantize_and_store_without_a_scale_stores_nothing(dtype: str, given: str | None) -> None:
    method = get_kv_cache_quant_method(dtype)
    buffers = method.create_buffers(SIZE, HEADS, HEAD_DIM, 1, "cpu")
    k, v, k_scales, v_scales = layer_buffers(buffers, 0)
    assert k is not None
    assert v is not None
    x = torch.ones(1, HEADS, HEAD_DIM)
    scales = {} if given is None else {given: 0.5}
    with pytest.raises(ValueError, match="scale"):
        method.quantize_and_store(k, v, k_scales, v_scales, torch.tensor([2]), x, x, **scales)
    assert not buffers["pages"][0].any()


@each_scaled
def test_dequantize_prev_kv_without_a_scale_is_an_error(dtype: str) -> None:
    method = get_kv_cache_quant_method(dtype)
    buffers = method.create_buffers(SIZE, HEADS, HEAD_DIM, 1, "cpu")
    k, v, k_scales, v_scales = layer_buffers(buffers, 0)
    assert k is not None
    assert v is not None
    for scales in ({}, {"k_scale": 1.0}, {"v_scale": 1.0}, {"layer_id": 0}):
        with pytest.raises(ValueError, match="scale"):
            method.dequantize_prev_kv(k, k_scales, v, v_scales, **scales)


@each_unscaled
def test_formats_without_a_global_scale_need_none(dtype: str) -> None:
    method = get_kv_cache_quant_method(dtype)
    buffers = method.create_buffers(2, HEADS, HEAD_DIM, 1, "cpu")
    k, v, k_scales, v_scales = layer_buffers(buffers, 0)
    assert k is not None
    assert v is not None
    x = torch.randn(2, HEADS, HEAD_DIM)
    method.quantize_and_store(k, v, k_scales, v_scales, torch.arange(2), x, -x)
    k_read, v_read = method.dequantize_prev_kv(k, k_scales, v, v_scales, 0, torch.float32)
    assert torch.equal(k_read, decode(dtype, encode(dtype, x, 1.0), 1.0))
    assert torch.equal(v_read, decode(dtype, encode(dtype, -x, 1.0), 1.0))


@each_scaled
def test_load_scales_from_model_feeds_dequantize_prev_kv(dtype: str) -> None:
    method = get_kv_cache_quant_method(dtype)
    multipliers = [(0.011, 0.0021), (0.3, 0.007)]
    loaded = method.load_scales_from_model(model_with_scales(*multipliers))
    assert loaded is not None
    assert loaded is method.scales
    assert loaded.num_layers == 2
    x = torch.randn(3, HEADS, HEAD_DIM)
    for layer, (k_scale, v_scale) in enumerate(multipliers):
        k, v = encode(dtype, x, k_scale), encode(dtype, x, v_scale)
        k_read, v_read = method.dequantize_prev_kv(*k, *v, layer, torch.float32)
        assert torch.equal(k_read, decode(dtype, k, k_scale))
        assert torch.equal(v_read, decode(dtype, v, v_scale))


@each_scaled
def test_a_given_scale_wins_over_a_loaded_one(dtype: str) -> None:
    method = get_kv_cache_quant_method(dtype)
    method.load_scales_from_model(model_with_scales((0.5, 0.25)))
    x = encode(dtype, torch.randn(1, HEADS, HEAD_DIM), 0.1)
    k, v = method.dequantize_prev_kv(*x, *x, 0, torch.float32, k_scale=0.1)
    assert torch.equal(k, decode(dtype, x, 0.1))
    assert torch.equal(v, decode(dtype, x, 0.25))


@each_scaled
def test_dequantize_prev_kv_without_scales_is_an_error(dtype: str) -> None:
    method = get_kv_cache_quant_method(dtype)
    method.load_scales_from_model(model_with_scales((0.5, 0.25)))
    data, scales = encode(dtype, torch.randn(1, HEADS, HEAD_DIM), 0.1)
    with pytest.raises(ValueError, match="layer"):
        method.dequantize_prev_kv(data, scales, data, scales, 1)


@each_scaled
@pytest.mark.parametrize(
    "scales",
    [
        pytest.param([(None, 0.5)], id="no_k"),
        pytest.param([(0.5, None)], id="no_v"),
        pytest.param([(0.5, 0.5), (None, None)], id="second_layer"),
        pytest.param([], id="no_layers"),
    ],
)
def test_load_scales_from_model_without_scales_is_an_error(
    dtype: str, scales: list[tuple[float | None, float | None]]
) -> None:
    method = get_kv_cache_quant_method(dtype)
    with pytest.raises(ValueError, match="k_scale"):
        method.load_scales_from_model(model_with_scales(*scales))
    assert method.scales is None


@each_unscaled
def test_formats_without_a_global_scale_load_none(dtype: str) -> None:
    assert get_kv_cache_quant_method(dtype).load_scales_from_model(model_with_scales()) is None


def test_recipes_of_nvfp4_differ() -> None:
    x = torch.randn(8, 64)
    plain, _ = get_kv_cache_quant_method("nvfp4").quantize(x, 0.002)
    adaptive, _ = get_kv_cache_quant_method("nvfp4_4over6").quantize(x, 0.002)
    assert torch.equal(plain, nvfp4.quantize(x, 0.002, "amax6")[0])
    assert torch.equal(adaptive, nvfp4.quantize(x, 0.002, "four_over_six")[0])
    assert not torch.equal(plain, adaptive)


def test_formats_of_fp8_differ() -> None:
    x = torch.randn(8, 64)
    e4m3, _ = get_kv_cache_quant_method("fp8").quantize(x, 0.002)
    e5m2, _ = get_kv_cache_quant_method("fp8_e5m2").quantize(x, 0.002)
    assert torch.equal(e4m3, fp8.quantize(x, 0.002, "e4m3"))
    assert torch.equal(e5m2, fp8.quantize(x, 0.002, "e5m2"))


def test_scales_of_a_method_belong_to_the_instance() -> None:
    first = get_kv_cache_quant_method("nvfp4")
    first.scales = KVScales((1.0,), (1.0,), "user")
    assert get_kv_cache_quant_method("nvfp4").scales is None


def test_a_class_whose_format_has_no_row_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KV_CACHE_QUANT_REGISTRY["nvfp4"], "FORMATS", ("nvfp4", "nope"))
    with pytest.raises(ValueError, match=r"^NVFP4KVCacheMethod.FORMATS: nope has no row in "):
        quant_methods._registry()


def test_a_format_of_two_classes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KV_CACHE_QUANT_REGISTRY["nvfp4"], "FORMATS", ("nvfp4", "mxfp4"))
    with pytest.raises(ValueError, match="FORMATS: mxfp4 is in MXFP4KVCacheMethod"):
        quant_methods._registry()
