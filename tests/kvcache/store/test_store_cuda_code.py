"""`store.cu` compiles for every GPU, without register spills."""

import re
from pathlib import Path

import pytest
import torch

from halfbyte.kvcache.store.cuda.variant import StoreVariant
from halfbyte.layouts import PageLayout
from machine_code import compiled, disassembled
from slow import CAPABILITIES, slow

pytest.importorskip("cuda.bindings.nvrtc")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("by", [1, 2, 3])
@pytest.mark.parametrize(
    ("head_size", "weighted"), [(128, True), slow(128, False), slow(64, True), slow(256, True)]
)
def test_kernels_compile(
    capability: int, by: int, head_size: int, weighted: bool, tmp_path: Path
) -> None:
    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    layout = PageLayout("nvfp4_4over6", "nvfp4_4over6", head_size, None, 2, 16)
    dtype = torch.bfloat16
    variant = StoreVariant(dtype, dtype, dtype, True, 64, weighted, weighted, by, True, True)
    cubin = compiled("kvcache/store/cuda/store.cu", variant.macros(layout), architecture)
    assert not re.search(r" (?:STL|LDL)[. ]", disassembled(cubin, tmp_path))
    assert variant.shared_bytes(layout) <= 99 * 1024


@pytest.mark.parametrize("capability", [90, slow(100)])
def test_tiles_that_lack_their_first_blocks(capability: int, tmp_path: Path) -> None:
    """Four CTAs of four tiles fit an SM of 228 KiB, of which each CTA takes one more."""
    layout = PageLayout("nvfp4_4over6", "nvfp4_4over6", 128, None, 2, 16)
    dtype = torch.bfloat16
    variant = StoreVariant(dtype, dtype, dtype, True, 64, True, True, 3, True, True)
    variant = variant._replace(left_out=True)
    macros = variant.macros(layout)
    assert macros["CTAS_PER_SM"] == 4
    assert 4 * (variant.shared_bytes(layout) + 1024) <= 228 * 1024
    cubin = compiled("kvcache/store/cuda/store.cu", macros, f"sm_{capability}a")
    assert not re.search(r" (?:STL|LDL)[. ]", disassembled(cubin, tmp_path))
