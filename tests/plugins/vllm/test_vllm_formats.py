"""Formats of layers, and vLLM's caches as pages, without vLLM."""

from typing import Any

import pytest
import torch

from halfbyte.kvcache import FullAttentionSpec
from halfbyte.layouts import PageLayout
from halfbyte.plugins.vllm.formats import LayerFormat, block_size_of, pages_of
from halfbyte.plugins.vllm.options import Options


@pytest.mark.parametrize(
    ("cache_dtype", "options", "k", "v"),
    [
        ("auto", {}, "bfloat16", "bfloat16"),
        ("float16", {}, "float16", "float16"),
        ("fp8", {}, "fp8_e4m3", "fp8_e4m3"),
        ("nvfp4", {}, "nvfp4", "nvfp4"),
        ("nvfp4_4over6", {}, "nvfp4_4over6", "nvfp4_4over6"),
        ("nvfp4", {"k_dtype": "fp8"}, "fp8_e4m3", "nvfp4"),
        ("nvfp4", {"v_dtype": "auto"}, "nvfp4", "bfloat16"),
        ("nvfp4", {"k_dtype": "mxfp4", "v_dtype": "fp4_block16"}, "mxfp4", "fp4_block16"),
        ("auto", {"k_dtype": "fp8"}, "bfloat16", "bfloat16"),  # a layer left unquantized
    ],
)
def test_formats_of_a_layer(cache_dtype: str, options: Any, k: str, v: str) -> None:
    found = LayerFormat.of(cache_dtype, torch.bfloat16, Options(kv_recipe="plain", **options))
    assert (found.k, found.v) == (k, v)


def test_formats_refuse_what_the_cache_dtype_cannot_carry() -> None:
    with pytest.raises(ValueError, match=r"\.k_dtype: needs --kv-cache-dtype nvfp4, got fp8"):
        LayerFormat.of("fp8", torch.bfloat16, Options(k_dtype="mxfp4"))
    with pytest.raises(ValueError, match="nvfp4_4over6, got 'turboquant'"):
        LayerFormat.of("turboquant", torch.bfloat16, Options())


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (80, 48)])
@pytest.mark.parametrize(("k", "v"), [("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("bfloat16", "fp8")])
def test_cell_bytes_are_a_page_s_share(k: str, v: str, sizes: tuple[int, int]) -> None:
    found = LayerFormat.of("nvfp4", torch.bfloat16, Options(k_dtype=k, v_dtype=v))
    layout = found.layout(*sizes, 5, 16)
    assert layout.page_bytes == 16 * 5 * found.cell_bytes(*sizes)


BLOCK, HEADS, SIZE, PAGES = 16, 3, 32, 7
LAYOUT = PageLayout("nvfp4", "nvfp4", SIZE, SIZE, HEADS, BLOCK, "HND")
CELL = LAYOUT.page_bytes // (BLOCK * HEADS)


def counted(*shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 251).to(torch.uint8).view(shape)


CACHES = {
    "0.24": counted(PAGES, 2, HEADS, BLOCK, CELL // 2),
    "0.32": counted(PAGES, HEADS, BLOCK, CELL),
    # Several layers in one block, and a page padded to a hybrid model's size.
    "0.32 block-major": counted(PAGES, 4, HEADS, BLOCK, CELL)[:, 2],
    "0.24 padded": counted(PAGES, 2 * HEADS * BLOCK * CELL // 2 + 48)[:, :-48].unflatten(
        1, (2, HEADS, BLOCK, CELL // 2)
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_pages_are_the_same_memory(name: str) -> None:
    cache = CACHES[name]
    assert block_size_of(cache) == BLOCK
    pages = pages_of(cache, LAYOUT)
    assert pages.shape == (PAGES, LAYOUT.page_bytes)
    for page in range(PAGES):
        assert torch.equal(pages[page], cache[page].flatten())
    assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    LAYOUT.check_pages(pages)


def test_pages_of_floats() -> None:
    layout = PageLayout("bfloat16", "bfloat16", SIZE, SIZE, HEADS, BLOCK, "HND")
    cache = torch.randn(PAGES, HEADS, BLOCK, 2 * SIZE).bfloat16()
    assert torch.equal(pages_of(cache, layout), cache.view(torch.uint8).flatten(1))


def test_pages_must_be_one_run_of_the_right_size() -> None:
    with pytest.raises(ValueError, match="has 864 bytes, expected 1728"):
        pages_of(CACHES["0.32"][:, :, :8], LAYOUT)
    token_major = counted(PAGES, BLOCK, HEADS, CELL).transpose(1, 2)
    assert pages_of(token_major, LAYOUT).shape  # one run, whatever vLLM calls its dimensions
    with pytest.raises(ValueError, match="one run of bytes"):
        pages_of(counted(PAGES, HEADS, 2 * BLOCK, CELL)[:, :, ::2], LAYOUT)


def test_page_bytes_are_what_a_spec_counts() -> None:
    spec = FullAttentionSpec(BLOCK, HEADS, SIZE, kv_cache_dtype="nvfp4")
    assert spec.real_page_size_bytes == LAYOUT.page_bytes


def test_recipe_decides_the_format() -> None:
    options = Options(kv_recipe="balanced")
    both = LayerFormat.of("nvfp4", torch.bfloat16, options)
    assert (both.k, both.v) == ("nvfp4_4over6", "nvfp4_4over6")
    assert LayerFormat.of("fp8", torch.bfloat16, options).k == "fp8_e4m3"
    accurate = Options(kv_recipe="accurate")
    assert LayerFormat.of("nvfp4", torch.bfloat16, accurate) == both
    assert accurate.recipe.feedback
    assert accurate.recipe.recent_tokens == 0
    expected = "kv_recipe: expected one of plain, balanced, accurate, got 'best'"
    with pytest.raises(ValueError, match=expected):
        Options(kv_recipe="best")
