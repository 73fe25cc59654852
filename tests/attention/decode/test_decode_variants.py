"""Variants of the CUDA decode kernel: which are chosen, and that they compile, without a GPU."""

import re
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

from halfbyte.layouts import PageLayout, page_stride
from machine_code import assert_copies_have_descriptors, compiled, disassembled
from slow import CAPABILITIES, slow

pytest.importorskip("cuda.bindings.nvrtc")

from halfbyte.attention.decode import cuda
from halfbyte.attention.decode.recipe import RecipeVariant
from halfbyte.attention.decode.variant import DecodeVariant, choose_variant, macros
from halfbyte.kernels.runtime import nvrtc, tensor_maps


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("head_size", [64, 128, slow(256)])
@pytest.mark.parametrize("group", [4, slow(16), 40])
def test_kernels_compile(capability: int, head_size: int, group: int) -> None:
    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 2, 16)
    variant = choose_variant(layout, group, 1.0, False, capability)
    assert variant is not None
    options = macros(layout, group, torch.bfloat16, group >= 16, variant)
    for name in (variant.source, "attention/decode/merge.cu", "attention/decode/plan.cu"):
        assert compiled(name, options, architecture)[:4] == b"\x7fELF"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("head_size", "group"), [(128, 4), slow(64, 8), slow(256, 2), slow(128, 40)]
)
def test_kernels_for_recipes_compile(capability: int, head_size: int, group: int) -> None:
    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 2, 16)
    softcap = group >= 16
    for recipe in (_recipe(head_size // 2), RecipeVariant(True, knows_first=True)):
        variant = choose_variant(layout, group, 1.0, False, capability, recipe)
        assert variant is not None
        options = macros(layout, group, torch.bfloat16, softcap, variant) | recipe.macros()
        assert compiled(variant.source, options, architecture)[:4] == b"\x7fELF"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("group", [1, 4, 5, 8, 16, 64])
def test_recipes_are_taken_where_plain_is(capability: int, group: int) -> None:
    """Also with as many pairs as channels, where RoPE turns a few of them only."""
    for k_dtype, v_dtype in (("nvfp4", "nvfp4"), ("nvfp4", "fp8"), ("bfloat16", "bfloat16")):
        for head_size, invariant in product((64, 128, 256), (False, True)):
            layout = PageLayout(k_dtype, v_dtype, head_size, None, 2, 16)
            arguments = (layout, group, 1.0, invariant, capability)
            plain = choose_variant(*arguments)
            changed = choose_variant(*arguments, _recipe(head_size))
            assert (plain is None) == (changed is None)


@pytest.mark.parametrize("head_size", [slow(64), 128, slow(256)])
@pytest.mark.parametrize("block_size", [16, slow(32), slow(64)])
def test_kernels_that_copy_whole_pages_compile(head_size: int, block_size: int) -> None:
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 1, block_size)
    for group in (32, 64):
        variant = choose_variant(layout, group, 1.0, False, 90)
        assert variant is not None
        assert variant.whole_pages
        options = macros(layout, group, torch.bfloat16, False, variant)
        assert compiled(variant.source, options, "sm_90a")[:4] == b"\x7fELF"


def _recipe(pairs: int) -> RecipeVariant:
    return RecipeVariant(True, 64, 64, pairs, knows_first=True, halves=True)


_SPILL = re.compile(r" (?:STL|LDL)[. ]")


def spills(
    variant: DecodeVariant,
    layout: PageLayout,
    group: int,
    folder: Path,
) -> int:
    """Number of spill instructions (local loads and stores)."""
    return len(_SPILL.findall(_code(variant, layout, group, folder, RecipeVariant())))


def _code(
    variant: DecodeVariant, layout: PageLayout, group: int, folder: Path, recipe: RecipeVariant
) -> str:
    options = macros(layout, group, torch.bfloat16, False, variant) | recipe.macros()
    return disassembled(compiled(variant.source, options, "sm_90a"), folder)


@pytest.mark.parametrize(
    ("head_size", "group"), [slow(64, 8), slow(128, 1), (128, 4), slow(128, 8), (128, 16)]
)
def test_recipes_spill_nothing_in_tiles(head_size: int, group: int, tmp_path: Path) -> None:
    """Inputs of a recipe may spill, once per work item, but not between the matmuls of tiles."""
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 8, 16)
    recipe = _recipe(head_size // 2)
    variant = choose_variant(layout, group, 1.0, False, 90, recipe)
    assert variant is not None
    code = _code(variant, layout, group, tmp_path, recipe)
    without = variant._replace(means=False, kept_pairs=0, keeps_angles=False)
    plain = _code(without, layout, group, tmp_path, RecipeVariant())
    assert not _SPILL.search(plain)
    assert len(_SPILL.findall(code)) <= 24
    of_tiles = plain.count("HMMA")  # a plain kernel has no other matmuls
    assert max(part.count("HMMA") for part in _SPILL.split(code)) >= of_tiles


@pytest.mark.parametrize(
    ("head_size", "block_size", "group"), [(128, 16, 32), slow(256, 16, 64), slow(256, 64, 64)]
)
def test_whole_pages_spill_no_more(
    head_size: int, block_size: int, group: int, tmp_path: Path
) -> None:
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 1, block_size)
    variant = choose_variant(layout, group, 1.0, False, 90)
    assert variant is not None
    assert variant.whole_pages
    usual = spills(variant._replace(whole_pages=False), layout, group, tmp_path)
    assert spills(variant, layout, group, tmp_path) <= usual


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("v_dtype", ["nvfp4", "nvfp4_4over6"])
def test_a_single_head_is_side_by_side_in_either_order(
    order: Literal["HND", "NHD"], v_dtype: str
) -> None:
    layout = PageLayout("nvfp4", v_dtype, 128, None, 1, 16, order)
    variant = choose_variant(layout, 32, 1.0, False, 90)
    assert variant is not None
    assert variant.whole_pages
    assert macros(layout, 32, torch.bfloat16, False, variant)["HND"] == 1


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("block_size", [16, 64])
def test_tensor_map_of_whole_pages(count: int, block_size: int) -> None:
    layout = PageLayout("nvfp4", "nvfp4", 128, None, 1, block_size)
    size = layout.page_bytes
    pages = torch.zeros(count, 2 * size, dtype=torch.uint8)[:, :size]
    encoded: list[Any] = []
    uncached = tensor_maps.tensor_map_of_pages.__wrapped__
    with (
        patch.object(tensor_maps, "_encode", lambda *a: encoded.append(a)),
        patch.object(cuda, "tensor_map_of_pages", uncached),
    ):
        cuda._pages_map(pages, page_stride(pages), layout)
    ((address, sizes, strides, box, dtype),) = encoded
    assert (address, sizes, dtype) == (pages.data_ptr(), (64, size // 64, count), torch.uint8)
    assert box == (64, size // 64, 1)
    assert box[1] <= 256
    assert strides[0] == 64
    assert strides[1] == (2 * size if count > 1 else size)


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout("nvfp4", "nvfp4", 128, None, 2, 16),
        PageLayout("nvfp4", "nvfp4", 128, 64, 1, 16),
        PageLayout("nvfp4", "nvfp4", 128, None, 1, 48),
        PageLayout("nvfp4", "nvfp4", 128, None, 1, 128),
    ],
    ids=["two-heads", "k-128-v-64", "page-48", "page-128"],
)
def test_pages_unlike_tiles_are_not_copied_whole(layout: PageLayout) -> None:
    variant = choose_variant(layout, 32, 1.0, False, 90)
    assert variant is not None
    assert variant.wgmma
    assert not variant.whole_pages


@pytest.mark.parametrize("group", [4, 16, 32])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("head_size", [128, 256])
def test_copies_have_descriptors(
    head_size: int, order: Literal["HND", "NHD"], group: int, tmp_path: Path
) -> None:
    layout = PageLayout("nvfp4", "nvfp4", head_size, 64, 2, 16, order)
    variant = choose_variant(layout, group, 1.0, False, 90)
    assert variant is not None
    options = macros(layout, group, torch.bfloat16, False, variant)
    code = disassembled(compiled(variant.source, options, "sm_90a"), tmp_path)
    assert_copies_have_descriptors(code)


def test_kernel_that_does_not_compile_says_why() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"(?s)/decode.cu for sm_90a: .*GROUP"):
        compiled("attention/decode/decode.cu", {}, "sm_90a")


@pytest.mark.parametrize(
    ("capability", "head_size", "group", "expected"),
    [
        (90, 128, 4, DecodeVariant(64, 1, True, False, 2, 2)),
        (90, 64, 8, DecodeVariant(64, 1, False, False, 2, 2)),
        (90, 128, 16, DecodeVariant(32, 2, False, False, 2, 2)),
        (90, 128, 32, DecodeVariant(128, 4, False, True, 2, 3, True)),
        (90, 64, 64, DecodeVariant(128, 8, False, True, 2, 2, True)),
        (90, 256, 32, DecodeVariant(128, 4, False, True, 2, 2, True)),
        (100, 128, 32, DecodeVariant(16, 4, False, True, 2, 2)),
        (90, 256, 4, DecodeVariant(32, 1, True, False, 2, 2)),
        (90, 256, 16, DecodeVariant(16, 2, False, True, 2, 2)),
        (80, 128, 4, DecodeVariant(64, 1, True, False, 2, 2)),
        (89, 128, 4, DecodeVariant(32, 1, True, False, 2, 2)),
        (120, 256, 16, DecodeVariant(16, 1, False, False, 2, 2)),
    ],
)
def test_variant_fills_a_multiprocessor(
    capability: int, head_size: int, group: int, expected: DecodeVariant
) -> None:
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 2, 16)
    variant = choose_variant(layout, group, 1.0, False, capability)
    assert variant == expected is not None
    shared = {90: 228, 100: 228, 80: 164}.get(capability, 100) * 1024
    assert variant.ctas * (variant.cta_bytes(layout) + 1024) <= shared


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "group", "expected"),
    [
        (90, "fp8", 128, 4, DecodeVariant(32, 1, False, False, 3, 2)),
        (90, "fp8", 128, 32, DecodeVariant(16, 4, False, True, 3, 2)),
        (100, "fp8", 64, 32, DecodeVariant(32, 4, False, False, 4, 2)),
        (90, "bfloat16", 128, 4, DecodeVariant(16, 1, False, False, 3, 2)),
        (80, "fp8", 64, 4, DecodeVariant(32, 1, False, False, 4, 2)),
    ],
)
def test_variants_of_other_formats(
    capability: int, dtype: str, head_size: int, group: int, expected: DecodeVariant
) -> None:
    layout = PageLayout(dtype, dtype, head_size, None, 2, 16)
    assert choose_variant(layout, group, 1.0, False, capability) == expected


def test_variant_of_invariant_calls_ignores_the_batch() -> None:
    layout = PageLayout("nvfp4", "nvfp4", 128, None, 2, 16)
    assert len({choose_variant(layout, 4, queries, True, 90) for queries in (1.0, 2.0, 8.0)}) == 1


@pytest.mark.parametrize("dtypes", [("fp8", "fp8"), ("bfloat16", "bfloat16"), ("fp8", "nvfp4")])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_of_other_formats_compile(dtypes: tuple[str, str], capability: int) -> None:
    layout = PageLayout(*dtypes, 128, None, 2, 16, "NHD")
    variant = choose_variant(layout, 4, 1.0, False, capability)
    assert variant is not None
    options = macros(layout, 4, torch.bfloat16, False, variant)
    architecture = "sm_80" if capability == 80 else f"sm_{capability}a"
    assert compiled("attention/decode/decode.cu", options, architecture)[:4] == b"\x7fELF"
