"""Loads of weights in the order of `cuda/packed.py` for the Triton kernel, which decodes them as
loaded."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def packed_places(columns, n, gated: tl.constexpr):
    """Where columns of the output have their rows: tile, g (the row is g or g + 8), whether it is
    g + 8 (gated: that is up's row, and this is gate's), and the number of tiles of an expert.

    Args:
        columns: int32 `[n]`.
        n: of an expert.
    """
    if gated:
        tile = columns // 64 * 8 + columns % 16 // 2
        g = columns % 64 // 16 * 2 + columns % 2
        is_lower = columns * 0
        tiles = tl.cdiv(n, 64) * 8
    else:
        tile, g, is_lower = columns // 16, columns % 8, columns // 8 % 2
        tiles = n // 16
    return tile, g, is_lower, tiles


@triton.jit
def packed_tile_bytes(k, block: tl.constexpr):
    """Bytes of a tile."""
    chunks = tl.cdiv(k, 64)
    return chunks * 512 + tl.cdiv(chunks, 2) * (2048 // block)


@triton.jit
def load_packed(
    tile,
    g,
    is_lower,
    live,
    start,
    k,
    float16: tl.constexpr,
    block: tl.constexpr,
    size: tl.constexpr,
):
    """Bytes of codes `[n, size / 2]` and of scales `[n, size / block]`, as loaded.

    Args:
        tile: pointers to the tiles of the rows, uint8 `[n]`.
        g, is_lower: of `packed_places`.
        live: whether there is such a row, `[n]`.
        start: first k.
        k: K.
        float16: whether the weights are packed for float16, not for bfloat16.
        block: of a scale.
        size: number of k.
    """
    scale_bytes: tl.constexpr = 2048 // block
    part_bytes: tl.constexpr = scale_bytes + 1024
    word = start // 8 + tl.arange(0, size // 8)
    own = word // 16 * part_bytes + scale_bytes + word // 8 % 2 * 512
    own += word % 8 // 2 * 16 + word % 2 * 4
    rows = tile + g * 64 + is_lower * 8
    pointers = (rows[:, None] + own[None, :]).to(tl.pointer_type(tl.int32))
    mask = live[:, None] & (word < tl.cdiv(k, 8))[None, :]
    words = tl.load(pointers, mask=mask, other=0).to(tl.uint32, bitcast=True)
    codes = _codes(words, float16)

    number = start // block + tl.arange(0, size // block)
    mask = live[:, None] & (number < tl.cdiv(k, block))[None, :]
    if block == 16:
        pointers = (tile + g * 16)[:, None] + (number // 8 * part_bytes + number % 4 * 4)[None, :]
        words = tl.load(pointers.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
        places = 4 + number // 4 % 2 * 8
        scales = _e4m3(words.to(tl.uint32, bitcast=True), places[None, :] + is_lower[:, None] * 16)
    else:
        own = number // 4 * part_bytes + number % 2 * 4 + number // 2 % 2 * 2
        scales = tl.load((tile + g * 8 + is_lower)[:, None] + own[None, :], mask=mask, other=0)
    return codes, scales


@triton.jit
def _codes(w, float16: tl.constexpr):
    """uint32 `[n, words]` to bytes `[n, 4 * words]`; see `packed_words.pairs_of_word`."""
    if float16:
        a0, a1, a2, a3 = w << 9, w << 6, w ^ (w << 2), w ^ (w >> 3)
    else:
        a0, a1, a2, a3 = w, (w >> 4) | (w << 28), w << 6, (w << 2) ^ (w >> 6)
    even = tl.join(_byte(a0, float16), _byte(a2, float16))
    odd = tl.join(_byte(a1, float16), _byte(a3, float16))
    return tl.reshape(tl.join(even, odd), (w.shape[0], 4 * w.shape[1]))


@triton.jit
def _byte(pair, float16: tl.constexpr):
    """A pair's two codes."""
    both = ((pair >> (9 if float16 else 6)) & 0x00070007) | ((pair >> 12) & 0x00080008)
    return ((both | (both >> 12)) & 0xFF).to(tl.uint8)


@triton.jit
def _e4m3(words, places):
    """The scales at `places` of words of `packed_words.pack_scales`, as E4M3."""
    code = ((words >> places.to(tl.uint32)) | (words << (32 - places).to(tl.uint32))) & 0xFF
    code = code.to(tl.int32)
    subnormal = (8 | (code & 7)) >> tl.maximum(12 - (code >> 3), 0)
    return tl.where(code >= 96, code - 88, subnormal).to(tl.uint8)
