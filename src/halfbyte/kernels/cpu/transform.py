"""What recipes do to K, in the form that the C++ kernels read it (`cpu/transform.h`)."""

import ctypes
import struct

import torch

_TRANSFORM = struct.Struct("7Pq4i")
_COLUMNS_AT_ONCE = 512 + 16
"""Segments that attention may read behind the last one."""


class CpuTransform:
    """Tensors of a transform, all float32 and contiguous on the CPU, and their addresses.

    Args:
        rotate: whether K is multiplied by the Hadamard matrix.
        segment: tokens that share a mean.
        centring: `mean`, `partner_mean` `[kv_heads, D]`, `cos` and `sin` `[segments, D]`; None
            where K is not centred.
        first: K and V of first tokens, `[tokens, kv_heads, D]` and `[tokens, kv_heads, Dv]`; None
            where they are packed like the others.
    """

    def __init__(
        self,
        rotate: bool,
        segment: int,
        centring: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
        first: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        self._kept = [x.float().contiguous() for x in (*(centring or ()), *(first or ()))]
        addresses = [x.data_ptr() for x in self._kept]
        columns = 0
        if centring is None:
            addresses = [0] * 5 + addresses
        else:
            turn = torch.cat(self._kept[2:4], 1).T
            columns = turn.shape[1] + _COLUMNS_AT_ONCE
            padded = torch.zeros(turn.shape[0], columns)
            padded[:, : turn.shape[1]] = turn
            self._kept.append(padded)
            addresses.insert(4, padded.data_ptr())
        addresses += [0] * (7 - len(addresses))
        count = 0 if first is None else len(first[0])
        packed = _TRANSFORM.pack(*addresses, columns, segment, rotate, count, 0)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))

    @property
    def address(self) -> int:
        """Of the C++ struct, as long as this lives."""
        return ctypes.addressof(self._buffer)
