"""Unpacking tokens into workspaces: interpreted on a CPU, compiled for GPUs, run on one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.cases import Case, make_case
from attention.prefill.dense_cases import inputs_of
from halfbyte.attention.prefill.key_ranges import KeyRanges
from halfbyte.kvcache import read_tokens
from halfbyte.layouts import PageLayout
from kvcache.page_arithmetic import KERNEL_DTYPES

pytest.importorskip("triton")

from slow import CAPABILITIES
from triton_compiler import SHARED_BYTES, compile_kernel
from triton_interpreter import interpreted

RANGES = {"begins": (0, 3, 10, 16), "ends": (1, 40, 77, 16)}
SHAPES: dict[str, dict[str, Any]] = {
    "nhd": {"order": "NHD", "head_size": 128},
    "sm100": {"v_scale_layout": "sm100", "head_size_v": 128},
    "fp8-k": {"k_dtype": "fp8", "v_dtype": "nvfp4"},
    "e5m2-nhd-page-8": {"k_dtype": "fp8_e5m2", "order": "NHD", "block_size": 8},
    "mxfp4-page-1": {"k_dtype": "mxfp4", "block_size": 1},
    "d80-v16": {"k_dtype": "fp4_block16", "head_size": 80, "head_size_v": 16},
    "d96": {"k_dtype": "float16", "head_size": 96},
    "d256": {"k_dtype": "nvfp4", "v_dtype": "bfloat16", "head_size": 256, "kv_heads": 1},
}


def unpack(
    unpack_into: Callable[..., None],
    case: Case,
    dtype: torch.dtype,
    device: str,
    max_keys: int = 67,
    ranges: Mapping[str, tuple[int, ...]] = RANGES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `RANGES`, with one unused row between sequences; K in HND order."""
    layout = case.layout
    counts = [max(0, e - b) for b, e in zip(ranges["begins"], ranges["ends"], strict=True)]
    rows = [sum(counts[:i]) + i for i in range(len(counts))]
    total = sum(counts) + len(counts)
    k_out = torch.full((layout.num_kv_heads, total, layout.head_size), 7.0, dtype=dtype).to(device)
    v_out = torch.full((total, layout.num_kv_heads, layout.head_size_v), 7.0, dtype=dtype).to(
        device
    )
    numbers = torch.tensor([*ranges.values(), rows], dtype=torch.int32).to(device)
    unpack_into(
        k_out.transpose(0, 1),
        v_out,
        replace(inputs_of(case, device), v_scale=torch.tensor(case.v_scale).to(device)),
        KeyRanges(slice(None), total, max_keys, *numbers),
    )
    return k_out.transpose(0, 1).cpu(), v_out.cpu()


def expected(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    layout = case.layout
    keys, values = [], []
    for slots, begin, end in zip(case.slots, *RANGES.values(), strict=True):
        key, value = read_tokens(
            case.pages, slots[begin:end], layout, case.k_scale, case.v_scale, dtype
        )
        keys += [key, torch.full((1, layout.num_kv_heads, layout.head_size), 7.0, dtype=dtype)]
        values += [
            value,
            torch.full((1, layout.num_kv_heads, layout.head_size_v), 7.0, dtype=dtype),
        ]
    return torch.cat(keys), torch.cat(values)


def assert_bits(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def interpret(case: Case, dtype: torch.dtype, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return unpack(
        interpreted("halfbyte.attention.prefill.unpack").unpack_into,
        case,
        dtype,
        "cpu",
        **changes,
    )


@pytest.mark.parametrize("dtype", [d for d in KERNEL_DTYPES if "float" not in d])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_unpack_every_byte_of_every_format(dtype: str) -> None:
    case = make_case(k_dtype=dtype)
    case.pages = torch.randint(0, 256, case.pages.shape, dtype=torch.uint8)
    assert_bits(interpret(case, torch.float32), expected(case, torch.float32))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_unpack_rounds_once(dtype: str) -> None:
    case = make_case(k_dtype=dtype)
    assert_bits(interpret(case, torch.float16), expected(case, torch.float16))


@pytest.mark.parametrize("name", SHAPES)
def test_unpack_shapes(name: str) -> None:
    case = make_case(**SHAPES[name])
    assert_bits(interpret(case, torch.float32), expected(case, torch.float32))


def expected_of_recipe(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = [], []
    for slots, begin, end in zip(case.slots, *RANGES.values(), strict=True):
        k, v = read_tokens(
            case.pages,
            slots[begin:end],
            case.layout,
            case.k_scale,
            case.v_scale,
            transform=case.options["transform"],
            positions=torch.arange(begin, end),
        )
        keys += [k, torch.full((1, *k.shape[1:]), 7.0)]
        values += [v, torch.full((1, *v.shape[1:]), 7.0)]
    return torch.cat(keys), torch.cat(values)


RECIPES: dict[str, dict[str, Any]] = {
    "all": {},
    "segments-of-64": {"segment": 64},
    "not-rotated": {"rotate": False},
    "not-centred": {"center": False},
}


@pytest.mark.parametrize("options", RECIPES)
@pytest.mark.parametrize("sizes", [(64, 64), (96, 32), (80, 128), (256, 16)], ids=str)
def test_unpack_k_that_a_recipe_changed(options: str, sizes: tuple[int, int]) -> None:
    """The transform is undone, and marked first tokens are the constants."""
    case = make_case(head_size=sizes[0], head_size_v=sizes[1], transform=RECIPES[options])
    key, value = interpret(case, torch.float32)
    keys, values = expected_of_recipe(case)
    torch.testing.assert_close(key, keys, rtol=1e-5, atol=1e-5)
    assert torch.equal(value, values)


def test_unpack_bounded() -> None:
    """Programs unpack 64 tokens each: with the bound, the end of the longest range is skipped."""
    case = make_case()
    k_out, v_out = interpret(case, torch.float32, max_keys=64)
    k_want, v_want = expected(case, torch.float32)
    k_want[42 + 64 - 2 : -2], v_want[42 + 64 - 2 : -2] = 7.0, 7.0
    assert_bits((k_out, v_out), (k_want, v_want))


def test_unpack_nothing() -> None:
    ranges = {"begins": (5,) * 4, "ends": (5, 4, 5, 0)}
    for max_keys in (0, 64):
        k_out, v_out = interpret(make_case(), torch.float32, ranges=ranges, max_keys=max_keys)
        assert (k_out == 7).all()
        assert (v_out == 7).all()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "head_size", "segment"),
    [
        ("nvfp4", 128, 0),
        ("fp8", 64, 0),
        ("mxfp4", 96, 0),
        ("nvfp4", 64, 64),
        ("nvfp4", 128, 64),
        ("nvfp4", 256, 64),
    ],
)
def test_unpack_kernel_compiles(dtype: str, head_size: int, segment: int, capability: int) -> None:
    from halfbyte.attention.prefill.unpack import choose_tile
    from halfbyte.attention.prefill.unpack_kernel import unpack_kernel
    from halfbyte.kernels.formats.kv_tiles import side_geometry

    layout = PageLayout(dtype, dtype, head_size, None, 8, 16)
    tile = choose_tile(head_size, segment > 0)
    usage = compile_kernel(
        unpack_kernel,
        {
            **dict.fromkeys(("tables", "begins", "ends", "first_rows"), "*i32"),
            **dict.fromkeys(("k_global", "v_global"), "*fp32"),
            **dict.fromkeys(("cos", "sin", "mean", "partner_mean"), "*fp32"),
            **dict.fromkeys(("k_out", "v_out", "first_keys", "first_values"), "*bf16"),
            "matrix": "*fp16",
            **dict.fromkeys(("k_factor", "v_factor"), "fp32"),
            "pages": "*u8",
        },
        {
            "k": side_geometry(layout, "k"),
            "v": side_geometry(layout, "v"),
            "kv_heads": 8,
            "k_global_on_device": True,
            "ring": 0,
            "v_global_on_device": True,
            "rotated": segment > 0,
            "segment": segment,
            "knows_first": segment > 0,
            "mark": 255,
            "num_tokens": tile.num_tokens,
            "ptx": True,
        },
        capability,
        num_warps=tile.num_warps,
    )
    # Half of a rotated head of 256 has a matrix of 32 KiB.
    programs = 2 if segment and head_size == 256 else 8
    assert usage.shared <= SHARED_BYTES[capability] // programs
    assert usage.stack <= 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*KERNEL_DTYPES, *SHAPES])
def test_unpack_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    from halfbyte.attention.prefill.unpack import unpack_into

    case = make_case(**SHAPES.get(name, {"k_dtype": name, "head_size": 128}))
    assert_bits(unpack(unpack_into, case, dtype, "cuda"), expected(case, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("options", RECIPES)
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_unpack_k_that_a_recipe_changed_on_a_gpu(options: str, head_size: int) -> None:
    from halfbyte.attention.prefill.unpack import unpack_into

    case = make_case(head_size=head_size, transform=RECIPES[options])
    key, value = unpack(unpack_into, case, torch.float32, "cuda")
    keys, values = expected_of_recipe(case)
    torch.testing.assert_close(key, keys, rtol=1e-5, atol=1e-5)
    assert torch.equal(value, values)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [d for d in KERNEL_DTYPES if "float" not in d])
def test_unpack_every_byte_on_a_gpu(dtype: str) -> None:
    from halfbyte.attention.prefill.unpack import unpack_into

    case = make_case(k_dtype=dtype, head_size=128)
    case.pages = torch.randint(0, 256, case.pages.shape, dtype=torch.uint8)
    got = unpack(unpack_into, case, torch.float32, "cuda")
    assert_bits(got, expected(case, torch.float32))
