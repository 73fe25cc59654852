"""The table of formats, and the tables of kernels and files that derive from it.

Derived tables are compared with literal values: these are what compiled kernels and files of others
know, so a change of the table must not change them.
"""

import re
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte.attention import flashinfer_views
from halfbyte.attention.decode import variant
from halfbyte.attention.paged.plan import operand_dtype
from halfbyte.attention.prefill import unpack
from halfbyte.checkpoints.dialects.base import KV_CACHE_ALGOS
from halfbyte.kernels import formats as triton_formats
from halfbyte.kernels.cpu import library
from halfbyte.kernels.formats.kv_tiles import operand_shift, side_geometry
from halfbyte.kvcache import KV_CACHE_QUANT_REGISTRY
from halfbyte.kvcache.store.cuda import store
from halfbyte.kvcache.store.cuda.variant import V_KINDS
from halfbyte.kvcache.store.triton_rows import side_of
from halfbyte.layouts import KVCacheDType, PageLayout, kv_declarations
from halfbyte.layouts.formats import KV_FORMATS, KVFormat
from halfbyte.quantization import write_layers
from kvcache.page_arithmetic import DTYPES, KERNEL_DTYPES, QUANTIZED

SOURCES = Path(halfbyte.__file__).parent
CUDA_KINDS = {
    "float16": 16,
    "bfloat16": 17,
    "fp8_e4m3": 8,
    "fp8_e5m2": 9,
    "nvfp4": 4,
    "nvfp4_4over6": 4,
}
SHIFTS = {"fp8_e4m3": 8, "nvfp4": 7, "nvfp4_4over6": 7, "fp4_block16": 6, "mxfp4": 6}
FACTORS = {"nvfp4": 2.0**7, "fp8_e4m3": 2.0**8}
EXACT_IN_FLOAT16 = ("nvfp4", "nvfp4_4over6", "fp8_e4m3", "fp8_e5m2", "float16")
FLASHINFER = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "nvfp4": torch.uint8,
    "nvfp4_4over6": torch.uint8,
}


def layout_of(name: str) -> PageLayout:
    return PageLayout(name, name, 64, None, 1, 16)


def test_every_member_has_a_row_and_every_row_a_member() -> None:
    assert tuple(KV_FORMATS) == DTYPES
    assert [member.value for member in KVCacheDType] == ["auto", *KV_FORMATS]


@pytest.mark.parametrize("name", DTYPES)
def test_rows_agree_with_the_specification(name: str) -> None:
    row = KV_FORMATS[name]
    assert row.is_quantized == (name in QUANTIZED)
    if name in QUANTIZED:
        stated = QUANTIZED[name]
        assert (row.bits, row.block_size) == (stated.bits, stated.block_size)
        assert row.has_global_scale == stated.has_global_scale
    if row.element is not None:
        assert row.bits == 8 * row.element.itemsize


@pytest.mark.parametrize("name", KERNEL_DTYPES)
def test_max_value_is_the_largest_finite_element(name: str) -> None:
    row = KV_FORMATS[name]
    assert row.max_value == (torch.finfo(row.element).max if row.element else 6)


def test_block_size_without_a_dtype_of_scales_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected both or neither, got 16 and None"):
        KVFormat(bits=4, max_value=6, block_size=16)
    with pytest.raises(ValueError, match="expected both or neither, got None and"):
        KVFormat(bits=4, max_value=6, scale_dtype=torch.float16)


def test_auto_has_no_row() -> None:
    with pytest.raises(ValueError, match="'auto' must be resolved"):
        _ = KVCacheDType.AUTO.kv_format


def test_where_takes_the_rows_in_order() -> None:
    four_bits = KVCacheDType.where(lambda row: row.bits == 4)
    assert four_bits == ("nvfp4", "nvfp4_4over6", "fp4_block16", "mxfp4")
    assert all(isinstance(member, KVCacheDType) for member in four_bits)


def test_ids_of_the_cpu_kernels_are_those_of_the_enum() -> None:
    assert {name.value: number for name, number in library.FORMATS.items()} == {
        "float32": 0,
        "float16": 1,
        "bfloat16": 2,
        "fp8_e4m3": 3,
        "fp8_e5m2": 4,
        "nvfp4": 5,
        "nvfp4_4over6": 6,
        "fp4_block16": 7,
        "mxfp4": 8,
    }
    assert {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2} == library.FLOATS
    source = (SOURCES / "kernels" / "cpu" / "formats.h").read_text()
    (body,) = re.findall(r"enum Format : int32_t \{(.*?)\};", source, re.DOTALL)
    assert len(re.findall(r"^ *k\w+,", body, re.MULTILINE)) == len(library.FORMATS) + 1  # kFormats


def test_ids_of_cuda_kernels() -> None:
    assert {name.value: kind for name, kind in variant._KINDS.items()} == CUDA_KINDS
    assert {name.value: kind for name, kind in V_KINDS.items()} == {
        "fp8_e4m3": 8,
        "fp8_e5m2": 9,
        "nvfp4": 4,
        "nvfp4_4over6": 6,
    }
    assert store._K_FORMATS == ("nvfp4", "nvfp4_4over6")


def test_formats_share_an_id_only_where_they_share_a_decoder() -> None:
    cpu = [row.cpu_id for row in KV_FORMATS.values() if row.cpu_id is not None]
    assert len(set(cpu)) == len(cpu)
    decoders: dict[int, set[str | None]] = {}
    for row in KV_FORMATS.values():
        if row.cuda_id is not None:
            decoders.setdefault(row.cuda_id, set()).add(row.triton_kind)
    assert [kinds for kinds in decoders.values() if len(kinds) > 1] == []


def test_formats_of_triton_kernels() -> None:
    assert frozenset(KERNEL_DTYPES) == triton_formats.FORMATS
    for name in KERNEL_DTYPES:
        side = side_geometry(layout_of(name), "k")
        kind = side.kind
        assert side.block == {None: 0, 16: 8, 32: 16}[KV_FORMATS[name].block_size]
        assert kind == ("nvfp4" if name == "nvfp4_4over6" else name)
        for casts in (False, True):
            expected = 0 if casts and name == "fp8_e4m3" else SHIFTS.get(name, 0)
            assert operand_shift(kind, casts) == expected
        assert unpack._omitted_factor(kind) == FACTORS.get(kind, 1.0)


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3", 448), ("fp8_e5m2", 57344)])
def test_range_that_the_triton_store_clamps_to(name: str, largest: float) -> None:
    assert side_of(layout_of(name), "v", True)[0].max_value == largest


@pytest.mark.parametrize("name", DTYPES)
def test_operands_and_views_by_format(name: str) -> None:
    operand = torch.float16 if name in EXACT_IN_FLOAT16 else torch.bfloat16
    expected = torch.float32 if name == "float32" else operand
    assert operand_dtype(KVCacheDType(name), torch.bfloat16) == expected
    assert flashinfer_views.flashinfer_dtype(layout_of(name)) == FLASHINFER.get(name)


def test_names_of_recipes_and_of_modelopt() -> None:
    assert write_layers._KERNEL_FORMATS == {"amax6": "nvfp4", "four_over_six": "nvfp4_4over6"}
    assert list(KV_CACHE_ALGOS.items()) == [("nvfp4", "NVFP4"), ("fp8_e4m3", "FP8")]
    assert list(kv_declarations._ALGOS.items()) == [
        ("FP8", ("fp8_e4m3", "fp8_e4m3")),
        ("NVFP4", ("nvfp4", "nvfp4")),
        ("FP8_K_NVFP4_V", ("fp8_e4m3", "nvfp4")),
    ]


def test_registry_is_in_the_order_of_the_table() -> None:
    assert tuple(KV_CACHE_QUANT_REGISTRY) == DTYPES
    assert {name: KV_CACHE_QUANT_REGISTRY[name].__name__ for name in KERNEL_DTYPES} == {
        "float32": "UnquantizedKVCacheMethod",
        "float16": "UnquantizedKVCacheMethod",
        "bfloat16": "UnquantizedKVCacheMethod",
        "fp8_e4m3": "Fp8KVCacheMethod",
        "fp8_e5m2": "Fp8KVCacheMethod",
        "nvfp4": "NVFP4KVCacheMethod",
        "nvfp4_4over6": "NVFP4KVCacheMethod",
        "fp4_block16": "FP4Block16KVCacheMethod",
        "mxfp4": "MXFP4KVCacheMethod",
    }
