"""`noise.add_gumbel_noise` in one launch; PyTorch operators would need forty.

The hash equals that of `noise.py` bit for bit; logarithms may differ from PyTorch's in the last
bits.
"""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from halfbyte.kernels.runtime.devices import current_device

_BLOCK = 1024


@triton.jit
def _hash(words):
    words = words ^ (words >> 16)
    words = words * 0x7FEB352D
    words = words ^ (words >> 15)
    words = words * 0x846CA68B
    return words ^ (words >> 16)


@triton.jit
def noise_kernel(scores, keys, count, block: tl.constexpr):
    """A block of a row of `scores [rows, count]` += Gumbel noise of `keys [rows, 2]`."""
    row = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * block + tl.arange(0, block)
    low = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    hashed = _hash(_hash(entries.to(tl.uint32) ^ low) ^ high)
    uniform = ((hashed & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    uniform = tl.minimum(uniform, 0.999999940395355224609375)  # 1 - 2^-24
    # -log1p(-u), computed from log of the rounded 1 - u.
    rest = 1.0 - uniform
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / (1.0 - rest)))
    places = scores + row * count + entries
    mask = entries < count
    tl.store(places, tl.load(places, mask=mask, other=0.0) - tl.log(exponential), mask=mask)


def add_gumbel_noise(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Add standard Gumbel noise in place. Does not sync with the GPU.

    Args:
        scores: float32 `[rows, count]`, contiguous.
        keys: int32 `[rows, 2]`, contiguous.
    """
    rows, count = scores.shape
    with current_device(scores.get_device()):
        noise_kernel[(rows, triton.cdiv(count, _BLOCK))](scores, keys, count, block=_BLOCK)
    return scores
