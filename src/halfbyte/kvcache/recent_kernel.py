"""Triton kernel that writes a step's tokens to the rings of `recent.RecentTokens`."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from halfbyte.kernels.runtime.devices import current_device

_PAIRS = 8


@triton.jit
def write_heads(
    side,
    places,
    pairs: tl.constexpr,
    heads: tl.constexpr,
    ring_size: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
):
    """Write K or V of the (token, head) pairs from `program_id(0) * pairs` on.

    Args:
        side: K or V of the step's tokens, their three strides, and the ring.
        places: `RingSlots.rows`, `owners` and `slots`, and their length n.
    """
    x, stride_token, stride_head, stride, ring = side
    rows, owners, slots, count = places
    pair = tl.program_id(0) * pairs + tl.arange(0, pairs)
    i, head = pair // heads, (pair % heads).to(tl.int64)
    inside = i < count
    token = tl.load(rows + i, mask=inside, other=0)
    owner = tl.load(owners + i, mask=inside, other=0)
    slot = tl.load(slots + i, mask=inside, other=0)
    dims = tl.arange(0, padded)[None, :]
    mask = inside[:, None] & (dims < size)
    x += (token * stride_token + head * stride_head)[:, None] + dims * stride
    ring += (((owner * heads + head) * ring_size + slot) * size)[:, None] + dims
    tl.store(ring, tl.load(x, mask=mask).to(ring.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def write_kernel(
    key,
    value,
    keys,
    values,
    rows,
    owners,
    slots,
    count,
    key_token,
    key_head,
    key_stride,
    value_token,
    value_head,
    value_stride,
    pairs: tl.constexpr,
    heads: tl.constexpr,
    ring_size: tl.constexpr,
    head_size: tl.constexpr,
    head_size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
):
    """K (`program_id(1)` 0) or V (1) of some pairs of a token and a head."""
    places = (rows, owners, slots, count)
    if tl.program_id(1) == 0:
        side = (key, key_token, key_head, key_stride, keys)
        write_heads(side, places, pairs, heads, ring_size, head_size, padded)
    else:
        side = (value, value_token, value_head, value_stride, values)
        write_heads(side, places, pairs, heads, ring_size, head_size_v, padded_v)


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    owners: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """See `recent.RingSlots` and its `write`."""
    count, (_, heads, ring_size, head_size) = len(rows), keys.shape
    if not count:
        return
    head_size_v = values.shape[3]
    with current_device(keys.get_device()):
        write_kernel[-(-count * heads // _PAIRS), 2](
            key=key,
            value=value,
            keys=keys,
            values=values,
            rows=rows,
            owners=owners,
            slots=slots,
            count=count,
            key_token=key.stride(0),
            key_head=key.stride(1),
            key_stride=key.stride(2),
            value_token=value.stride(0),
            value_head=value.stride(1),
            value_stride=value.stride(2),
            pairs=_PAIRS,
            heads=heads,
            ring_size=ring_size,
            head_size=head_size,
            head_size_v=head_size_v,
            padded=1 << (head_size - 1).bit_length(),
            padded_v=1 << (head_size_v - 1).bit_length(),
        )
