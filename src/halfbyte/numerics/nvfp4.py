"""NVFP4: E2M1 values in blocks of 16, one E4M3 scale per block, one float32 scale per tensor.

    x  ~  e2m1 * block_scale * global_scale

`global_scale` is always the *decode* scale: by default `amax / (6 * 448)` for the recipe
`amax6` and `amax / (6 * 256)` for `four_over_six`. ModelOpt files store it in this direction,
compressed-tensors files the reciprocal; loaders convert, nothing here does.

Per block, all in float32 and in this order (NVIDIA ModelOpt's `NVFP4QTensor`, with the exceptions
named below):

    s     = E4M3(min(amax16 / (6 * g), 448))        round to nearest even
    s     = max(s, 2^-9) if amax16 > 0              a scale of 0 would lose the block
    y     = x / (s * g)                             product rounded first, then a true division
    code  = E2M1(clamp(y, -6, 6))                   round to nearest, ties to the even code

Exceptions, by design: a block of zeros has scale 0 and codes 0; a block that holds a NaN has
scale 0x7F (NaN) and codes 0, so it reads back as NaN and never as a plausible number; ±Inf
saturates. `e2m1 * e4m3` has at most 6 significant bits, so it is exact in float32, bfloat16 and
float16; the only rounding of a dequantized value is the multiplication by the global scale.

Recipes over the same bits:
- `amax6`: the block maximum maps to 6.
- `four_over_six`: per block, the maximum maps to 6 or to 4, whichever reconstructs with the smaller
  squared error (ties to 6). 4 leaves the sparse upper codes unused and often fits better (Cook et
  al., "Four Over Six", 2025). Its scale is up to 1.5 times larger, hence the headroom of 256. Each
  error is `((q * s) * g - x)^2` in float32, summed as the pairwise tree `pairwise_sum`, so that
  every kernel that follows the same order takes the same decision. Values so small that their
  squared errors underflow count as ties.
"""

from typing import Literal

import torch

from halfbyte.numerics import e2m1, e4m3
from halfbyte.numerics.blocks import block_amax, check_packed, split_blocks

BLOCK_SIZE = 16

Recipe = Literal["amax6", "four_over_six"]
RECIPES: tuple[Recipe, ...] = ("amax6", "four_over_six")
# Largest block scale that a tensor's amax maps to, per recipe.
_SCALE_AT_AMAX: dict[str, float] = {"amax6": 448.0, "four_over_six": 256.0}


def global_scale_from_amax(amax: float | torch.Tensor, recipe: Recipe = "amax6") -> torch.Tensor:
    """Decode scale for a tensor whose largest magnitude is `amax`.

    Args:
        amax: non-negative float or tensor of any shape.
        recipe: `amax6` gives `amax / 2688`, `four_over_six` gives `amax / 1536`.

    Returns:
        float32 tensor of the shape of `amax`; 1 where `amax` is 0 (an all-zero tensor), NaN where
        it is NaN.

    Raises:
        ValueError: unknown recipe, or an `amax` given as a float that is negative or not finite.
    """
    _check_recipe(recipe)
    if not isinstance(amax, torch.Tensor):
        if not 0 <= amax < float("inf"):
            raise ValueError(f"amax: expected a finite number >= 0, got {amax}")
        amax = torch.tensor(amax, dtype=torch.float64, device="cpu")
    # In float64, so that an amax of `scale * 2688` (exact there) gives back the very float32 scale.
    scale = (amax.double() / (e2m1.E2M1_MAX * _SCALE_AT_AMAX[recipe])).float()
    # An amax so small that the division underflows is treated as zero, too.
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize(
    x: torch.Tensor, global_scale: float | torch.Tensor, recipe: Recipe = "amax6"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to NVFP4.

    Args:
        x: float tensor `[..., D]`, D % 16 == 0, on any device.
        global_scale: decode scale; a float, a one-element tensor, or a float32 tensor that
            broadcasts against `[..., 1]` (one scale per row, expert or part).
        recipe: `amax6` or `four_over_six`.

    Returns:
        `(data, scales)`: uint8 `[..., D/2]` with the even element in the low nibble, and
        float8_e4m3fn `[..., D/16]`.

    Raises:
        ValueError: D not a multiple of 16, unknown recipe, or a float `global_scale` that is not a
            positive finite number.
        TypeError: `x` is not floating point.
    """
    _check_recipe(recipe)
    blocks = split_blocks(x, BLOCK_SIZE)
    g = global_scale_tensor(global_scale, x)
    amax = block_amax(blocks)
    codes, scales = _quantize_blocks(blocks, amax, g, 6.0)
    if recipe == "four_over_six":
        codes4, scales4 = _quantize_blocks(blocks, amax, g, 4.0)
        take4 = _squared_error(blocks, codes4, scales4, g) < _squared_error(
            blocks, codes, scales, g
        )
        codes = torch.where(take4[..., None], codes4, codes)
        scales = torch.where(take4, scales4, scales)
    return e2m1.pack(codes.flatten(-2)), scales.view(torch.float8_e4m3fn)


def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    global_scale: float | torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values `(e2m1 * block_scale) * global_scale`, the product in parentheses being exact.

    Args:
        data: uint8 `[..., D/2]`.
        scales: float8_e4m3fn or uint8 `[..., D/16]`, in linear order.
        global_scale: as for `quantize`.
        dtype: of the result. The last multiplication runs in float32 (float64 for float64).

    Returns:
        `[..., D]` of `dtype`.

    Raises:
        ValueError: `data` and `scales` do not belong together.
    """
    check_packed(data, scales, BLOCK_SIZE)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    values = e2m1.decode_packed(data).to(compute).unflatten(-1, (scales.shape[-1], BLOCK_SIZE))
    values = values * e4m3.decode(scales, compute)[..., None]
    g = global_scale_tensor(global_scale, data).to(compute)
    return (values * g).flatten(-2).to(dtype)


def dequantize_as_stored(
    data: torch.Tensor,
    scales: torch.Tensor,
    stored: torch.Tensor,
    is_decode: bool,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values `e2m1 * (block_scale * stored)`, or `e2m1 * (block_scale / stored)`.

    This is how ModelOpt (`NVFP4QTensor.dequantize`) and compressed-tensors
    (`NVFP4PackedCompressor`) dequantize their files, each with the global scale in its own
    direction. They round twice, `dequantize` once: next to a tie between two bfloat16 values the
    results may differ.

    Args:
        data, scales: as for `dequantize`.
        stored: float32, one element, or one that broadcasts against `[..., S]`, S = D/16.
        is_decode: whether `stored` is a decode scale (multiply), else an encode scale (divide).
        dtype: of the result; products are rounded to float32 before.

    Returns:
        `[..., D]` of `dtype`.

    Raises:
        ValueError: `data` and `scales` do not belong together.
    """
    check_packed(data, scales, BLOCK_SIZE)
    s = e4m3.decode(scales, torch.float32)
    factors = s * stored if is_decode else s / stored
    values = e2m1.decode_packed(data).unflatten(-1, (scales.shape[-1], BLOCK_SIZE))
    return (values * factors[..., None]).flatten(-2).to(dtype)


def pairwise_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension (a power of two), neighbours first: (x0 + x1) + (x2 + x3) ..."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _check_recipe(recipe: str) -> None:
    if recipe not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {recipe!r}")


def global_scale_tensor(scale: float | torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A global scale as blocks of x are divided by it: float32, a scalar or `[..., 1, 1]`.

    Raises:
        ValueError: a float that is not positive and finite, or a shape that does not broadcast.
    """
    if isinstance(scale, torch.Tensor):
        return _scale_tensor(scale, x)
    rounded = torch.tensor(scale, dtype=torch.float32, device="cpu")
    if not 0 < float(rounded) < float("inf"):
        raise ValueError(f"global_scale: expected a positive finite float32, got {scale}")
    return rounded.to(x.device)


def _scale_tensor(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A scalar, or `[..., 1, 1]` for a scale that broadcasts against `[..., 1]`."""
    scale = scale.to(device=like.device, dtype=torch.float32)
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.shape[-1] != 1:
        raise ValueError(
            "global_scale: expected one element, or a last dimension of 1 to broadcast against "
            f"blocks, got {tuple(scale.shape)}"
        )
    return scale[..., None]


def _quantize_blocks(
    blocks: torch.Tensor, amax: torch.Tensor, g: torch.Tensor, target: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[..., S, 16]` and E4M3 bytes `[..., S]` with the block maximum mapped to `target`."""
    g_block = g if g.dim() == 0 else g[..., 0]
    # Infinity saturates even where 6 * g overflows, and inf / inf would be NaN.
    ratio = torch.where(amax == torch.inf, amax, amax / (target * g_block))
    s = e4m3.decode(e4m3.encode(ratio))
    s = torch.where(amax > 0, s.clamp(min=e4m3.E4M3_MIN_SUBNORMAL), s)
    # NaN blocks keep s = NaN; zero blocks have s = 0, and 0 / 0 must not reach the encoder.
    y = blocks / (s * g_block)[..., None]
    # 0 / 0, where s * g underflows, must stay 0. The sign is that of x, not of y: a quotient that
    # underflows must not lose it.
    codes = e2m1.encode(y.abs().nan_to_num(nan=0.0)) | e2m1.sign_bits(blocks)
    codes = torch.where((amax > 0)[..., None], codes, 0)
    return codes, e4m3.encode(torch.where(amax == 0, 0.0, s))


def _squared_error(
    blocks: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, g: torch.Tensor
) -> torch.Tensor:
    error = (e2m1.decode(codes) * e4m3.decode(scales)[..., None]) * g - blocks
    return pairwise_sum(error * error)


def readers_agree(stored: torch.Tensor, decode: torch.Tensor, *, is_decode: bool) -> torch.Tensor:
    """Whether all products of codes and block scales give the same bfloat16 in both orders.

    halfbyte multiplies a code by its block scale, then by `decode`. ModelOpt and compressed-tensors
    multiply the block scale by the global scale first. Only mantissas matter to rounding: 1 or 1.5
    times 1, 1.125, … 1.875.

    Args:
        stored: float32 `[...]`, global scales of a weight as a checkpoint has them.
        decode: float32 `[...]`, the decode scales that halfbyte uses instead.
        is_decode: whether `stored` are decode scales (multiply), else encode scales (divide).

    Returns:
        bool `[...]`.
    """
    q = torch.tensor([1.0, 1.5], dtype=torch.float32, device=stored.device)[:, None]
    s = 1 + torch.arange(8, dtype=torch.float32, device=stored.device) / 8
    stored, decode = stored[..., None, None], decode[..., None, None]
    theirs = q * (s * stored if is_decode else s / stored)
    return (((q * s) * decode).bfloat16() == theirs.bfloat16()).flatten(-2).all(-1)
