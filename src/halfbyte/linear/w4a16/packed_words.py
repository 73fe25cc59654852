"""Words of packed NVFP4 weights: eight values, or four block scales, in the order of bits from
which CUDA kernels unpack them with the fewest instructions.

Moving the bits `s|eem` of an E2M1 value to the sign and to the boundary of exponent and mantissa of
a wider float gives the same value times a power of two, subnormals included. A word w of eight
values becomes four pairs, of which the first value is in the lower half:

    float16, keep 0x8E008E00:    a0 = (w << 9) & keep           a1 = (w << 6) & keep
    (times 2^-14)                a2 = (w ^ (w << 2)) & keep     a3 = (w ^ (w >> 3)) & keep
    bfloat16, keep 0x81C081C0:   a0 = w & keep                  a1 = rotate_right(w, 4) & keep
    (times 2^-126)               a2 = (w << 6) & keep  a3 = ((w << 2) ^ (w >> 6)) & keep

`(x ^ y) & keep` is one instruction, and no order of bits takes fewer than eight in all (exhaustive
search over shifts, rotations and exclusive ors). The position of each bit of a value in w is the
solution of these equations over GF(2).

A block scale is stored as an unsigned float of five exponent and three mantissa bits, in which
E4M3's subnormals are normal, so that masks convert it to a half:

    bfloat16 (times 2^115):   (w & 0x0FF00FF0) | 0x70007000,  (rotate_right(w, 8) & ...) | ...
    float16 (times 2^3):      (w << 3) & 0x7F807F80,          rotate_right(w, 5) & 0x7F807F80

A value times a scale is exact in both, scaled by 2^-11. A scale of 0 has no encoding in bfloat16
(0x7000 is not zero), so the values of its block must be 0.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import torch

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of activations that have an order of bits."""

_BLOCK = 16
_CODE_SHIFT = {torch.float16: 9, torch.bfloat16: 6}
"""Bit of a half that takes the lowest bit of a code's magnitude."""
_KEEP = {torch.float16: 0x8E008E00, torch.bfloat16: 0x81C081C0}
_WORD = 0xFFFFFFFF
SCALE_PLACES = ((4, 20), (12, 28))
"""Left rotations of scales in their word: [first, second block][row g, g + 8]."""

Bits = TypeVar("Bits", int, torch.Tensor)


def pairs_of_word(w: Bits, dtype: torch.dtype) -> tuple[Bits, Bits, Bits, Bits]:
    """The four pairs of halves in a word, as the kernels unpack them; bits in an int or int64."""
    keep = _KEEP[dtype]
    if dtype == torch.float16:
        return (w << 9) & keep, (w << 6) & keep, (w ^ (w << 2)) & keep, (w ^ (w >> 3)) & keep
    return w & keep, _rotate_right(w, 4) & keep, (w << 6) & keep, ((w << 2) ^ (w >> 6)) & keep


def pack_values(octets: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Words of eight values.

    Args:
        octets: four uint8 tensors of the same shape, two codes per byte, those of a0 to a3.
        dtype: of the activations, one of `DTYPES`.

    Returns:
        int32 of the same shape.
    """
    device = octets[0].device
    tables = torch.tensor(_words_of_bytes(dtype), dtype=torch.int32, device=device)
    words = tables[0][octets[0].int()]
    for table, octet in zip(tables[1:], octets[1:], strict=True):
        words ^= table[octet.int()]
    return words


def unpack_values(words: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The inverse of `pack_values`."""
    shift, octets = _CODE_SHIFT[dtype], []
    for pair in pairs_of_word(words.long() & _WORD, dtype):
        both = (pair >> shift & 0x00070007) | (pair >> 12 & 0x00080008)
        octets.append(((both | both >> 12) & 0xFF).to(torch.uint8))
    return octets


def pack_scales(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Words of four block scales.

    Args:
        scale_bytes: uint8 `[2, 2, ...]`, finite E4M3 >= 0 of the first and second block of k, of
            rows g and g + 8.

    Returns:
        int32 `[...]`.
    """
    table = torch.tensor((*_CODE_OF_SCALE, 0), dtype=torch.uint8, device=scale_bytes.device)
    codes = table[(scale_bytes & 0x7F).int()].long()
    words = torch.zeros_like(codes[0, 0])
    for block in range(2):
        for row in range(2):
            words |= _rotate_right(codes[block, row], 32 - SCALE_PLACES[block][row])
    return words.to(torch.int32)


def unpack_scales(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_scales`."""
    codes = words.new_empty((2, 2, *words.shape), dtype=torch.uint8)
    for block in range(2):
        for row in range(2):
            rotated = _rotate_right(words.long() & _WORD, SCALE_PLACES[block][row])
            codes[block, row] = (rotated & 0xFF).to(torch.uint8)
    table = torch.zeros(256, dtype=torch.uint8, device="cpu")
    for byte, code in enumerate(_CODE_OF_SCALE):
        table[code] = byte
    return table.to(words.device)[codes.int()]


def check_scales(scale_bytes: torch.Tensor) -> None:
    """Raise ValueError for a block scale (uint8 of E4M3) that is NaN or has a sign."""
    if bool((scale_bytes >= 0x7F).any()):
        raise ValueError("weight_scale: expected finite block scales >= 0, found a NaN or a sign")


def codes_of_zeros(
    weight: torch.Tensor, scale_bytes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Nonzero codes of blocks with scale 0, which packed weights do not keep.

    Args:
        weight: uint8 `[..., K/2]`.
        scale_bytes: uint8 `[..., K/16]`.

    Returns:
        int64 `[Z]`, numbers of these blocks, and uint8 `[Z, 8]`; None if there are none, as in
        most weights.
    """
    blocks = (scale_bytes == 0).reshape(-1).nonzero().view(-1)
    codes = weight.reshape(-1, _BLOCK // 2)[blocks]
    lost = codes.ne(0).any(dim=1)
    return (blocks[lost], codes[lost]) if bool(lost.any()) else None


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


def _code_of_scale(byte: int) -> int:
    """E4M3 (sign 0, exponent bias 7) to five exponent bits with bias 18 and three mantissa bits."""
    if byte >= 8 or byte == 0:
        return byte + 88 if byte else 0
    leading = byte.bit_length() - 1  # a subnormal is byte * 2^-9
    return (9 + leading) << 3 | (byte << (3 - leading) & 7)


_CODE_OF_SCALE = tuple(_code_of_scale(byte) for byte in range(0x7F))
