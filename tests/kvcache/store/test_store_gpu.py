"""The compiled store kernel on a GPU: the reference's bytes, without a sync."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gpu_sync import waiting_is_an_error
from halfbyte.kvcache import reshape_and_cache
from halfbyte.layouts import PageLayout
from kvcache.page_arithmetic import KERNEL_DTYPES, KERNEL_DTYPES_WITH_GLOBAL_SCALE, Geometry
from kvcache.store.close_calls import CLOSE_CALLS, assert_close_calls_are_stored
from kvcache.store.recipe_cases import (
    RECIPE_OPTIONS,
    WEIGHTED_OPTIONS,
    assert_stored_as_by_the_reference,
)
from kvcache.store.store_cases import (
    GEOMETRIES,
    INPUT_DTYPES,
    StoreCase,
    assert_same_buffers,
    is_unquantized,
    make_case,
    nasty_values,
    positional,
)
from kvcache.store.weighted_cases import BOTH, CASES, SMALL, assert_stored_by_weights
from kvcache.transforms import make_transform, on

pytest.importorskip("triton")

import triton
import triton.language as tl

from halfbyte.kernels.formats.encode_floats import multiply_two_parts, reciprocal_of
from halfbyte.kvcache.store.cuda import store as cuda_store
from halfbyte.kvcache.store.triton_kernel import store_tokens

pytestmark = pytest.mark.gpu

Call = Callable[..., None]


def without_waiting(store: Call) -> Call:
    def call(*arguments: Any, **options: Any) -> None:
        with waiting_is_an_error():
            store(*arguments, **options)

    return call


@pytest.mark.parametrize(("seed", "geometry"), list(enumerate(GEOMETRIES)), ids=str)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (16, 32), (4, 12), (3, 6)], ids=str)
def test_gpu_store_writes_the_references_bytes_and_no_others(
    seed: int, geometry: Geometry, before: int, after: int
) -> None:
    if is_unquantized(geometry) and before == 3:
        before, after = 8, 8
    case = make_case(geometry, seed, before=before, after=after)
    case.assert_stored(without_waiting(reshape_and_cache), "cuda")


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "head_size"), [(8, 128), (3, 96), (1, 512)], ids=str)
def test_gpu_store_of_many_tokens(
    dtype: str, input_dtype: torch.dtype, heads: int, head_size: int
) -> None:
    layout = PageLayout(dtype, dtype, head_size, None, heads, 16)
    count, num_pages = 1500, 100
    torch.manual_seed(5)
    slots = torch.randperm(num_pages * 16)[:count]
    slots[::7] = -1
    key, value = (nasty_values((count, heads, head_size), i).to(input_dtype) for i in range(2))
    case = StoreCase(layout, key, value, slots, 0.0137, torch.tensor(0.3), num_pages=num_pages)
    case.assert_stored(without_waiting(reshape_and_cache), "cuda")


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_gpu_store_of_any_float32(dtype: str) -> None:
    layout = PageLayout(dtype, dtype, 128, None, 8, 16)
    count = 2048
    torch.manual_seed(6)
    bits = torch.randint(-(2**31), 2**31, (2, count, 8, 128), dtype=torch.int64).int()
    key, value = bits.view(torch.float32)
    # Blocks of like magnitudes, where all bits matter.
    value = value.abs().frexp()[0] * torch.randn_like(value).sign()
    slots = torch.randperm(count)
    case = StoreCase(layout, key, value, slots, 0.0137, 0.00031, num_pages=count // 16)
    case.assert_stored(without_waiting(reshape_and_cache), "cuda")


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_store_of_every_16_bit_value(dtype: str, input_dtype: torch.dtype) -> None:
    layout = PageLayout(dtype, dtype, 256, None, 1, 16)
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(input_dtype)
    x = torch.where(x.isfinite(), x, 0)
    torch.manual_seed(7)
    key, value = x.view(-1, 1, 256), x[torch.randperm(len(x))].view(-1, 1, 256)
    for scale in (1.0, 0.0137, 2.0**-24, 77.7, 1e-20, 1e20):
        case = StoreCase(layout, key, value, torch.arange(256), scale, 3 * scale, num_pages=16)
        case.assert_stored(positional(store_tokens), "cuda")


@pytest.mark.parametrize("dtype", KERNEL_DTYPES_WITH_GLOBAL_SCALE)
@pytest.mark.parametrize("scale", [0.0, -0.01, float("nan"), float("inf"), 1e-42, 3e38])
def test_gpu_store_with_odd_scales_on_the_device(dtype: str, scale: float) -> None:
    geometry = Geometry(dtype, dtype, 64, 64, 3, 8)
    case = make_case(geometry, k_scale=torch.tensor(scale), v_scale=torch.tensor(0.02))
    case.assert_stored(without_waiting(reshape_and_cache), "cuda")


def test_gpu_store_with_scale_tensors_on_the_cpu() -> None:
    case = make_case(Geometry("nvfp4", "fp8_e4m3", 64, 64, 3, 8))

    def store(key: Any, value: Any, pages: Any, slots: Any, layout: Any, *scales: float) -> None:
        k_scale, v_scale = torch.tensor(scales[0]), torch.tensor([scales[1]])
        reshape_and_cache(key, value, pages, slots, layout, k_scale, v_scale)

    case.assert_stored(without_waiting(store), "cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "nvfp4", "mxfp4"])
def test_gpu_store_takes_inputs_of_any_strides(dtype: str) -> None:
    case = make_case(Geometry(dtype, dtype, 64, 64, 3, 8))
    expected = case.expected()
    count = len(case.slots)

    def store(key: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
        fused = torch.zeros(count, 3 * 64 + 9, dtype=value.dtype, device="cuda")
        strided = fused[:, 4:-5].unflatten(1, (3, 64))
        strided.copy_(value)
        key = key.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        with waiting_is_an_error():
            reshape_and_cache(key, strided, *rest)

    assert_same_buffers(case, case.stored(store, "cuda"), expected)


def test_gpu_store_of_a_prompt_equals_the_reference_on_the_gpu() -> None:
    for dtype in KERNEL_DTYPES:
        layout = PageLayout(dtype, dtype, 128, None, 8, 16)
        torch.manual_seed(8)
        key, value = torch.randn(2, 8192, 8, 128, device="cuda").bfloat16()
        slots = torch.randperm(8192, device="cuda")
        pages = torch.zeros(512, layout.page_bytes, dtype=torch.uint8, device="cuda")
        expected = pages.clone()
        reshape_and_cache(key, value, expected, slots, layout, 0.002, 0.003, backend="reference")
        with waiting_is_an_error():
            reshape_and_cache(key, value, pages, slots, layout, 0.002, 0.003)
        assert torch.equal(pages, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "nvfp4", "nvfp4_4over6"])
def test_gpu_store_in_a_graph_follows_changing_slots_and_values(dtype: str) -> None:
    layout = PageLayout(dtype, dtype, 128, None, 8, 16)
    key, value = torch.randn(2, 64, 8, 128, device="cuda").bfloat16()
    slots = torch.arange(64, device="cuda")
    scale = torch.tensor(0.002, device="cuda")
    pages = torch.zeros(8, layout.page_bytes, dtype=torch.uint8, device="cuda")
    expected = pages.clone()
    reshape_and_cache(key, value, pages, slots, layout, scale, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reshape_and_cache(key, value, pages, slots, layout, scale, scale)
    for i in range(3):
        key.normal_()
        scale.fill_(0.002 * (i + 1))
        slots.copy_(torch.randperm(128)[:64])
        slots[i] = -1
        pages.zero_()
        expected.zero_()
        graph.replay()
        reshape_and_cache(key, value, expected, slots, layout, scale, scale, backend="reference")
        assert torch.equal(pages, expected)


def test_gpu_store_skips_slots_past_the_last_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(Geometry("nvfp4", "nvfp4", 64, 64, 3, 8))
    slots = case.slots.clone()
    slots[0], slots[2] = 40, 2**40
    case.slots = slots
    case.assert_stored(without_waiting(reshape_and_cache), "cuda")
    monkeypatch.setenv("HALFBYTE_DEBUG", "1")
    with pytest.raises(ValueError, match=f"slot {2**40} is past the last, 39"):
        case.stored(reshape_and_cache, "cuda")


def test_gpu_store_by_the_reference() -> None:
    case = make_case(Geometry("nvfp4", "fp8_e4m3", 64, 64, 3, 8))
    case.assert_stored(partial(reshape_and_cache, backend="reference"), "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_store_on_another_than_the_current_device() -> None:
    make_case(Geometry("nvfp4", "nvfp4", 64, 64, 3, 8)).assert_stored(reshape_and_cache, "cuda:1")


@triton.jit
def _divide(x, divisors, quotients, size: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * size + tl.arange(0, size)
    high, low = reciprocal_of(tl.load(divisors + index))
    tl.store(quotients + index, multiply_two_parts(tl.load(x + index), high, low))


def test_gpu_shared_division_rounds_as_a_true_one() -> None:
    significands = torch.arange(2**23, dtype=torch.int32, device="cuda")
    divisors = (significands | 0x3F800000).view(torch.float32)
    quotients = torch.zeros_like(divisors)
    for odd in range(1, 33, 2):
        # All ties of E2M1, E4M3 and E5M2 are such numbers times powers of two.
        tie = odd / 2 ** (odd.bit_length() - 1)
        nearest = (tie * divisors).view(torch.int32)
        for steps in range(-3, 4):
            x = (nearest + steps).view(torch.float32)
            _divide[(2**23 // 1024,)](x, divisors, quotients, size=1024, enable_fp_fusion=False)
            true = x / divisors
            assert torch.equal(quotients < tie, true < tie)
            assert torch.equal(quotients > tie, true > tie)


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("input_dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("options", RECIPE_OPTIONS + WEIGHTED_OPTIONS, ids=str)
def test_gpu_store_of_k_that_a_recipe_changes(
    options: dict[str, Any], input_dtype: torch.dtype, backend: str | None
) -> None:
    store = without_waiting(store_k(backend))
    assert_stored_as_by_the_reference(store, options, input_dtype, "cuda")


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("count", [90, 1, 3000])
@pytest.mark.parametrize("name", [*CASES, *SMALL])
def test_gpu_store_by_weighted_error(name: str, count: int, backend: str | None) -> None:
    """With small and with large programs."""
    store = without_waiting(store_k(backend))
    assert_stored_by_weights(store, (CASES | SMALL)[name], torch.bfloat16, "cuda", count)


@pytest.mark.parametrize("rows_per_sm", [0, 10**6])
@pytest.mark.parametrize("name", ["128", "64 NHD", "256", "feedback alone", "broken scale nan"])
def test_gpu_store_by_rows_and_by_tiles(
    name: str, rows_per_sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tokens by rows, and few tokens by tiles: the other way than selected."""
    monkeypatch.setattr(cuda_store, "_ROWS_PER_SM", rows_per_sm)
    for count in (1, 90, 3000):
        assert_stored_by_weights(store_k("cuda"), CASES[name], torch.bfloat16, "cuda", count)


@pytest.mark.parametrize("rows_per_sm", [0, 10**6])
@pytest.mark.parametrize("name", CLOSE_CALLS)
def test_gpu_store_of_what_hangs_on_the_last_bit(
    name: str, rows_per_sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_store, "_ROWS_PER_SM", rows_per_sm)
    assert_close_calls_are_stored(store_k("cuda"), name, "cuda")


@pytest.mark.parametrize("tokens", [64, 2048])
def test_gpu_store_with_a_recipe_in_a_graph(tokens: int) -> None:
    layout = PageLayout("nvfp4_4over6", "nvfp4_4over6", 128, None, 8, 16)
    transform = on(make_transform(8, 128, segments=200, dtype=torch.bfloat16, **BOTH), "cuda")
    transform.prepare()
    key, value = torch.randn(2, tokens, 8, 128, device="cuda").bfloat16()
    slots = torch.arange(tokens, device="cuda")
    positions = torch.arange(tokens, device="cuda")
    scale = torch.tensor(0.002, device="cuda")
    pages = torch.zeros(tokens // 8, layout.page_bytes, dtype=torch.uint8, device="cuda")
    expected = pages.clone()
    arguments = (key, value, pages, slots, layout, scale, scale, transform, positions)
    store = store_k(None)
    store(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store(*arguments)
    for i in range(3):
        key.normal_()
        slots.copy_(torch.randperm(2 * tokens)[:tokens])
        slots[i] = -1
        positions.random_(200 * 16)
        pages.zero_()
        expected.zero_()
        graph.replay()
        store_k("reference")(*arguments[:2], expected, *arguments[3:])
        assert torch.equal(pages, expected)


def store_k(backend: str | None) -> Call:
    """A store by a named backend, or by the selected one."""

    def store(*arguments: Any, **options: Any) -> None:
        options |= zip(("transform", "positions"), arguments[7:], strict=False)
        reshape_and_cache(*arguments[:7], **options | {"backend": backend})

    return store
