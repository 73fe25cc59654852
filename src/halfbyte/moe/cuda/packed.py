"""The memory layout of experts for the CUDA kernels: packing and unpacking.

Weights are repacked once, at load, for one dtype of the activations, so that what a warp multiplies
lies in one piece, codes and block scales, and takes few instructions to unpack.

A tile is 16 rows of an expert's matrix; lane 4g + c of a warp has rows g and g + 8. Those of `down`
are rows 16 t + g and 16 t + g + 8. In `gate_up` row g is of gate and row g + 8 of up, both of
channel

    64 (t / 8) + 2 (t % 8) + 16 (g / 2) + g % 2

with integer divisions: `gemm_sm90/` writes 64 channels in the order in which it reads them as k of
the next product. Channels are padded to a multiple of 64, K to one of 64 (scales to one of 128),
with code 0 and scale 0.

A part of a tile is 16 rows x 128 k, uint8:

    scales   32 words of four (NVFP4), or 16 (MXFP4): of both chunks of k and both rows
    codes    two chunks of 64 k, each 32 lanes x 16 bytes

Lane 4g + c has k = 16 c .. 16 c + 15 of a chunk: two words of row g, then two of row g + 8, each
eight values in the order of k. If K has an odd number of chunks the last part ends after its first.

NVFP4: word 4g + c of scales is that of `packed_words.pack_scales`, and codes of blocks with scale 0
become 0; nonzero ones are kept in `zeroed_blocks` and `zeroed_codes`. MXFP4: bytes 0 to 3 of word
2g + c / 2 are the E8M0 scales of (chunk 0, row g), (0, g + 8), (1, g), (1, g + 8). Both take as
many bytes as before, but for the padding.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from halfbyte.linear.w4a16.packed_words import (
    check_scales,
    codes_of_zeros,
    pack_scales,
    pack_values,
    unpack_scales,
    unpack_values,
)
from halfbyte.moe.experts import BLOCK_SIZES, ExpertMatrices, GatedActivation, WeightFormat

TILE_ROWS = 16
CHUNK_K = 64
PART_K = 2 * CHUNK_K
CHUNK_BYTES = TILE_ROWS * CHUNK_K // 2
SCALE_BYTES: dict[WeightFormat, int] = {"nvfp4": 128, "mxfp4": 64}
"""Bytes of scales in a part."""
_TILE_CHANNELS, _BLOCK_CHANNELS = 8, 64
_BYTES_AT_ONCE = 2**24


class PackedMatrix(NamedTuple):
    """What the kernels need of `gate_up` or `down`; contiguous."""

    packed: torch.Tensor
    """uint8 `[E, tiles, tile_bytes]`."""
    global_scale: torch.Tensor | None
    bias: torch.Tensor | None
    """Both as loaded."""
    n: int
    k: int
    """Of an expert's matrix as loaded."""


def num_tiles(n: int, gated: bool) -> int:
    """Tiles of an expert's matrix.

    Args:
        n: its rows, a multiple of 32; of gate and up together.
        gated: whether it is `gate_up`.
    """
    blocks = -(-n // 2 // _BLOCK_CHANNELS)
    return blocks * (_BLOCK_CHANNELS // _TILE_CHANNELS) if gated else n // TILE_ROWS


def tile_bytes(k: int, weight_format: WeightFormat) -> int:
    """Bytes of a tile."""
    chunks = -(-k // CHUNK_K)
    return chunks * CHUNK_BYTES + -(-chunks // 2) * SCALE_BYTES[weight_format]


def rows_of_tiles(n: int, activation: GatedActivation | None) -> torch.Tensor:
    """int64 `[tiles, 16]` on the CPU: rows as loaded; n where the padding has no row.

    Args:
        n: rows of an expert's matrix.
        activation: of `gate_up`; None for `down`.
    """
    gated = activation is not None
    tiles = torch.arange(num_tiles(n, gated), device="cpu")[:, None]
    g = torch.arange(8, device="cpu")[None]
    if activation is None:
        return torch.cat([16 * tiles + g, 16 * tiles + g + 8], dim=1)
    channel = 64 * (tiles // 8) + 2 * (tiles % 8) + 16 * (g // 2) + g % 2
    gate, up = channel, channel + n // 2
    if activation.interleaved:
        gate, up = 2 * channel, 2 * channel + 1
    return torch.cat([gate, up], dim=1).masked_fill_((channel >= n // 2).repeat(1, 2), n)


def pack_matrices(
    name: str,
    matrices: ExpertMatrices,
    dtype: torch.dtype,
    activation: GatedActivation | None = None,
) -> dict[str, torch.Tensor]:
    """The kernels' tensors of `gate_up` or `down`, under names that begin with `name`.

    Args:
        name: `gate_up` or `down`.
        matrices: as loaded; N and K are multiples of 32.
        dtype: of hidden states, bfloat16 or float16.
        activation: of `gate_up`; None for `down`.

    Returns:
        `{name}_packed`, uint8 `[E, tiles, tile_bytes]`; `_global_scale` and `_bias` as loaded, if
        there are any; `_zeroed_blocks` and `_zeroed_codes` if there are blocks with scale 0 and
        codes other than 0.

    Raises:
        ValueError: a block scale that is NaN or has a sign.
    """
    weight, scales = matrices.weight, matrices.scales.view(torch.uint8)
    tensors: dict[str, torch.Tensor | None] = {
        f"{name}_global_scale": matrices.global_scale,
        f"{name}_bias": matrices.bias,
    }
    if matrices.format == "nvfp4":
        try:
            check_scales(scales)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        zeroed = codes_of_zeros(weight, scales)
        if zeroed is not None:
            tensors[f"{name}_zeroed_blocks"], tensors[f"{name}_zeroed_codes"] = zeroed
    rows = rows_of_tiles(matrices.n, activation).to(weight.device)
    shape = (matrices.num_experts, len(rows), tile_bytes(matrices.k, matrices.format))
    packed = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    step = max(1, _BYTES_AT_ONCE // prod(weight.shape[1:]))
    for start in range(0, matrices.num_experts, step):
        own = slice(start, start + step)
        _pack(packed[own], weight[own], scales[own], rows, matrices.format, dtype)
    tensors[f"{name}_packed"] = packed
    return {key: tensor.contiguous() for key, tensor in tensors.items() if tensor is not None}


def matrix_of_tensors(
    name: str, tensors: Mapping[str, torch.Tensor], n: int, k: int
) -> PackedMatrix:
    """A matrix from the result of `pack_matrices`; n and k as loaded."""
    scale, bias = tensors.get(f"{name}_global_scale"), tensors.get(f"{name}_bias")
    return PackedMatrix(tensors[f"{name}_packed"], scale, bias, n, k)


def unpack_matrices(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    n: int,
    k: int,
    dtype: torch.dtype,
    activation: GatedActivation | None = None,
) -> ExpertMatrices:
    """The inverse of `pack_matrices`, bit for bit.

    Args:
        name, dtype, activation: as there.
        tensors: its result.
        n, k: rows and columns of an expert's matrix.
    """
    packed, global_scale = tensors[f"{name}_packed"], tensors.get(f"{name}_global_scale")
    weight_format: WeightFormat = "mxfp4" if global_scale is None else "nvfp4"
    e, block = packed.shape[0], BLOCK_SIZES[weight_format]
    rows = rows_of_tiles(n, activation).to(packed.device)
    weight = packed.new_empty((e, n, k // 2))
    scales = packed.new_empty((e, n, k // block))
    step = max(1, _BYTES_AT_ONCE // prod(packed.shape[1:]))
    for start in range(0, e, step):
        own = slice(start, start + step)
        _unpack(packed[own], weight[own], scales[own], rows, weight_format, dtype)
    zeroed = tensors.get(f"{name}_zeroed_blocks")
    if zeroed is not None:
        weight.view(-1, block // 2)[zeroed] = tensors[f"{name}_zeroed_codes"]
    typed = scales if weight_format == "mxfp4" else scales.view(torch.float8_e4m3fn)
    return ExpertMatrices(weight, typed, global_scale, tensors.get(f"{name}_bias"))


def _pack(
    packed: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    weight_format: WeightFormat,
    dtype: torch.dtype,
) -> None:
    """Write `[e, tiles, tile_bytes]` of experts' `[e, N, K/2]` and `[e, N, K/block]`."""
    e, block = weight.shape[0], BLOCK_SIZES[weight_format]
    if weight_format == "nvfp4":
        zeros = (scales == 0).repeat_interleave(block // 2, dim=2)
        weight = torch.where(zeros, 0, weight)
    # [e, tile, row half, g, chunk, c, word, byte] -> [e, tile, chunk, g, c, row half, word]
    octets = _rows(weight, rows, CHUNK_K // 2).view(e, len(rows), 2, 8, -1, 4, 2, 4)
    words = pack_values(octets.unbind(-1), dtype).permute(0, 1, 4, 3, 5, 2, 6)
    codes = words.contiguous().view(torch.uint8).view(e, len(rows), -1, CHUNK_BYTES)
    # [e, tile, row half, g, part, chunk, c]
    blocks = _rows(scales, rows, PART_K // block).view(e, len(rows), 2, 8, -1, 2, CHUNK_K // block)
    if weight_format == "nvfp4":
        packed_scales = pack_scales(blocks.permute(5, 2, 0, 1, 4, 3, 6)).contiguous()
    else:
        packed_scales = blocks.permute(0, 1, 4, 3, 6, 5, 2).contiguous()
    packed_scales = packed_scales.view(torch.uint8)
    packed_scales = packed_scales.view(e, len(rows), -1, SCALE_BYTES[weight_format])
    for to_scales, to_codes, part in _parts(packed, codes.shape[2], weight_format):
        to_scales.copy_(packed_scales[:, :, part])
        to_codes.copy_(codes[:, :, 2 * part : 2 * part + 2].flatten(2))


def _unpack(
    packed: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    weight_format: WeightFormat,
    dtype: torch.dtype,
) -> None:
    """The inverse of `_pack`, but for codes of blocks with scale 0."""
    e, tiles = packed.shape[:2]
    chunks = -(-2 * weight.shape[2] // CHUNK_K)
    codes = packed.new_empty((e, tiles, chunks, CHUNK_BYTES))
    blocks = packed.new_empty((e, tiles, -(-chunks // 2), SCALE_BYTES[weight_format]))
    for from_scales, from_codes, part in _parts(packed, chunks, weight_format):
        blocks[:, :, part] = from_scales
        codes[:, :, 2 * part : 2 * part + 2] = from_codes.unflatten(2, (-1, CHUNK_BYTES))
    words = codes.view(torch.int32).view(e, tiles, chunks, 8, 4, 2, 2).permute(0, 1, 5, 3, 2, 4, 6)
    octets = torch.stack(unpack_values(words, dtype), dim=-1)
    _store_rows(weight, octets.reshape(e, tiles * TILE_ROWS, -1), rows)
    if weight_format == "nvfp4":
        bytes_ = unpack_scales(blocks.view(torch.int32).view(e, tiles, -1, 8, 4))
        blocks = bytes_.permute(2, 3, 1, 5, 4, 0, 6)
    else:
        blocks = blocks.view(e, tiles, -1, 8, 2, 2, 2).permute(0, 1, 6, 3, 2, 5, 4)
    _store_rows(scales, blocks.reshape(e, tiles * TILE_ROWS, -1), rows)


def _parts(
    packed: torch.Tensor, chunks: int, weight_format: WeightFormat
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Scales and codes of each part, and its number."""
    scale_bytes = SCALE_BYTES[weight_format]
    found, begin = [], 0
    for part in range(-(-chunks // 2)):
        codes = begin + scale_bytes
        end = codes + min(2, chunks - 2 * part) * CHUNK_BYTES
        found.append((packed[:, :, begin:codes], packed[:, :, codes:end], part))
        begin = end
    return found


def _rows(x: torch.Tensor, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """The tiles' rows of `[e, N, bytes]`: `[e, tiles * 16, bytes padded to columns]`."""
    x = pad(x, (0, -x.shape[2] % columns, 0, 1))
    return x.index_select(1, rows.flatten())


def _store_rows(to: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
    """Write `[e, tiles * 16, bytes]` in the order of tiles to `[e, N, bytes]` as loaded."""
    exist = (rows < to.shape[1]).flatten()
    to[:, rows.flatten()[exist]] = x[:, exist, : to.shape[2]]
