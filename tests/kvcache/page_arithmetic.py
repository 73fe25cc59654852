"""Byte addresses of a page by the specification, in plain arithmetic on flat bytes.

Independent of `PageLayout`; the values of bytes are those of `halfbyte.numerics`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from halfbyte.kvcache import get_kv_cache_quant_method
from halfbyte.layouts import PageLayout
from halfbyte.layouts.page_layout import Order
from halfbyte.layouts.scale_layouts import VScaleLayout
from halfbyte.numerics import block_fp4, fp8, nvfp4

Encoded = tuple[torch.Tensor, torch.Tensor | None]


class Format(NamedTuple):
    """What the specification says of a quantized format."""

    bits: int
    """Per value."""
    block_size: int | None
    """Values that share a block scale."""
    has_global_scale: bool
    encode: Callable[[torch.Tensor, float], Encoded] | None = None
    """Data and block scales of (x, global scale). None: as the format's method does, for formulas
    that are nowhere else."""
    decode: Callable[..., torch.Tensor] | None = None
    """The values of (data, block scales, global scale, dtype)."""
    has_kernels: bool = True
    """Whether the kernels for CPUs and those in Triton know it; the reference always does."""
    scale_itemsize: int = 1
    """Bytes of a block scale."""


def _fp8(name: fp8.Fp8Format) -> Format:
    return Format(
        8,
        None,
        True,
        lambda x, scale: (fp8.quantize(x, scale, name), None),
        lambda data, scales, scale, out: fp8.dequantize(data, scale, name, out),
    )


def _nvfp4(recipe: nvfp4.Recipe) -> Format:
    def encode(x: torch.Tensor, scale: float) -> Encoded:
        data, scales = nvfp4.quantize(x, scale, recipe)
        return data, scales.view(torch.uint8)

    return Format(4, 16, True, encode, nvfp4.dequantize)


def _block_fp4(
    block_size: int,
    quantize: Callable[[torch.Tensor], Encoded],
    dequantize: Callable[..., torch.Tensor],
) -> Format:
    return Format(
        4,
        block_size,
        False,
        lambda x, scale: quantize(x),
        lambda data, scales, scale, out: dequantize(data, scales, out),
    )


UNQUANTIZED = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
QUANTIZED = {
    "fp8_e4m3": _fp8("e4m3"),
    "fp8_e5m2": _fp8("e5m2"),
    "nvfp4": _nvfp4("amax6"),
    "nvfp4_4over6": _nvfp4("four_over_six"),
    "fp4_block16": _block_fp4(16, block_fp4.quantize_fp4_block16, block_fp4.dequantize_fp4_block16),
    "mxfp4": _block_fp4(32, block_fp4.quantize_mxfp4, block_fp4.dequantize_mxfp4),
}
"""All formats, in the order of `KVCacheDType`; most tests of formats take theirs from here."""
DTYPES = (*UNQUANTIZED, *QUANTIZED)
KERNEL_DTYPES = (*UNQUANTIZED, *(name for name, row in QUANTIZED.items() if row.has_kernels))
WITH_GLOBAL_SCALE = tuple(name for name, row in QUANTIZED.items() if row.has_global_scale)
KERNEL_DTYPES_WITH_GLOBAL_SCALE = tuple(name for name in KERNEL_DTYPES if name in WITH_GLOBAL_SCALE)
BLOCK_SIZES = {name: row.block_size for name, row in QUANTIZED.items() if row.block_size}
ALIASES = {"fp8": "fp8_e4m3", "fp4_e2m1": "nvfp4"}


def data_width(dtype: str, head_size: int) -> int:
    """Bytes of one head of one token without block scales."""
    if dtype in UNQUANTIZED:
        return head_size * {"float32": 4, "float16": 2, "bfloat16": 2}[dtype]
    return head_size * QUANTIZED[dtype].bits // 8


def scale_width(dtype: str, head_size: int) -> int:
    """Bytes of the block scales of one head of one token."""
    if dtype not in BLOCK_SIZES:
        return 0
    return head_size // BLOCK_SIZES[dtype] * QUANTIZED[dtype].scale_itemsize


def head_bytes(dtype: str, head_size: int) -> int:
    return data_width(dtype, head_size) + scale_width(dtype, head_size)


def encode(dtype: str, x: torch.Tensor, scale: float) -> Encoded:
    """Data and block scales of `x [..., D]`, both as uint8."""
    if dtype in UNQUANTIZED:
        if dtype == "float16" and x.dtype != torch.float16:
            x = x.float().clamp(-65504, 65504)
        return x.to(UNQUANTIZED[dtype]).contiguous().view(torch.uint8), None
    return (QUANTIZED[dtype].encode or get_kv_cache_quant_method(dtype).quantize)(x, scale)


def decode(
    dtype: str, encoded: Encoded, scale: float, out: torch.dtype = torch.float32
) -> torch.Tensor:
    data, scales = encoded
    if dtype in UNQUANTIZED:
        return data.view(UNQUANTIZED[dtype]).to(out)
    values = QUANTIZED[dtype].decode or get_kv_cache_quant_method(dtype).dequantize
    return values(data, scales, scale, out)


@dataclass(frozen=True)
class Geometry:
    """The arguments of a `PageLayout`, and the addresses that follow from them."""

    k_dtype: str
    v_dtype: str
    head_size: int
    head_size_v: int
    num_kv_heads: int
    block_size: int
    order: Order = "HND"
    v_scale_layout: VScaleLayout = "linear"

    def __str__(self) -> str:
        name = f"{self.k_dtype}-{self.v_dtype}-{self.head_size}x{self.head_size_v}-{self.order}"
        return name if self.v_scale_layout == "linear" else f"{name}-{self.v_scale_layout}"

    @property
    def layout(self) -> PageLayout:
        return PageLayout(
            self.k_dtype,
            self.v_dtype,
            self.head_size,
            self.head_size_v,
            self.num_kv_heads,
            self.block_size,
            self.order,
            self.v_scale_layout,
        )

    @property
    def page_bytes(self) -> int:
        per_head = head_bytes(self.k_dtype, self.head_size)
        per_head += head_bytes(self.v_dtype, self.head_size_v)
        return self.block_size * self.num_kv_heads * per_head

    def address(self, region: str, token: int, head: int) -> int:
        """Byte of the page at which a token's head starts in a region."""
        widths = {
            "k_data": data_width(self.k_dtype, self.head_size),
            "k_scale": scale_width(self.k_dtype, self.head_size),
            "v_data": data_width(self.v_dtype, self.head_size_v),
            "v_scale": scale_width(self.v_dtype, self.head_size_v),
        }
        start = 0
        for name, width in widths.items():
            if name == region:
                break
            start += self.block_size * self.num_kv_heads * width
        if self.order == "HND":
            return start + (head * self.block_size + token) * widths[region]
        return start + (token * self.num_kv_heads + head) * widths[region]

    def scale_addresses(self, side: str, token: int, head: int) -> list[int]:
        """Bytes of the page at which a token's block scales lie, in order of blocks."""
        dtype, head_size = (
            (self.k_dtype, self.head_size) if side == "k" else (self.v_dtype, self.head_size_v)
        )
        num_blocks = scale_width(dtype, head_size)
        if side == "k" or self.v_scale_layout == "linear":
            start = self.address(f"{side}_scale", token, head)
            return [start + s for s in range(num_blocks)]
        quarter = num_blocks // 4
        return [
            self.address("v_scale", 4 * (token // 4) + s // quarter, head)
            + 4 * (s % quarter)
            + token % 4
            for s in range(num_blocks)
        ]

    def put(
        self, flat: torch.Tensor, page_start: int, token: int, side: str, encoded: Encoded
    ) -> None:
        """Write one token's encoded heads (`[heads, width]`) into flat bytes."""
        data, scales = encoded
        for head in range(self.num_kv_heads):
            start = page_start + self.address(f"{side}_data", token, head)
            flat[start : start + data.shape[1]] = data[head]
            if scales is not None:
                addresses = torch.tensor(self.scale_addresses(side, token, head))
                flat[page_start + addresses] = scales[head]


def sentinel(*shape: int) -> torch.Tensor:
    """Random bytes, so that a byte moved or cleared by mistake shows."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)
