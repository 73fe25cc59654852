"""The memory layout of NVFP4 weights for halfbyte's CUDA kernels: packing and unpacking.

Weights are repacked once, at load, for one dtype of the activations. Then a lane's 16-byte load
is its A operand of four steps of `mma.m16n8k16` (also of `wgmma.m64nNk16` with A in registers,
where warp t of a warpgroup holds tile t). The size stays at 0.5 + 1/16 bytes per value.

N is padded to a multiple of 64 and K to one of 128, with code 0 and scale 0. The order of k is the
natural one: activations need no permutation.

`weight`, int32 `[N/64, K/64, 4 tiles, 32 lanes, 4 steps]`, 2 KiB for 64 x 64 values. Tile t is
rows 16t to 16t + 15, lane 4g + c. The word of step j holds eight values, as four pairs:

    r0 = 64 nb + 16 t + g,  r1 = r0 + 8,  k0 = 64 kb + 16 j + 2 c
    a0 = W[r0, k0 : k0 + 2]    a1 = W[r1, k0 : k0 + 2]
    a2 = W[r0, k0 + 8 : k0 + 10]    a3 = W[r1, k0 + 8 : k0 + 10]

with the bits in the order of `packed_words`.

`weight_scale`, int32 `[N/64, K/64, 2, 8, 2, 2]` for tiles (2p, 2p + 1), g, tile of the pair, and
words: word i has the scales of steps 2i and 2i + 1, rows g and g + 8, as two pairs (row g in the
lower half), in the order of `packed_words`. Code times scale is exact, scaled by 2^-11.

`row_scale`, float32 `[N]` with the padding, is 2^11 times the global scale of a row's part and
multiplies the accumulators.

The codes of blocks with scale 0 become 0. Nonzero ones are kept in `zeroed`, because unpacking must
restore the weight bit for bit.
"""

from dataclasses import dataclass

import torch

from halfbyte.linear.w4a16.packed_words import (
    DTYPES,
    check_scales,
    codes_of_zeros,
    pack_scales,
    pack_values,
    unpack_scales,
    unpack_values,
)

TILE_N = 64
TILE_K = 128
"""N and K are padded to multiples of these."""
ROW_SCALE = 2.0**11
"""Scale of the accumulators, besides the global scale."""

_BLOCK = 16
_SQUARE = 64
"""Rows and k of a 2 KiB block of codes."""
_ROWS_AT_ONCE = 4096


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
    check_scales(scale_bytes)
    words, scales = [], []
    for start in range(0, n, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        own = _padded(scale_bytes[rows], TILE_K // _BLOCK)
        data = _padded(weight[rows], TILE_K // 2)
        words.append(_pack_values(data, own, dtype))
        scales.append(_pack_scales(own))
    sizes = torch.tensor(part_sizes, device=global_scale.device)
    row_scale = torch.repeat_interleave(global_scale.float() * ROW_SCALE, sizes)
    return PackedWeight(
        weight=torch.cat(words),
        weight_scale=torch.cat(scales),
        row_scale=torch.nn.functional.pad(row_scale, (0, -n % TILE_N)).to(weight.device),
        n=n,
        k=k,
        dtype=dtype,
        zeroed=codes_of_zeros(weight, scale_bytes),
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


def _pack_values(data: torch.Tensor, scale_bytes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 `[64 a, 32 b]` and its scales `[64 a, 4 b]` to int32 `[a, b, 4, 32, 4]`."""
    data = torch.where((scale_bytes == 0).repeat_interleave(_BLOCK // 2, dim=1), 0, data)
    # [nb, tile, row half, g, kb, step, k half, c] -> [row half, k half, nb, kb, tile, g, c, step]
    octets = data.view(data.shape[0] // _SQUARE, 4, 2, 8, data.shape[1] // 32, 4, 2, 4)
    octets = octets.permute(2, 6, 0, 4, 1, 3, 7, 5)
    return pack_values([octets[i & 1, i >> 1] for i in range(4)], dtype).flatten(3, 4)


def _unpack_values(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `_pack_values`."""
    blocks, steps = words.shape[:2]
    octets = words.new_empty((2, 2, blocks, steps, 4, 8, 4, 4), dtype=torch.uint8)
    for i, octet in enumerate(unpack_values(words, dtype)):
        octets[i & 1, i >> 1] = octet.unflatten(3, (8, 4))
    return octets.permute(2, 4, 0, 5, 3, 7, 1, 6).reshape(blocks * _SQUARE, steps * _SQUARE // 2)


def _pack_scales(scale_bytes: torch.Tensor) -> torch.Tensor:
    """uint8 `[64 a, 4 b]` to int32 `[a, b, 2, 8, 2, 2]`."""
    # [nb, pair, tile, row half, g, kb, word, step] -> [step, row half, nb, kb, pair, g, tile, word]
    rows, columns = scale_bytes.shape[0] // _SQUARE, scale_bytes.shape[1] // 4
    return pack_scales(
        scale_bytes.view(rows, 2, 2, 2, 8, columns, 2, 2).permute(7, 3, 0, 5, 1, 4, 2, 6)
    )


def _unpack_scales(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_scales`."""
    blocks, steps = words.shape[:2]
    scale_bytes = unpack_scales(words).permute(2, 4, 6, 1, 5, 3, 7, 0)
    return scale_bytes.reshape(blocks * _SQUARE, steps * _SQUARE // _BLOCK)


def _padded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Pad with zeros to multiples of `TILE_N` rows and `columns` columns."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % TILE_N))
