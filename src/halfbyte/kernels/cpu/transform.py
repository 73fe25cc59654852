"""Transforms of K by recipes, as structs of the C++ kernels (`cpu/transform.h`)."""

import ctypes
import struct

import torch
import torch.nn.functional as F

_TRANSFORM = struct.Struct("12Pq4i")
_COLUMNS_AT_ONCE = 512 + 16
"""Segments that attention may read beyond the last one."""


class CpuTransform:
    """Tensors of a transform, contiguous on the CPU, and their addresses.

    Args:
        rotate: whether K is multiplied by the Hadamard matrix.
        segment: tokens that share a mean.
        centring: `mean` `[kv_heads, D]`, `cos` and `sin` `[segments, D]`; None where K is not
            centred.
        partner: int64 `[D]`, see `kvcache.transform`.
        first: K and V of first tokens, `[tokens, kv_heads, D]` and `[tokens, kv_heads, Dv]`; None
            where they are packed like the others.
        rounding: `feedback`, `k_weights` and `v_weights`, see `kvcache.transform`.
    """

    def __init__(
        self,
        rotate: bool,
        segment: int,
        centring: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        partner: torch.Tensor | None,
        first: tuple[torch.Tensor, torch.Tensor] | None,
        rounding: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        tensors: list[torch.Tensor | None] = [None] * 7 + list(rounding) + [None] * 2
        columns = pairs = 0
        if centring is not None:
            assert partner is not None
            mean, cos, sin = centring
            is_first = torch.arange(len(partner), device="cpu") <= partner
            one = is_first.nonzero().flatten()
            turn = torch.cat([cos[:, one], sin[:, one]], 1).T
            columns, pairs = turn.shape[1] + _COLUMNS_AT_ONCE, len(one)
            turn = F.pad(turn, (0, _COLUMNS_AT_ONCE))
            tensors[:5] = mean, mean[:, partner], cos, sin, turn
            tensors[10:] = one.int(), partner[one].int()
        if first is not None:
            tensors[5:7] = (x.float() for x in first)
        self._kept = [None if x is None else x.contiguous() for x in tensors]
        addresses = [0 if x is None else x.data_ptr() for x in self._kept]
        count = 0 if first is None else len(first[0])
        packed = _TRANSFORM.pack(*addresses, columns, segment, rotate, count, pairs)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))

    @property
    def address(self) -> int:
        """Address of the C++ struct; valid while this object lives."""
        return ctypes.addressof(self._buffer)
