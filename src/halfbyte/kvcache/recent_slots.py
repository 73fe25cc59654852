"""Slots of a step's tokens in the rings of `recent`, from positions on the device."""

from typing import NamedTuple

import torch

from halfbyte.dispatch import is_installed
from halfbyte.kvcache.recent import PADDING_ENTRY


class TokenSlots(NamedTuple):
    """Where tokens of a step go in the rings, the same in every layer."""

    rows: torch.Tensor
    """int64 `[n]`, which tokens of the step."""
    owners: torch.Tensor
    """int64 `[n]`, entry of each; `PADDING_ENTRY` for tokens without a position."""
    slots: torch.Tensor
    """int64 `[n]`, slot of each."""

    @classmethod
    def of(
        cls,
        sequences: torch.Tensor,
        positions: torch.Tensor,
        entries: torch.Tensor,
        ring: int,
        rows: torch.Tensor | None = None,
    ) -> "TokenSlots":
        """Of a step's tokens; on a GPU in one launch that a CUDA graph can capture.

        Args:
            sequences: int32 `[tokens]`, the number of each token's sequence in the batch.
            positions: int64 `[tokens]`, in the sequence; -1 for padding.
            entries: int32 `[sequences]`.
            ring: slots of an entry.
            rows: int64 `[n]`, ascending from 0 to below `tokens`; None for all tokens.
        """
        if positions.is_cuda and is_installed("triton"):
            # Here, because the import needs Triton.
            from halfbyte.kvcache.recent_slots_kernel import find_slots

            return cls(*find_slots(sequences, positions, entries, ring, rows))
        return cls.reference(sequences, positions, entries, ring, rows)

    @classmethod
    def reference(
        cls,
        sequences: torch.Tensor,
        positions: torch.Tensor,
        entries: torch.Tensor,
        ring: int,
        rows: torch.Tensor | None = None,
    ) -> "TokenSlots":
        """`of` by PyTorch operators, on any device."""
        if rows is None:
            rows = torch.arange(len(positions), device=positions.device)
        else:
            sequences, positions = sequences[rows], positions[rows]
        owners = entries[sequences.clamp(min=0).long()].long()
        return cls(
            rows,
            torch.where(positions < 0, PADDING_ENTRY, owners),
            positions.clamp(min=0) % ring,
        )
