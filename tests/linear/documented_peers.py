"""Peers' FP4 matmuls in plain PyTorch, following their documentation and sources.

They decode exactly the bytes that they get, by independent index formulas, and multiply in
float64: a wrong order, padding or scale gives a wrong product, or the library's error.
Versions: PyTorch 2.13, FlashInfer 0.7.0, vLLM 0.20.2 and 0.33.0, fbgemm-gpu-genai 1.9.0 (and the
older arguments). W4A16 peers are in `documented_weight_only`.
"""

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from halfbyte.numerics import nvfp4

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
_VALUES = torch.cat([_E2M1, -_E2M1])
_HALF = (torch.bfloat16, torch.float16)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def positions(rows: int, columns: int, tile_rows: int) -> torch.Tensor:
    """Byte of each block scale: tiles of 128 x 4 (cuBLAS) or 8 x 4 (`get_sf_out_offset_8x4`)."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    tile = (r // tile_rows) * (round_up(columns, 4) // 4) + c // 4
    if tile_rows == 128:
        return tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
    return tile * 32 + (r % 8) * 4 + c % 4


def _linear(scales: torch.Tensor, rows: int, columns: int, tile_rows: int = 128) -> torch.Tensor:
    raw = scales.view(torch.uint8).contiguous().flatten()
    assert raw.numel() == round_up(rows, tile_rows) * round_up(columns, 4)
    return raw[positions(rows, columns, tile_rows)].view(torch.float8_e4m3fn)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2).long()
    return _VALUES[nibbles] * scales.double().repeat_interleave(16, dim=-1)


def _product(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    alpha: torch.Tensor,
    tile_rows: int = 128,
) -> torch.Tensor:
    """float64 `[M, N]` of packed `[M, K/2]` and `[N, K/2]`, scales swizzled."""
    assert a.dtype == b.dtype == torch.uint8
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert a.shape[1] == b.shape[1]
    assert alpha.dtype == torch.float32
    assert alpha.numel() == 1
    blocks = a.shape[1] // 8
    left = decoded(a, _linear(a_scales, a.shape[0], blocks, tile_rows))
    right = decoded(b, _linear(b_scales, b.shape[0], blocks))
    return left @ right.t() * alpha.double()


def _quantized(
    x: torch.Tensor, encode: torch.Tensor, tile_rows: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and swizzled scales of the libraries' quantizers."""
    assert x.dtype in _HALF
    assert x.stride() == (x.shape[1], 1)
    assert x.data_ptr() % 16 == 0
    assert encode.dtype == torch.float32
    assert encode.numel() == 1
    codes, scales = nvfp4.quantize(x, 1 / encode)
    rows, columns = scales.shape
    swizzled = torch.zeros(round_up(rows, tile_rows), round_up(columns, 4), dtype=torch.uint8)
    where = positions(rows, columns, tile_rows).flatten()
    swizzled.view(-1)[where] = scales.view(torch.uint8).flatten()
    return codes, swizzled


def fake_module(patch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A module and the packages that it is in."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            patch.setitem(sys.modules, package, ModuleType(package))
    module = ModuleType(name)
    vars(module).update(functions)
    patch.setitem(sys.modules, name, module)


def install_torch(patch: pytest.MonkeyPatch) -> None:
    """`torch.nn.functional.scaled_mm` for NVFP4 with two scales a side (`_scaled_nvfp4_nvfp4`)."""
    signature = inspect.signature(F.scaled_mm)
    recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]

    def scaled_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = SimpleNamespace(**signature.bind(*args, **kwargs).arguments)
        assert given.mat_a.dtype == given.mat_b.dtype == torch.float4_e2m1fn_x2
        assert given.scale_recipe_a == given.scale_recipe_b == recipe
        assert given.swizzle_a == given.swizzle_b == swizzle
        (a_scales, a_global), (b_scales, b_global) = given.scale_a, given.scale_b
        for scales in (a_scales, b_scales):
            assert scales.dtype == torch.float8_e4m3fn
            assert scales.is_contiguous()
        assert given.mat_b.shape[1] % 16 == 0
        assert given.mat_a.shape[1] % 16 == 0, "rows of 16 bytes, as cuBLAS wants"
        a, b = given.mat_a.view(torch.uint8), given.mat_b.t().view(torch.uint8)
        exact = _product(a, a_scales, b, b_scales, a_global * b_global)
        if given.bias is not None:
            assert given.output_dtype != torch.float32
            assert given.bias.dtype == given.output_dtype
            assert given.bias.numel() == given.mat_b.shape[1]
            exact = exact + given.bias.double()
        return exact.to(given.output_dtype)

    patch.setattr(F, "scaled_mm", scaled_mm)


def _without_interleave(matrix: torch.Tensor) -> torch.Tensor:
    """Rows back from FlashInfer's `srcToDstBlk32RowMap`, copied out number by number."""
    table = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27]
    table += [4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31]
    rows = [32 * (row // 32) + table[row % 32] for row in range(matrix.shape[0])]
    return matrix.view(torch.uint8)[rows].contiguous().view(matrix.dtype)


def install_flashinfer(patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`fp4_quantize` and `mm_fp4`; returns the options of every call of the latter."""
    calls: list[dict[str, Any]] = []

    def fp4_quantize(
        input: torch.Tensor,  # noqa: A002
        global_scale: torch.Tensor | None = None,
        sf_vec_size: int = 16,
        sf_use_ue8m0: bool = False,
        is_sf_swizzled_layout: bool = True,
        is_sf_8x4_layout: bool = False,
        is_global_scale_inversed: bool = False,
        enable_pdl: bool | None = None,
        backend: str = "cuda",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert global_scale is not None
        assert (sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout) == (16, False, True)
        return _quantized(input, global_scale, 8 if is_sf_8x4_layout else 128)

    def mm_fp4(
        a: torch.Tensor,
        b: torch.Tensor,
        a_descale: torch.Tensor,
        b_descale: torch.Tensor,
        alpha: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        out: torch.Tensor | None = None,
        block_size: int = 16,
        use_8x4_sf_layout: bool = False,
        backend: str = "auto",
        use_nvfp4: bool = True,
        enable_pdl: bool = True,
    ) -> torch.Tensor:
        assert out is None
        assert alpha is not None
        assert (block_size, use_nvfp4) == (16, True)
        assert backend in ("cutlass", "cudnn", "trtllm")
        assert out_dtype in _HALF if backend != "trtllm" else out_dtype == torch.bfloat16
        assert backend == "trtllm" or not use_8x4_sf_layout
        calls.append({"backend": backend, "rows": a.shape[0], "is_8x4": use_8x4_sf_layout})
        weight, scales = b.t(), b_descale.t()
        multiple = 128 if backend == "trtllm" else 32
        assert weight.shape[0] % multiple == 0
        assert weight.shape[1] * 2 % 32 == 0
        blocks = weight.shape[1] // 8
        assert a_descale.shape == (
            round_up(a.shape[0], 8 if use_8x4_sf_layout else 128),
            round_up(blocks, 4),
        )
        if backend == "trtllm":
            linear = _without_interleave(_linear(scales, weight.shape[0], blocks))
            weight = _without_interleave(weight)
            scales = torch.zeros_like(scales)
            where = positions(weight.shape[0], blocks, 128).flatten()
            scales.view(-1)[where] = linear.view(torch.uint8).flatten()
        tile_rows = 8 if use_8x4_sf_layout else 128
        return _product(a, a_descale, weight, scales, alpha, tile_rows).to(out_dtype)

    fake_module(patch, "flashinfer", fp4_quantize=fp4_quantize, mm_fp4=mm_fp4)
    return calls


def install_vllm_cutlass(patch: pytest.MonkeyPatch) -> None:
    """`vllm._custom_ops` of FP4."""

    def scaled_fp4_quant(
        input: torch.Tensor,  # noqa: A002
        input_global_scale: torch.Tensor,
        is_sf_swizzled_layout: bool = True,
        backend: str = "none",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert is_sf_swizzled_layout
        codes, scales = _quantized(input, input_global_scale)
        return codes, scales.view(torch.float8_e4m3fn)

    def cutlass_scaled_fp4_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        block_scale_a: torch.Tensor,
        block_scale_b: torch.Tensor,
        alpha: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        assert out_dtype in _HALF
        assert b.shape[0] % 32 == 0
        assert b.shape[1] * 2 % 32 == 0
        for scales, side in ((block_scale_a, a), (block_scale_b, b)):
            assert scales.dtype == torch.float8_e4m3fn
            assert scales.shape == (round_up(side.shape[0], 128), round_up(side.shape[1] // 8, 4))
        return _product(a, block_scale_a, b, block_scale_b, alpha).to(out_dtype)

    fake_module(
        patch,
        "vllm._custom_ops",
        scaled_fp4_quant=scaled_fp4_quant,
        cutlass_scaled_fp4_mm=cutlass_scaled_fp4_mm,
    )


_F4F4BF16 = "fbgemm::f4f4bf16(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, "
FBGEMM_SCHEMAS = {
    "1.9": _F4F4BF16 + "Tensor? output=None, Tensor? global_scale=None) -> Tensor",
    "1.3": _F4F4BF16 + "Tensor? global_scale=None, bool use_mx=True) -> Tensor",
}


class _F4F4BF16Operator:
    """`torch.ops.fbgemm.f4f4bf16` of a release."""

    def __init__(self, schema: str) -> None:
        self.default = SimpleNamespace(_schema=torch._C.parse_schema(schema))

    def __call__(self, *operands: torch.Tensor, **named: Any) -> torch.Tensor:
        arguments = self.default._schema.arguments
        known = {argument.name for argument in arguments}
        assert named.keys() <= known
        # Without these, the operands would be read as MXFP4.
        assert named["global_scale"] is not None
        assert named.get("use_mx", "use_mx" in known) is False
        a, b, a_scales, b_scales = operands
        assert b.shape[0] % 16 == 0
        assert b.shape[1] % 16 == 0
        for scales in (a_scales, b_scales):
            assert scales.dtype == torch.uint8
            assert scales.dim() == 1
        return _product(a, a_scales, b, b_scales, named["global_scale"]).to(torch.bfloat16)


def install_fbgemm(patch: pytest.MonkeyPatch, release: str) -> None:
    """The quantizer and `torch.ops.fbgemm.f4f4bf16` of a release in `FBGEMM_SCHEMAS`."""

    def triton_scale_nvfp4_quant(
        input: torch.Tensor,  # noqa: A002
        input_global_scale: torch.Tensor,
        group_size: int = 16,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert input.shape[1] // 16 % 4 == 0, "its offsets are those of padded rows"
        codes, scales = _quantized(input, input_global_scale)
        return codes, scales.flatten()

    operator = _F4F4BF16Operator(FBGEMM_SCHEMAS[release])
    patch.setattr(torch.ops, "fbgemm", SimpleNamespace(f4f4bf16=operator), raising=False)
    fake_module(
        patch,
        "fbgemm_gpu.experimental.gemm.triton_gemm.fp4_quantize",
        triton_scale_nvfp4_quant=triton_scale_nvfp4_quant,
    )
    fake_module(patch, "fbgemm_gpu.experimental.gen_ai")
