"""Prefill with a sliding window: the keys that the window leaves, unpacked, and FlashAttention.

Queries see few of the cached tokens, so that only those are unpacked, and sequences lie one behind
the other: one call of PyTorch's FlashAttention takes all that the workspace has room for. Its
causal mask and its window count from the last query and the last key.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from halfbyte.attention.base import AttentionInputs

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, `[rows, heads, D]` each."""


class Chunk(NamedTuple):
    """New tokens of a sequence, and the keys that they see."""

    sequence: int
    query_begin: int
    """Row of the query."""
    queries: int
    key_begin: int
    """Position in the sequence."""
    key_end: int

    @property
    def keys(self) -> int:
        """How many."""
        return self.key_end - self.key_begin


@dataclass(frozen=True)
class WindowedChunks:
    """Chunks whose queries follow each other, no two of the same sequence."""

    query_begin: int
    queries: int
    keys: int
    sequences: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor
    """Of the workspace, where each chunk's keys begin; and the end of all, in one more element."""
    query_starts: torch.Tensor
    """The same of the queries."""
    most_queries: int
    """Of a chunk."""
    most_keys: int

    @classmethod
    def of(cls, chunks: list[Chunk], device: torch.device) -> "WindowedChunks":
        """What kernels are told of chunks."""
        queries, keys = [c.queries for c in chunks], [c.keys for c in chunks]
        query_starts, rows = (list(accumulate(x, initial=0)) for x in (queries, keys))
        # One transfer.
        columns = (
            [c.sequence for c in chunks],
            [c.key_begin for c in chunks],
            [c.key_end for c in chunks],
            rows,
            query_starts,
        )
        numbers = torch.tensor([x for column in columns for x in column], dtype=torch.int32)
        on_device = numbers.to(device).split([len(column) for column in columns])
        sequences, begins, ends, rows_there, starts_there = on_device
        return cls(
            query_begin=chunks[0].query_begin,
            queries=sum(queries),
            keys=sum(keys),
            sequences=sequences,
            begins=begins,
            ends=ends,
            rows=rows_there,
            query_starts=starts_there,
            most_queries=max(queries),
            most_keys=max(keys),
        )


def windowed_chunks(
    sequences: Iterable[tuple[int, int, int, int]],
    window: int,
    most_keys: int,
    most_queries: int,
    device: torch.device,
) -> list[WindowedChunks]:
    """Chunks to be attended to together, so that keys and results fit.

    Args:
        sequences: index, first row of the query, new tokens and length of each, in order.
        window: as of `paged_attention`, at most half of `most_keys`.
        most_keys: that the workspace holds.
        most_queries: whose results fit.
        device: of the tensors.
    """
    most_queries = min(most_queries, most_keys - window + 1)
    groups: list[list[Chunk]] = []
    for chunk in _chunks(sequences, window, most_queries):
        group = groups[-1] if groups else []
        follows = group and chunk.query_begin == group[-1].query_begin + group[-1].queries
        if (
            follows
            and chunk.sequence != group[-1].sequence
            and sum(c.keys for c in group) + chunk.keys <= most_keys
            and sum(c.queries for c in group) + chunk.queries <= most_queries
        ):
            group.append(chunk)
        else:
            groups.append([chunk])
    return [WindowedChunks.of(group, device) for group in groups]


def _chunks(
    sequences: Iterable[tuple[int, int, int, int]], window: int, most_queries: int
) -> Iterator[Chunk]:
    for sequence, row, new, length in sequences:
        for begin in range(0, new, most_queries):
            queries = min(most_queries, new - begin)
            position = length - new + begin
            first = max(0, position - window + 1)
            yield Chunk(sequence, row + begin, queries, first, position + queries)


def attend_windowed(inputs: AttentionInputs, chunks: WindowedChunks, window: int) -> None:
    """Write the chunks' rows of the output, and of the LSE where it is asked for."""
    from halfbyte.kernels.combine import combine
    from halfbyte.kernels.unpack import unpack_tokens

    layout = inputs.layout
    shape = (chunks.keys, layout.num_kv_heads, layout.head_size)
    key, value = inputs.query.new_empty(shape), inputs.query.new_empty(shape)
    unpack_tokens(
        inputs.pages,
        layout,
        inputs.block_tables[chunks.sequences],
        chunks.begins,
        chunks.ends,
        chunks.rows[:-1],
        inputs.k_scale,
        inputs.v_scale,
        key,
        value,
        max_tokens=chunks.most_keys,
    )
    at = slice(chunks.query_begin, chunks.query_begin + chunks.queries)
    attend = _flash if inputs.query.is_cuda else _flash_on_cpu
    out, logs = attend((inputs.query[at], key, value), chunks, window, inputs.scale)
    whole = chunks.queries == inputs.query.shape[0]
    if whole and inputs.sinks is None and inputs.lse is None:
        inputs.answer(out)
        return
    lse = None if inputs.lse is None else inputs.lse[at]
    combine([(out, logs)], inputs.sinks, inputs.out[at], lse)


def _flash(
    parts: _Parts, chunks: WindowedChunks, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[queries, heads, D]` and log-denominators `[heads, queries]`."""
    out, logs, *_ = torch.ops.aten._flash_attention_forward(
        *parts,
        chunks.query_starts,
        chunks.rows,
        chunks.most_queries,
        chunks.most_keys,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=window - 1,
        window_size_right=0,
    )
    return out, logs


def _flash_on_cpu(
    parts: _Parts, chunks: WindowedChunks, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, chunk by chunk."""
    query, key, value = parts
    outs, logs = [], []
    queries, keys = chunks.query_starts.diff().tolist(), chunks.rows.diff().tolist()
    group = query.shape[1] // key.shape[1]
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        behind = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(len(k))
        mask = torch.where((behind >= 0) & (behind < window), 0.0, -torch.inf).to(q.dtype)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        out, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, scale=scale
        )
        outs.append(out[0].transpose(0, 1))
        logs.append(log[0])
    return torch.cat(outs), torch.cat(logs, 1)
