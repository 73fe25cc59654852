"""`store.cu` run on the CPU: the reference's bytes, by blocks, rows and tiles."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cuda_on_host import needs_compiler
from halfbyte.kvcache.recent import RingSlots
from halfbyte.kvcache.store.base import StoreConfig, StoreInputs
from halfbyte.kvcache.store.cuda import store as cuda_store
from halfbyte.kvcache.store.cuda.store import CudaStore
from halfbyte.kvcache.store.registry import select_store
from halfbyte.layouts import PageLayout
from kvcache.store.close_calls import CLOSE_CALLS, assert_close_calls_are_stored
from kvcache.store.cuda_store import on_host
from kvcache.store.recipe_cases import assert_stored_as_by_the_reference
from kvcache.store.store_cases import reference_store
from kvcache.store.weighted_cases import (
    BOTH,
    CASES,
    LAYOUTS,
    WeightedCase,
    assert_stored_by_weights,
    assert_tokens_are_stored_alone,
)
from kvcache.transforms import make_transform
from slow import slow

ROWS, TILES = 1000, 0
"""Numbers of SMs for which error feedback goes by rows, or by tiles."""
Store = Callable[..., None]


def on_gpu_of(num_sms: int, capability: int = 90) -> Store:
    """The store with its kernels run on the CPU."""

    def store(*arguments: Any, **options: Any) -> None:
        with on_host(num_sms, capability):
            CudaStore.store(StoreInputs(*arguments, **options))

    return store


def is_taken(case: WeightedCase) -> bool:
    config = StoreConfig(case.layout, torch.float32, torch.float32, "cuda", True, True)
    return CudaStore.can_implement(config)[0]


QUICK = {("128", ROWS), ("128", TILES), ("V in fp8, 64", ROWS), ("sm100", TILES), ("256", ROWS)}
OF_SCALES = [name for name in CASES if "scale" in name]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "num_sms"),
    [
        (name, num_sms) if (name, num_sms) in QUICK else slow(name, num_sms)
        for name, case in CASES.items()
        for num_sms in (ROWS, TILES)
        if is_taken(case) and name not in OF_SCALES
    ],
)
def test_blocks_are_rounded_by_weighted_error(name: str, num_sms: int) -> None:
    assert_stored_by_weights(on_gpu_of(num_sms), CASES[name], count=70)


@needs_compiler
@pytest.mark.parametrize("num_sms", [ROWS, slow(TILES)])
@pytest.mark.parametrize("name", OF_SCALES)
def test_global_scales_of_every_size(name: str, num_sms: int) -> None:
    assert_stored_by_weights(on_gpu_of(num_sms), CASES[name], count=70)


@needs_compiler
@pytest.mark.parametrize("count", [1, 3, 33])
@pytest.mark.parametrize("num_sms", [ROWS, TILES])
def test_few_tokens(num_sms: int, count: int) -> None:
    assert_stored_by_weights(on_gpu_of(num_sms), CASES["128"], count=count)


@needs_compiler
@pytest.mark.parametrize(
    ("options", "dtype", "num_sms"),
    [
        ({}, torch.bfloat16, ROWS),
        slow({"rotate": False}, torch.float16, ROWS),
        slow({"center": False}, torch.float32, ROWS),
        slow({"first_tokens": 0}, torch.bfloat16, ROWS),
        slow({"head_size": 256, "heads": 1, "head_size_v": 16}, torch.float16, ROWS),
        (BOTH, torch.float16, ROWS),
        (BOTH, torch.bfloat16, TILES),
        slow({**BOTH, "head_size": 256, "heads": 1, "head_size_v": 16}, torch.float32, TILES),
        slow({**BOTH, "center": False, "rotate": False, "first_tokens": 0}, torch.bfloat16, ROWS),
        ({"weighted": True}, torch.bfloat16, ROWS),
        slow(
            {"weighted": True, "head_size": 256, "heads": 2, "head_size_v": 48}, torch.float32, ROWS
        ),
        slow({"weighted": True, "head_size": 128, "heads": 3}, torch.float16, ROWS),
        slow({"weighted": True, "head_size": 64}, torch.bfloat16, TILES),
        slow({"feedback": True}, torch.bfloat16, TILES),
    ],
    ids=str,
)
def test_k_that_a_recipe_changes(options: dict[str, Any], dtype: torch.dtype, num_sms: int) -> None:
    """With first tokens, padding, and tokens kept in rings."""
    assert_stored_as_by_the_reference(on_gpu_of(num_sms), options, dtype, count=150)


@needs_compiler
@pytest.mark.parametrize("num_sms", [ROWS, TILES])
@pytest.mark.parametrize("name", CLOSE_CALLS)
def test_what_hangs_on_the_last_bit(name: str, num_sms: int) -> None:
    assert_close_calls_are_stored(on_gpu_of(num_sms), name)


@needs_compiler
@pytest.mark.parametrize("capability", [90, 120])
def test_tiles_with_and_without_their_first_blocks(capability: int) -> None:
    """SM90 has shared memory for more tiles if these lack a block."""
    variants: list[bool] = []
    leaves_out = cuda_store._leaves_out

    def seen(*arguments: Any) -> bool:
        variants.append(leaves_out(*arguments))
        return variants[-1]

    with patch.object(cuda_store, "_leaves_out", seen):
        assert_stored_by_weights(on_gpu_of(TILES, capability), CASES["128"], count=70)
    assert set(variants) == {capability == 90}


@needs_compiler
@pytest.mark.parametrize("name", ["128", "weights alone"])
def test_gpus_without_a_conversion_to_e4m3(name: str) -> None:
    assert_stored_by_weights(on_gpu_of(ROWS, capability=80), CASES[name], count=20)


@needs_compiler
def test_tokens_are_stored_alone() -> None:
    def store(*arguments: Any) -> None:
        """A store that uses rows for small chunks and tiles for large ones."""
        num_sms = TILES if len(arguments[0]) > 16 else ROWS
        transform = arguments[7]
        on_gpu_of(num_sms)(*arguments[:7], transform, arguments[8])

    assert_tokens_are_stored_alone(store, LAYOUTS["64 NHD"])


def stored(store: Store, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """A buffer with pages from its third byte on, after a store with some padding slots."""
    layout = LAYOUTS["64 NHD"]
    buffer = torch.full((4, layout.page_bytes + 7), 0xAB, dtype=torch.uint8)
    slots = torch.tensor([5, -1, 63, 2**40, 64, 17, 0])[: len(key)]
    if store is reference_store:
        slots[slots >= 64] = -1
    transform = make_transform(layout.num_kv_heads, 64, **BOTH)
    positions = torch.arange(len(slots)) * 9
    pages = buffer[:, 3 : 3 + layout.page_bytes]
    store(key, value, pages, slots, layout, 0.02, 0.03, transform, positions, **options)
    return buffer


@needs_compiler
def test_any_strides_and_alignment_and_slots_past_the_last_page() -> None:
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(64, 7, 3, generator=generator).permute(1, 2, 0)
    value = torch.randn(9, 3 * 64 + 5, generator=generator)[1:8, 3:-2].unflatten(1, (3, 64))
    expected = stored(reference_store, key, value)
    assert torch.equal(stored(on_gpu_of(ROWS), key, value), expected)


@needs_compiler
@pytest.mark.parametrize("num_sms", [ROWS, TILES])
@pytest.mark.parametrize("segment", [1, 16])
def test_first_tokens_elsewhere_and_past_the_last_mean(num_sms: int, segment: int) -> None:
    """A constant is marked at position 0 alone, also if the only mean is that of one position."""
    layout = PageLayout("nvfp4", "nvfp4", 64, None, 2, 16)
    transform = make_transform(weighted=True, segment=segment, segments=1)
    assert transform.first_keys is not None
    assert transform.first_values is not None
    key, value = (x[:1].repeat(7, 1, 1) for x in (transform.first_keys, transform.first_values))
    assert transform.cos is not None
    assert transform.sin is not None
    repeated = replace(
        transform, cos=transform.cos.expand(40, -1), sin=transform.sin.expand(40, -1)
    )
    positions = torch.tensor([0, 1, 5, 15, 39, 0, -1])
    slots = torch.tensor([0, 1, 2, 3, 4, 5, -1])
    pages = []
    for write, by in ((reference_store, repeated), (on_gpu_of(num_sms), transform)):
        page = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
        write(key, value, page, slots, layout, 0.02, 0.02, by, positions)
        pages.append(page)
    assert torch.equal(*pages)


@needs_compiler
def test_empty_batches_and_rings_of_another_dtype() -> None:
    key, value = torch.randn(2, 7, 3, 64, generator=torch.Generator().manual_seed(0))
    none = stored(on_gpu_of(ROWS), key[:0], value[:0])
    assert (none == 0xAB).all()
    rows, owners, slots = torch.tensor([6, 1]), torch.tensor([0, 1]), torch.tensor([3, 2])
    for kept in (slice(0, 7), slice(0, 0)):
        rings = torch.zeros(2, 2, 3, 5, 64, dtype=torch.bfloat16)
        count = len(key[kept])
        recent = RingSlots(rings[0], rings[1], rows[:count], owners[:count], slots[:count])
        stored(on_gpu_of(ROWS), key[kept], value[kept], recent=recent)
        assert torch.equal(rings[0][owners, :, slots][:count], key[rows].bfloat16()[:count])
        assert torch.equal(rings[1][owners, :, slots][:count], value[rows].bfloat16()[:count])


WEIGHED = {"transform": True, "weighs_errors": True}


@pytest.mark.parametrize(
    ("layout", "changed", "chosen"),
    [
        (LAYOUTS["128"], WEIGHED, "cuda"),
        (LAYOUTS["sm100"], WEIGHED, "cuda"),
        (LAYOUTS["128"], {"transform": True}, "triton"),
        (LAYOUTS["128"], {}, "triton"),
        (LAYOUTS["48 and 32"], WEIGHED, "triton"),
        (LAYOUTS["V in fp8"], WEIGHED, "triton"),
        (PageLayout("nvfp4", "bfloat16", 128, None, 2, 16), WEIGHED, "triton"),
    ],
    ids=str,
)
def test_what_is_chosen_on_a_gpu(
    layout: PageLayout, changed: dict[str, bool], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("cuda.bindings")
    monkeypatch.setattr("halfbyte.dispatch.current_compute_capability", lambda device=None: 90)
    select_store.cache_clear()
    dtype = torch.bfloat16
    store = select_store(StoreConfig(layout, dtype, dtype, "cuda", **changed))
    select_store.cache_clear()
    assert store.name == chosen
