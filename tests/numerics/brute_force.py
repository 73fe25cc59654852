"""An independent implementation of the formats, written from the specification.

Plain loops over Python and numpy scalars: nothing here calls halfbyte, so that agreement with it
is evidence. Nearest values are found by exact comparison of rational numbers; float32 arithmetic,
where the specification asks for it, is that of `numpy.float32` scalars, one rounding each.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import torch

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX_FLOAT32 = float(np.finfo(np.float32).max)

Block = tuple[list[int], int]
"""(codes, scale byte)"""


def e2m1_value(code: int) -> float:
    magnitude = E2M1_MAGNITUDES[code & 7]
    return -magnitude if code & 8 else magnitude


def e2m1_magnitude_code(y: Fraction | float) -> int:
    """Nearest of the eight magnitudes to `|y|` (finite or infinite), ties to the even code."""
    if isinstance(y, float) and np.isinf(y):
        return 7
    distance = [abs(abs(Fraction(y)) - Fraction(m)) for m in E2M1_MAGNITUDES]
    nearest = [code for code in range(8) if distance[code] == min(distance)]
    return nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)


def e2m1_code(x: float) -> int:
    return e2m1_magnitude_code(x) | (8 if x < 0 else 0)


def minifloat_value(byte: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    """Value of a byte `s|exponent|mantissa`; not for codes of NaN and infinity."""
    sign = -1 if byte & 0x80 else 1
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = Fraction(byte & ((1 << mantissa_bits) - 1), 1 << mantissa_bits)
    if exponent == 0:
        return sign * mantissa * Fraction(2) ** (1 - bias)
    return sign * (1 + mantissa) * Fraction(2) ** (exponent - bias)


@cache
def e4m3_table() -> tuple[Fraction, ...]:
    """Magnitudes of bytes 0x00..0x7E; 0x7F is NaN."""
    return tuple(minifloat_value(byte, 4, 3, 7) for byte in range(0x7F))


@cache
def e5m2_table() -> tuple[Fraction, ...]:
    """Magnitudes of bytes 0x00..0x7B; 0x7C is infinity, 0x7D..0x7F are NaN."""
    return tuple(minifloat_value(byte, 5, 2, 15) for byte in range(0x7C))


def e4m3_value(byte: int) -> float:
    if byte & 0x7F == 0x7F:
        return float("nan")
    magnitude = float(e4m3_table()[byte & 0x7F])
    return -magnitude if byte & 0x80 else magnitude


def e5m2_value(byte: int) -> float:
    if byte & 0x7F > 0x7C:
        return float("nan")
    magnitude = float("inf") if byte & 0x7F == 0x7C else float(e5m2_table()[byte & 0x7F])
    return -magnitude if byte & 0x80 else magnitude


def e8m0_value(byte: int) -> float:
    return float("nan") if byte == 0xFF else 2.0 ** (byte - 127)


def minifloat_byte(x: float, table: Sequence[Fraction]) -> int:
    """Byte of the nearest magnitude of `table`, ties to the even byte, saturating; NaN is 0x7F."""
    if np.isnan(x):
        return 0x7F
    sign = 0x80 if np.signbit(x) else 0
    if abs(x) >= table[-1]:
        return sign | (len(table) - 1)
    magnitude = abs(Fraction(float(x)))
    low, high = 0, len(table) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if table[middle] <= magnitude else (low, middle)
    below, above = magnitude - table[low], table[high] - magnitude
    if below == above:
        return sign | (low if low % 2 == 0 else high)
    return sign | (low if below < above else high)


def e4m3_byte(x: float) -> int:
    return minifloat_byte(x, e4m3_table())


def e5m2_byte(x: float) -> int:
    return minifloat_byte(x, e5m2_table())


def floor_log2(x: float) -> int:
    """The largest k with 2^k <= x."""
    k = -160
    while Fraction(2) ** (k + 1) <= Fraction(x):
        k += 1
    return k


def ceil_log2(x: Fraction | float) -> int:
    """The smallest k with x <= 2^k."""
    k = 160
    while Fraction(x) <= Fraction(2) ** (k - 1):
        k -= 1
    return k


def _nvfp4_block(block: Sequence[np.float32], g: np.float32, target: float) -> Block:
    if any(np.isnan(v) for v in block):
        return [0] * 16, 0x7F
    amax = max(abs(v) for v in block)
    if amax == 0:
        return [0] * 16, 0
    with np.errstate(all="ignore"):
        quotient = amax / (np.float32(target) * g)
        byte = max(e4m3_byte(float(quotient)), 1)
        step = np.float32(e4m3_value(byte)) * g
        codes = [
            (e2m1_magnitude_code(float(v / step)) if v != 0 else 0) | (8 if v < 0 else 0)
            for v in block
        ]
    return codes, byte


def nvfp4_squared_error(block: Sequence[np.float32], g: np.float32, quantized: Block) -> np.float32:
    codes, byte = quantized
    scale = np.float32(e4m3_value(byte))
    with np.errstate(all="ignore"):
        errors = [
            (np.float32(e2m1_value(c)) * scale) * g - v for c, v in zip(codes, block, strict=True)
        ]
        terms = [error * error for error in errors]
        while len(terms) > 1:
            terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
    return terms[0]


def nvfp4_block(block: Sequence[np.float32], g: np.float32, recipe: str) -> Block:
    """Codes and scale byte of 16 float32 values."""
    by_six = _nvfp4_block(block, g, 6.0)
    if recipe == "amax6":
        return by_six
    by_four = _nvfp4_block(block, g, 4.0)
    better = nvfp4_squared_error(block, g, by_four) < nvfp4_squared_error(block, g, by_six)
    return by_four if better else by_six


def mxfp4_block(block: Sequence[np.float32]) -> Block:
    return _power_of_two_block(block, lambda amax: floor_log2(amax) - 2)


def fp4_block16_block(block: Sequence[np.float32]) -> Block:
    # 6 * 2^125 is the largest code and scale whose product float32 can hold.
    return _power_of_two_block(block, lambda amax: min(125, ceil_log2(Fraction(amax) / 6)))


def _power_of_two_block(block: Sequence[np.float32], exponent_of: Callable[[float], int]) -> Block:
    if any(np.isnan(v) for v in block):
        return [0] * len(block), 0xFF
    amax = min(max(abs(float(v)) for v in block), MAX_FLOAT32)
    if amax == 0:
        return [0] * len(block), 0
    byte = min(max(exponent_of(amax) + 127, 0), 254)
    step = Fraction(2) ** (byte - 127)
    codes = [
        (7 if np.isinf(v) else e2m1_magnitude_code(Fraction(float(v)) / step)) | (8 if v < 0 else 0)
        for v in block
    ]
    return codes, byte


def pack(codes: Sequence[int]) -> list[int]:
    """Low nibble = even element."""
    return [codes[i] + 16 * codes[i + 1] for i in range(0, len(codes), 2)]


def float32_scalars(x: torch.Tensor) -> list[np.float32]:
    """The elements of a tensor of any float dtype, rounded to float32."""
    return list(x.detach().to(torch.float32).contiguous().flatten().numpy())


def stack_blocks(blocks: Sequence[Block], shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """`(data, scales)`, both uint8, of the blocks of a tensor of `shape`, in order."""
    size = shape.numel() // max(len(blocks), 1)
    per_row = shape[-1] // size if blocks else 0
    data = torch.tensor([pack(codes) for codes, _ in blocks], dtype=torch.uint8)
    scales = torch.tensor([byte for _, byte in blocks], dtype=torch.uint8)
    return data.reshape(*shape[:-1], shape[-1] // 2), scales.reshape(*shape[:-1], per_row)


def nvfp4_quantize(
    x: torch.Tensor, global_scale: float | torch.Tensor, recipe: str = "amax6"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(data, scale bytes)` of `x`; `global_scale` is a float or broadcasts against `[..., 1]`."""
    g = torch.as_tensor(global_scale, dtype=torch.float32)
    per_block = g.expand(*x.shape[:-1], x.shape[-1] // 16) if x.numel() else g.new_empty(0)
    scales = float32_scalars(per_block)
    values = float32_scalars(x)
    blocks = [
        nvfp4_block(values[16 * i : 16 * i + 16], scales[i], recipe)
        for i in range(len(values) // 16)
    ]
    return stack_blocks(blocks, x.shape)


def with_neighbours(values: Sequence[float] | np.ndarray) -> torch.Tensor:
    """float32 `[3, n]`: the values, and the floats just below and just above them."""
    x = np.asarray(values, np.float32)
    below, above = np.nextafter(x, np.float32(-np.inf)), np.nextafter(x, np.float32(np.inf))
    return torch.from_numpy(np.stack([x, below, above]))
