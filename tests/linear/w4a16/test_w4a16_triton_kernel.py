"""The Triton product with NVFP4 weights: interpreted on a CPU, compiled for GPUs, run on one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfbyte.linear import NvFp4Linear
from halfbyte.numerics import e2m1, e4m3
from linear.cases import assert_close_enough, random_input, random_layer
from slow import slow

pytest.importorskip("triton")

from halfbyte.kernels.formats import decode as decode_formats
from halfbyte.linear.w4a16.triton_kernel import (
    Tiles,
    choose_tiles,
    kernel_constants,
    linear_kernel,
)
from kernels.formats.test_formats_decode import (
    IN_ORDER,
    WORDS,
    assert_same,
    halves,
    pairs_of,
    run_ptx,
)
from triton_compiler import SHARED_BYTES, compile_kernel
from triton_interpreter import interpreted

Launcher = Callable[..., torch.Tensor]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHORT_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# m, n, k and parts: single values, whole tiles, ends of tiles in every dimension.
SHAPES = [
    (1, 1, 16, None),
    (3, 33, 48, (1, 31, 1)),
    (16, 32, 256, (16, 16)),
    (33, 96, 272, None),
    (150, 130, 144, (50, 80)),
]


def interpret() -> Launcher:
    """The launcher in the interpreter."""
    launcher: Launcher = interpreted("halfbyte.linear.w4a16.triton_kernel").linear_triton
    return launcher


def compiled() -> Launcher:
    """The launcher on a GPU."""
    from halfbyte.linear.w4a16.triton_kernel import linear_triton

    return linear_triton


def arguments(layer: NvFp4Linear) -> tuple[torch.Tensor | None, ...]:
    """Arguments of the launcher after x."""
    sizes = torch.tensor(layer.part_sizes, device=layer.weight.device)
    row_scale = layer.weight_global_scale.repeat_interleave(sizes)
    return layer.weight, layer.weight_scale, row_scale, layer.bias


def assert_every_code_and_scale(launch: Launcher, dtype: torch.dtype, device: str) -> None:
    """The identity times every E2M1 code and every finite E4M3 scale, each exact."""
    weight = torch.arange(16, dtype=torch.uint8).view(8, 2) @ torch.tensor([1, 16]).byte()
    scales = torch.arange(127, dtype=torch.uint8)[:, None]
    exact = e2m1.decode_packed(weight) * e4m3.decode(scales)
    out = launch(
        torch.eye(16, dtype=dtype, device=device),
        weight.repeat(127, 1).to(device),
        scales.to(device),
        torch.ones(127, device=device),
    )
    assert torch.equal(out.cpu().float(), exact.t())


def assert_errors(launch: Launcher, dtype: torch.dtype, device: str, **options: Any) -> None:
    for m, n, k, parts in SHAPES:
        for bias in (False, True):
            layer = random_layer(n, k, bias=bias, part_sizes=parts, dtype=dtype).to(device)
            x = random_input(m, k, dtype).to(device)
            assert_close_enough(layer, x, launch(x, *arguments(layer), **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_and_scale(dtype: torch.dtype) -> None:
    assert_every_code_and_scale(interpret(), dtype, "cpu")


def test_bfloat16_ptx_takes_e4m3_scales() -> None:
    """The PTX of block formats with E8M0 scales is exact for NVFP4's as well."""
    for byte in range(127):
        scale = float(e4m3.decode(torch.tensor(byte, dtype=torch.uint8)))
        first, second = pairs_of(torch.full((1024,), scale * 2.0**-8).bfloat16())
        registers = run_ptx(decode_formats.E8M0_FP4_PTX.value, in4=WORDS, in5=first, in6=second)
        for names, codes in (("01", IN_ORDER & 0xF), ("23", IN_ORDER >> 4)):
            values = halves(registers, names, torch.bfloat16)
            assert_same(values * 2.0**14, e2m1.decode(codes).double() * scale)


@pytest.mark.parametrize("batch_invariant", [slow(False), True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_that_of_a_matmul_in_the_same_dtype(
    dtype: torch.dtype, batch_invariant: bool
) -> None:
    assert_errors(interpret(), dtype, "cpu", batch_invariant=batch_invariant)


def test_grid_of_many_tiles() -> None:
    """More tiles of M than are grouped to share weights: the last group is smaller."""
    layer, x = random_layer(50, 32), random_input(200, 32)
    out = interpret()(x, *arguments(layer), tiles=Tiles(16, 16, 16, 4, 2))
    assert_close_enough(layer, x, out, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_other_rows(rows_alike: None, dtype: torch.dtype) -> None:
    layer = random_layer(70, 272, bias=True, dtype=dtype)
    x = random_input(150, 272, dtype)
    whole = interpret()(x, *arguments(layer), batch_invariant=True)
    for first, m in ((0, 1), (3, 1), (149, 1), (5, 17), (31, 64), (64, 65)):
        part = interpret()(x[first : first + m], *arguments(layer), batch_invariant=True)
        assert torch.equal(part, whole[first : first + m])


@pytest.mark.parametrize("k", [48, 64])
def test_nothing_beside_the_tensors_is_read_or_written(k: int) -> None:
    layer, x = random_layer(20, k), random_input(3, k)
    expected = interpret()(x, *arguments(layer))
    weight, scales, row_scale, _ = arguments(layer)
    assert weight is not None
    assert scales is not None
    assert row_scale is not None

    def among_poison(tensor: torch.Tensor, poison: float) -> torch.Tensor:
        wide = torch.full((tensor.shape[0] + 80, *tensor.shape[1:]), poison, dtype=tensor.dtype)
        wide[40:-40] = tensor
        return wide[40:-40]

    out = interpret()(
        among_poison(x, torch.nan),
        among_poison(weight, 0xFF),
        among_poison(scales.view(torch.uint8), 0x7F),
        among_poison(row_scale, torch.nan),
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows(dtype: torch.dtype) -> None:
    layer = random_layer(20, 32)
    out = interpret()(torch.empty(0, 32, dtype=dtype), *arguments(layer))
    assert out.shape == (0, 20)
    assert out.dtype == dtype


def test_refuses_what_does_not_fit() -> None:
    weight, scales, row_scale, _ = arguments(random_layer(20, 64))
    for x in (torch.zeros(3, 32), torch.zeros(3, 64).double()):
        with pytest.raises(ValueError, match=r"weight \(20, 32\).*do not belong together"):
            interpret()(x, weight, scales, row_scale)
    with pytest.raises(ValueError, match=r"row_scale \(1,\) do not"):
        interpret()(torch.zeros(3, 64), weight, scales, torch.ones(1))


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_tiles(capability: int) -> None:
    rows = (1, 16, 17, 64, 65, 4096)
    for dtype in DTYPES:
        assert len({choose_tiles(m, dtype, capability, True) for m in rows}) == 1
    chosen = [choose_tiles(m, torch.bfloat16, capability, False) for m in rows]
    assert [tiles.m for tiles in chosen] == sorted(tiles.m for tiles in chosen)
    assert all(tiles.m >= m for tiles, m in zip(chosen[:4], rows, strict=False))


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize(
    ("m", "k", "dtype"),
    [
        (1, 4096, torch.bfloat16),
        (64, 2880, torch.float16),
        (4096, 4096, torch.bfloat16),
        (4096, 4096, torch.float32),
    ],
    ids=str,
)
def test_kernel_compiles(m: int, k: int, dtype: torch.dtype, capability: int) -> None:
    tiles = choose_tiles(m, dtype, capability, batch_invariant=False)
    float_pointer = f"*{SHORT_NAMES[dtype]}"
    usage = compile_kernel(
        linear_kernel,
        {
            **dict.fromkeys(("x", "bias", "out"), float_pointer),
            **dict.fromkeys(("weight", "weight_scale"), "*u8"),
            "row_scale": "*fp32",
        },
        kernel_constants(dtype, k, True, tiles),
        capability,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    assert usage.shared <= SHARED_BYTES[capability]
    assert usage.stack <= 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_and_scale_on_a_gpu(dtype: torch.dtype) -> None:
    assert_every_code_and_scale(compiled(), dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_on_a_gpu(dtype: torch.dtype, batch_invariant: bool) -> None:
    assert_errors(compiled(), dtype, "cuda", batch_invariant=batch_invariant)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_of_large_products_on_a_gpu(dtype: torch.dtype) -> None:
    layer = random_layer(1100, 2880, bias=True, part_sizes=(700, 400), dtype=dtype).cuda()
    for m in (1, 20, 60, 700):
        x = random_input(m, 2880, dtype).cuda()
        assert_close_enough(layer, x, compiled()(x, *arguments(layer)), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_other_rows_on_a_gpu(dtype: torch.dtype) -> None:
    layer = random_layer(520, 2048, bias=True, dtype=dtype).cuda()
    x = random_input(4096, 2048, dtype).cuda()
    whole = compiled()(x, *arguments(layer), batch_invariant=True)
    for first, m in ((0, 1), (3, 1), (4095, 1), (5, 17), (31, 64), (64, 65), (1000, 3000)):
        part = compiled()(x[first : first + m], *arguments(layer), batch_invariant=True)
        assert torch.equal(part, whole[first : first + m])
