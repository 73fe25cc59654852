"""Triton kernel that puts a step's last tokens into the rings of `recent.RecentTokens`."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from halfbyte.kernels.runtime.devices import current_device


@triton.jit
def _copy_head(x, ring, head_size: tl.constexpr, padded: tl.constexpr):
    dims = tl.arange(0, padded)
    mask = dims < head_size
    tl.store(ring + dims, tl.load(x + dims, mask=mask).to(ring.dtype.element_ty), mask=mask)


@triton.jit
def remember_kernel(
    key,
    value,
    keys,
    values,
    rows,
    owners,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    kv_heads: tl.constexpr,
    ring: tl.constexpr,
    head_size: tl.constexpr,
    head_size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
):
    """K and V of one head (`program_id(1)`) of the step's token `rows[program_id(0)]`."""
    i, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(rows + i)
    place = (tl.load(owners + i) * kv_heads + head) * ring + tl.load(slots + i)
    _copy_head(
        key + token * key_token + head * key_head, keys + place * head_size, head_size, padded
    )
    _copy_head(
        value + token * value_token + head * value_head,
        values + place * head_size_v,
        head_size_v,
        padded_v,
    )


def remember(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    owners: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write token `rows[i]` to slot `slots[i]` of entry `owners[i]`; never waits for the GPU.

    Args:
        key, value: `[tokens, kv_heads, D]` and `[tokens, kv_heads, Dv]`, contiguous heads.
        keys, values: rings `[entries, kv_heads, ring, D]` and `[entries, kv_heads, ring, Dv]`,
            contiguous.
        rows, owners, slots: int64 `[n]`.
    """
    if not len(rows):
        return
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    _, kv_heads, ring, head_size = keys.shape
    head_size_v = values.shape[3]
    with current_device(keys.get_device()):
        remember_kernel[(len(rows), kv_heads)](
            key,
            value,
            keys,
            values,
            rows,
            owners,
            slots,
            *key.stride()[:2],
            *value.stride()[:2],
            kv_heads=kv_heads,
            ring=ring,
            head_size=head_size,
            head_size_v=head_size_v,
            padded=1 << (head_size - 1).bit_length(),
            padded_v=1 << (head_size_v - 1).bit_length(),
            num_warps=1,
        )
