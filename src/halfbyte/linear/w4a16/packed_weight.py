"""The memory layout of NVFP4 weights for halfbyte's CUDA kernels: packing and unpacking.

Weights are repacked once, at load, for one dtype of the activations. Then a lane's 16-byte load
is its A operand of four steps of `mma.m16n8k16` (also of `wgmma.m64nNk16` with A in registers,
where warp t of a warpgroup holds tile t), and unpacking bits to pairs of halves takes eight
operations for eight values. The size stays at 0.5 + 1/16 bytes per value.

N is padded to a multiple of 64 and K to one of 128, with code 0 and scale 0. The order of k is the
natural one: activations need no permutation.

`weight`, int32 `[N/64, K/64, 4 tiles, 32 lanes, 4 steps]`, 2 KiB for 64 x 64 values. Tile t is
rows 16t to 16t + 15, lane 4g + c. The word of step j holds eight values, as four pairs:

    r0 = 64 nb + 16 t + g,  r1 = r0 + 8,  k0 = 64 kb + 16 j + 2 c
    a0 = W[r0, k0 : k0 + 2]    a1 = W[r1, k0 : k0 + 2]
    a2 = W[r0, k0 + 8 : k0 + 10]    a3 = W[r1, k0 + 8 : k0 + 10]

Moving the bits `s|eem` of an E2M1 value to the sign and to the boundary of exponent and mantissa of
a wider float gives the same value times a power of two, subnormals included:

    float16, keep 0x8E008E00:    a0 = (w << 9) & keep           a1 = (w << 6) & keep
    (times 2^-14)                a2 = (w ^ (w << 2)) & keep     a3 = (w ^ (w >> 3)) & keep
    bfloat16, keep 0x81C081C0:   a0 = w & keep                  a1 = rotate_right(w, 4) & keep
    (times 2^-126)               a2 = (w << 6) & keep  a3 = ((w << 2) ^ (w >> 6)) & keep

where a pair's first value is in the lower half. `(x ^ y) & keep` is one instruction, and no order
of bits takes fewer than eight in all (exhaustive search over shifts, rotations and exclusive ors).
The position of each bit of a value in w is the solution of these equations over GF(2).

`weight_scale`, int32 `[N/64, K/64, 2, 8, 2, 2]` for tiles (2p, 2p + 1), g, tile of the pair, and
words: word i has the scales of steps 2i and 2i + 1, rows g and g + 8, as two pairs (row g in the
lower half). A scale is stored as an unsigned float of five exponent and three mantissa bits, in
which E4M3's subnormals are normal, so that masks convert it to a half:

    bfloat16 (times 2^115):   (w & 0x0FF00FF0) | 0x70007000,  (rotate_right(w, 8) & ...) | ...
    float16 (times 2^3):      (w << 3) & 0x7F807F80,          rotate_right(w, 5) & 0x7F807F80

Code times scale is exact in both, scaled by 2^-11. `row_scale`, float32 `[N]` with the padding, is
2^11 times the global scale of a row's part and multiplies the accumulators.

A scale of 0 has no encoding in bfloat16 (0x7000 is not zero), so the codes of its block become 0.
Nonzero ones are kept in `zeroed`, because unpacking must restore the weight bit for bit.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

TILE_N = 64
TILE_K = 128
"""N and K are padded to multiples of these."""
ROW_SCALE = 2.0**11
"""Scale of the accumulators, besides the global scale."""
DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of activations that have a layout."""

_BLOCK = 16
_SQUARE = 64
"""Rows and k of a 2 KiB block of codes."""
_CODE_SHIFT = {torch.float16: 9, torch.bfloat16: 6}
"""Bit of a half that takes the lowest bit of a code's magnitude."""
_KEEP = {torch.float16: 0x8E008E00, torch.bfloat16: 0x81C081C0}
_WORD = 0xFFFFFFFF
_SCALE_PLACES = ((4, 20), (12, 28))
"""Left rotations of scales in their word: [even, odd step][row g, g + 8]."""
_ROWS_AT_ONCE = 4096

Bits = TypeVar("Bits", int, torch.Tensor)


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the kernels' layout, for activations of `dtype`."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    row_scale: torch.Tensor
    n: int
    k: int
    dtype: torch.dtype
    zeroed: tuple[torch.Tensor, torch.Tensor] | None = None
    """Nonzero codes of blocks with scale 0: int64 `[Z]`, row * K/16 + block; uint8 `[Z, 8]`."""


def pack_weight(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    part_sizes: tuple[int, ...],
    dtype: torch.dtype,
) -> PackedWeight:
    """Pack a layer's weight into the kernels' layout.

    Args:
        weight: uint8 `[N, K/2]`, low nibble = even k.
        weight_scale: float8_e4m3fn or uint8 `[N, K/16]`.
        global_scale: float32 `[P]`, decode scales of the parts.
        part_sizes: rows of each part; they add up to N.
        dtype: of the activations, one of `DTYPES`.

    Raises:
        ValueError: shapes that do not belong together, another dtype, or a block scale that is
            NaN or has a sign.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected bfloat16 or float16 activations, got {dtype}")
    n, k = weight.shape[0], 2 * weight.shape[1]
    if weight_scale.shape != (n, k // _BLOCK) or k % _BLOCK or sum(part_sizes) != n:
        raise ValueError(
            f"weight {tuple(weight.shape)}, weight_scale {tuple(weight_scale.shape)} and "
            f"part_sizes {part_sizes} do not belong together"
        )
    scale_bytes = weight_scale.view(torch.uint8)
    if bool((scale_bytes >= 0x7F).any()):
        raise ValueError("weight_scale: expected finite block scales >= 0, found a NaN or a sign")
    words, scales = [], []
    for start in range(0, n, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        codes = _padded(_scale_codes(scale_bytes[rows]), TILE_K // _BLOCK)
        data = _padded(weight[rows], TILE_K // 2)
        words.append(_pack_values(data, codes, dtype))
        scales.append(_pack_scales(codes))
    sizes = torch.tensor(part_sizes, device=global_scale.device)
    row_scale = torch.repeat_interleave(global_scale.float() * ROW_SCALE, sizes)
    return PackedWeight(
        weight=torch.cat(words),
        weight_scale=torch.cat(scales),
        row_scale=torch.nn.functional.pad(row_scale, (0, -n % TILE_N)).to(weight.device),
        n=n,
        k=k,
        dtype=dtype,
        zeroed=_codes_of_zeros(weight, scale_bytes),
    )


def unpack_weight(packed: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and its block scales: uint8 `[N, K/2]`, float8_e4m3fn `[N, K/16]`."""
    n, k = packed.n, packed.k
    data, scales = [], []
    step = _ROWS_AT_ONCE // TILE_N
    for start in range(0, packed.weight.shape[0], step):
        data.append(_unpack_values(packed.weight[start : start + step], packed.dtype))
        scales.append(_unpack_scales(packed.weight_scale[start : start + step]))
    weight = torch.cat(data)[:n, : k // 2].contiguous()
    weight_scale = torch.cat(scales)[:n, : k // _BLOCK].contiguous()
    if packed.zeroed is not None:
        weight.view(-1, _BLOCK // 2)[packed.zeroed[0]] = packed.zeroed[1]
    return weight, weight_scale.view(torch.float8_e4m3fn)


def pairs_of_word(w: Bits, dtype: torch.dtype) -> tuple[Bits, Bits, Bits, Bits]:
    """The four pairs of halves in a word, as the kernels unpack them; bits in an int or int64."""
    keep = _KEEP[dtype]
    if dtype == torch.float16:
        return (w << 9) & keep, (w << 6) & keep, (w ^ (w << 2)) & keep, (w ^ (w >> 3)) & keep
    return w & keep, _rotate_right(w, 4) & keep, (w << 6) & keep, ((w << 2) ^ (w >> 6)) & keep


def _rotate_right(w: Bits, places: int) -> Bits:
    return ((w >> places) | (w << (32 - places))) & _WORD


def _pair_of_byte(byte: int, dtype: torch.dtype) -> int:
    """A packed byte's two codes as the bits of a pair of halves."""
    shift = _CODE_SHIFT[dtype]
    pair = 0
    for half, code in enumerate((byte & 15, byte >> 4)):
        pair |= ((code & 7) << shift | (code & 8) << 12) << 16 * half
    return pair


@lru_cache(maxsize=len(DTYPES))
def _words_of_bytes(dtype: torch.dtype) -> tuple[list[int], ...]:
    """Words that hold one pair (a0 to a3) of one byte's codes, and zeros; they combine by xor."""
    # Gauss-Jordan elimination over GF(2): each row has the unpacked pairs of a set of the word's
    # bits (128 bits) and, above them, that set.
    rows = []
    for bit in range(32):
        image = sum(pair << 32 * i for i, pair in enumerate(pairs_of_word(1 << bit, dtype)))
        rows.append(image | 1 << (128 + bit))
    word_of_bit: dict[int, int] = {}
    for pivot in range(128):
        row = next((row for row in rows if row >> pivot & 1), 0)
        if row:
            rows = [other ^ row if other >> pivot & 1 else other for other in rows if other != row]
            word_of_bit = {
                p: other ^ row if other >> pivot & 1 else other for p, other in word_of_bit.items()
            }
            word_of_bit[pivot] = row
    assert len(word_of_bit) == 32, "every bit of a word is needed"
    tables: tuple[list[int], ...] = ([], [], [], [])
    for i, table in enumerate(tables):
        for byte in range(256):
            word, pair = 0, _pair_of_byte(byte, dtype)
            for bit in range(32):
                if pair >> bit & 1:
                    word ^= word_of_bit[32 * i + bit] >> 128
            table.append(word - (word >> 31 << 32))  # as int32
    return tables


def _codes_of_zeros(
    weight: torch.Tensor, scale_bytes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`PackedWeight.zeroed`; None if there are no such blocks, as in most weights."""
    blocks = (scale_bytes == 0).view(-1).nonzero().view(-1)
    codes = weight.reshape(-1, _BLOCK // 2)[blocks]
    lost = codes.ne(0).any(dim=1)
    return (blocks[lost], codes[lost]) if bool(lost.any()) else None


def _pack_values(data: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 `[64 a, 32 b]` and scale codes `[64 a, 4 b]` to int32 `[a, b, 4, 32, 4]`."""
    data = torch.where((codes == 0).repeat_interleave(_BLOCK // 2, dim=1), 0, data)
    # [nb, tile, row half, g, kb, step, k half, c] -> [row half, k half, nb, kb, tile, g, c, step]
    octets = data.view(data.shape[0] // _SQUARE, 4, 2, 8, data.shape[1] // 32, 4, 2, 4)
    octets = octets.permute(2, 6, 0, 4, 1, 3, 7, 5)
    tables = torch.tensor(_words_of_bytes(dtype), dtype=torch.int32, device=data.device)
    words = tables[0][octets[0, 0].int()]
    for i in range(1, 4):
        words ^= tables[i][octets[i & 1, i >> 1].int()]
    return words.flatten(3, 4)


def _unpack_values(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `_pack_values`."""
    blocks, steps = words.shape[:2]
    shift = _CODE_SHIFT[dtype]
    octets = words.new_empty((2, 2, blocks, steps, 4, 8, 4, 4), dtype=torch.uint8)
    for i, pair in enumerate(pairs_of_word(words.long() & _WORD, dtype)):
        both = (pair >> shift & 0x00070007) | (pair >> 12 & 0x00080008)
        octets[i & 1, i >> 1] = ((both | both >> 12) & 0xFF).to(torch.uint8).unflatten(3, (8, 4))
    return octets.permute(2, 4, 0, 5, 3, 7, 1, 6).reshape(blocks * _SQUARE, steps * _SQUARE // 2)


def _pack_scales(codes: torch.Tensor) -> torch.Tensor:
    """uint8 scale codes `[64 a, 4 b]` to int32 `[a, b, 2, 8, 2, 2]`."""
    # [nb, pair, tile, row half, g, kb, word, step] -> [row half, step, nb, kb, pair, g, tile, word]
    code = codes.view(codes.shape[0] // _SQUARE, 2, 2, 2, 8, codes.shape[1] // 4, 2, 2)
    code = code.permute(3, 7, 0, 5, 1, 4, 2, 6).long()
    words = torch.zeros_like(code[0, 0])
    for step in range(2):
        for half in range(2):
            words |= _rotate_right(code[half, step], 32 - _SCALE_PLACES[step][half])
    return words.to(torch.int32)


def _unpack_scales(words: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes `[64 a, 4 b]`; the inverse of `_pack_scales` after `_scale_codes`."""
    blocks, steps = words.shape[:2]
    code = words.new_empty((2, 2, *words.shape), dtype=torch.uint8)
    for step in range(2):
        for half in range(2):
            rotated = _rotate_right(words.long() & _WORD, _SCALE_PLACES[step][half])
            code[half, step] = (rotated & 0xFF).to(torch.uint8)
    codes = code.permute(2, 4, 6, 0, 5, 3, 7, 1).reshape(
        blocks * _SQUARE, steps * _SQUARE // _BLOCK
    )
    table = torch.zeros(256, dtype=torch.uint8, device="cpu")
    for byte, scale_code in enumerate(_CODE_OF_SCALE):
        table[scale_code] = byte
    return table.to(words.device)[codes.int()]


def _code_of_scale(byte: int) -> int:
    """E4M3 (sign 0, exponent bias 7) to five exponent bits with bias 18 and three mantissa bits."""
    if byte >= 8 or byte == 0:
        return byte + 88 if byte else 0
    leading = byte.bit_length() - 1  # a subnormal is byte * 2^-9
    return (9 + leading) << 3 | (byte << (3 - leading) & 7)


_CODE_OF_SCALE = tuple(_code_of_scale(byte) for byte in range(0x7F))


def _scale_codes(scale_bytes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor((*_CODE_OF_SCALE, 0), dtype=torch.uint8, device=scale_bytes.device)
    return table[(scale_bytes & 0x7F).int()]


def _padded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Pad with zeros to multiples of `TILE_N` rows and `columns` columns."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % TILE_N))
