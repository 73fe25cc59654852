"""Other projects' KV cache schemes, implemented from their papers and documentation.

Each takes K or V of a layer, float32 `[kv_heads, tokens, D]` after RoPE, and returns the
dequantized values, so that all can be compared on the same tensors without their kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from halfbyte.numerics import block_fp4, fp8, nvfp4
from halfbyte.numerics.hadamard import hadamard

Rounding = Callable[[torch.Tensor, "Calibration"], torch.Tensor]


@dataclass(frozen=True)
class Calibration:
    """Statistics of K or V of a layer over a text.

    Args:
        amax: largest magnitude, of rotated values if the scheme rotates.
        mean: float32 `[kv_heads, 1, D]`.
    """

    amax: float
    mean: torch.Tensor


@dataclass(frozen=True)
class Scheme:
    """A KV cache scheme.

    Args:
        name: for tables.
        bits: per value of K and V, including block scales.
        k, v: quantize and dequantize.
        source: reference.
        residual: number of nearest tokens that are not quantized.
        rotates_k: whether amax of K is of rotated values.
    """

    name: str
    bits: float
    k: Rounding
    v: Rounding
    source: str
    residual: int = 0
    rotates_k: bool = False


def to_fp8(x: torch.Tensor, calibration: Calibration) -> torch.Tensor:
    """E4M3 with a scale per layer."""
    scale = fp8.scale_from_amax(calibration.amax)
    return fp8.dequantize(fp8.quantize(x, scale), scale)


def to_nvfp4(x: torch.Tensor, calibration: Calibration) -> torch.Tensor:
    """NVFP4 with a global scale per layer."""
    scale = nvfp4.global_scale_from_amax(calibration.amax)
    return nvfp4.dequantize(*nvfp4.quantize(x, scale), scale)


def to_rotated_nvfp4(x: torch.Tensor, calibration: Calibration) -> torch.Tensor:
    """NVFP4 of the Hadamard transform, rotated back here (attention kernels rotate Q instead)."""
    return hadamard(to_nvfp4(hadamard(x), calibration))


def to_affine_nvfp4(x: torch.Tensor, calibration: Calibration) -> torch.Tensor:
    """NVFP4 of the difference from a constant per head and channel."""
    return to_nvfp4(x - calibration.mean, calibration) + calibration.mean


def to_block16(x: torch.Tensor, _: Calibration) -> torch.Tensor:
    """E2M1 in blocks of 16 with powers of two."""
    return block_fp4.dequantize_fp4_block16(*block_fp4.quantize_fp4_block16(x))


def to_mxfp4(x: torch.Tensor, _: Calibration) -> torch.Tensor:
    """MXFP4: E2M1 in blocks of 32 with powers of two."""
    return block_fp4.dequantize_mxfp4(*block_fp4.quantize_mxfp4(x))


def to_int4(block: int) -> Rounding:
    """Asymmetric INT4: 15 steps between a block's ends, which are float16."""

    def rounding(x: torch.Tensor, _: Calibration) -> torch.Tensor:
        blocks = x.unflatten(-1, (-1, block))
        low = blocks.amin(-1, keepdim=True)
        step = ((blocks.amax(-1, keepdim=True) - low) / 15).half().float().clamp(min=1e-7)
        low = low.half().float()
        return (((blocks - low) / step).round().clamp(0, 15) * step + low).flatten(-2)

    return rounding


def to_int4_by_channel(block: int) -> Rounding:
    """Asymmetric INT4 along tokens: `block` tokens of a channel share their ends."""

    def rounding(x: torch.Tensor, calibration: Calibration) -> torch.Tensor:
        tokens = x.shape[-2]
        turned = F.pad(x.transpose(-1, -2), (0, -tokens % block), mode="replicate").contiguous()
        return to_int4(block)(turned, calibration)[..., :tokens].transpose(-1, -2)

    return rounding


def to_q4_0(x: torch.Tensor, _: Calibration) -> torch.Tensor:
    """16 steps with a float16 scale; the value with the largest magnitude is step -8."""
    blocks = x.unflatten(-1, (-1, 32))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).half().float()
    steps = (blocks / torch.where(scale == 0, 1.0, scale) + 8.5).floor().clamp(0, 15) - 8
    return (steps * scale).flatten(-2)


def to_nf4(x: torch.Tensor, _: Calibration) -> torch.Tensor:
    """Quantiles of a normal distribution, in blocks of 64 with a float16 scale."""
    blocks = x.unflatten(-1, (-1, 64))
    scale = blocks.abs().amax(-1, keepdim=True).half().float().clamp(min=1e-7)
    return (_nearest(blocks / scale, normal_float_levels()) * scale).flatten(-2)


def to_rotated_codebook(x: torch.Tensor, _: Calibration) -> torch.Tensor:
    """After TurboQuant: a vector's norm in float16, its direction randomly rotated, and each
    coordinate rounded to one of the 16 optimal levels for a normal distribution."""
    size = x.shape[-1]
    rotation = _rotation(size)
    turned = x @ rotation
    length = turned.norm(dim=-1, keepdim=True).half().float()
    unit = turned / length.clamp(min=1e-9) * size**0.5
    return (_nearest(unit, _lloyd_max_levels()) * length / size**0.5) @ rotation.T


def _nearest(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]


@cache
def normal_float_levels() -> torch.Tensor:
    """NF4's 16 levels (QLoRA, appendix E): quantiles of N(0, 1), eight below 0 and nine above with
    0 in both, over the largest; the outermost quantile stands halfway between 1 - 1/32 and
    1 - 1/30."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    levels = torch.cat([below, torch.zeros(1), above]).sort().values
    return levels / levels.abs().max()


@cache
def _lloyd_max_levels() -> torch.Tensor:
    """16 levels with min mean squared error for N(0, 1)."""
    points = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(200_000) + 0.5) / 200_000)
    levels = points[6250::12500].clone()
    for _ in range(300):
        nearest = torch.bucketize(points, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros(16).index_add_(0, nearest, points)
        levels = sums / torch.bincount(nearest, minlength=16)
    return levels


@cache
def _rotation(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]


_KIVI = "KIVI, arXiv 2402.02750: K by channel, V by token, the last tokens unquantized"
_MODELOPT = "TensorRT Model Optimizer, mtq"
SCHEMES = (
    Scheme("fp8", 8, to_fp8, to_fp8, "vLLM, SGLang, TensorRT-LLM: --kv-cache-dtype fp8"),
    Scheme("nvfp4", 4.5, to_nvfp4, to_nvfp4, f"{_MODELOPT}.NVFP4_KV_CFG; vLLM"),
    Scheme(
        *("nvfp4, K rotated", 4.5, to_rotated_nvfp4, to_nvfp4),
        source=f"{_MODELOPT}.NVFP4_KV_ROTATE_CFG",
        rotates_k=True,
    ),
    Scheme(
        *("nvfp4, affine", 4.5, to_affine_nvfp4, to_affine_nvfp4),
        source=f"{_MODELOPT}.NVFP4_AFFINE_KV_CFG",
    ),
    Scheme("block 16, powers of two", 4.5, to_block16, to_block16, "SGLang's block-16 FP4"),
    Scheme("mxfp4", 4.25, to_mxfp4, to_mxfp4, "OCP Microscaling Formats 1.0"),
    Scheme("int4, groups of 32", 5, to_int4(32), to_int4(32), "asymmetric, float16 ends"),
    Scheme("int4, groups of 64", 4.5, to_int4(64), to_int4(64), "the same"),
    Scheme("KIVI, groups of 32", 5, to_int4_by_channel(32), to_int4(32), _KIVI),
    Scheme(
        "KIVI, last 128 tokens kept", 5, to_int4_by_channel(32), to_int4(32), _KIVI, residual=128
    ),
    Scheme("q4_0", 4.5, to_q4_0, to_q4_0, "llama.cpp: --cache-type-k q4_0"),
    Scheme("nf4, blocks of 64", 4.25, to_nf4, to_nf4, "QLoRA, arXiv 2305.14314"),
    Scheme(
        *("rotated codebook", 4.25, to_rotated_codebook, to_rotated_codebook),
        source="after TurboQuant, arXiv 2504.19874, without its residual sketch",
    ),
)
