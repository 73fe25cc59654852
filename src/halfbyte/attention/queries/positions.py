"""Sequence and position of each query token."""

from typing import NamedTuple

import torch

from halfbyte.attention.base import AttentionPlans
from halfbyte.dispatch import is_installed


class _Key(NamedTuple):
    """What the positions depend on besides the lengths."""

    num_tokens: int


class QueryPositions(NamedTuple):
    """Sequences and positions of the query tokens of a step."""

    sequences: torch.Tensor
    """int32 `[tokens]`, the number of the sequence; -1 for padding of a captured graph."""
    positions: torch.Tensor
    """int64 `[tokens]`, in the sequence; -1 for padding and for tokens before its start."""

    @classmethod
    def of(
        cls, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
    ) -> "QueryPositions":
        """From `paged_attention`'s arguments; on a GPU in one launch that a CUDA graph can capture.

        Args:
            query_start_loc: int32 `[sequences + 1]`.
            seq_lens: int32 `[sequences]`, the queries included.
            num_tokens: query tokens, perhaps more than the last sequence's.
        """
        if seq_lens.is_cuda and is_installed("triton"):
            # Here, because the import needs Triton.
            from halfbyte.attention.queries.positions_kernel import find_positions

            return cls(*find_positions(query_start_loc, seq_lens, num_tokens))
        return cls.reference(query_start_loc, seq_lens, num_tokens)

    @classmethod
    def reference(
        cls, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
    ) -> "QueryPositions":
        """`of` by PyTorch operators, on any device."""
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=seq_lens.device)
        ends = query_start_loc[1:].contiguous()
        sequences = torch.searchsorted(ends, tokens, right=True)
        is_real = sequences < seq_lens.shape[0]
        known = sequences.clamp(max=max(0, seq_lens.shape[0] - 1))
        if not seq_lens.shape[0]:
            return cls(tokens.fill_(-1), tokens.long())
        positions = seq_lens[known].long() - (ends[known] - tokens)
        is_real &= positions >= 0
        return cls(torch.where(is_real, sequences, -1).int(), torch.where(is_real, positions, -1))

    @classmethod
    def of_step(
        cls,
        plans: AttentionPlans,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        num_tokens: int,
    ) -> "QueryPositions":
        """As `of`, cached for all layers that share plans."""
        return plans.get(_Key(num_tokens), lambda: cls.of(query_start_loc, seq_lens, num_tokens))
