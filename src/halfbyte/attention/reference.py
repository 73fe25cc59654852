"""Reference attention: pure PyTorch, float32 accumulation, one sequence at a time.

It is the oracle of every kernel and runs anywhere, on every format. It reads exactly the tokens
that a query may attend to, so unwritten slots have no effect. Nor has a NaN in V of a masked
token: its weight is 0, and 0 times NaN is NaN, so sequences with NaN in V are computed query by
query.
"""

from typing import ClassVar

import torch

from halfbyte.attention.base import AttentionBackend, AttentionConfig, AttentionInputs
from halfbyte.dispatch import Answer
from halfbyte.kvcache import read_tokens
from halfbyte.kvcache.recent import RecentInputs

_MAX_SCORES = 2**25
"""Scores (heads x queries x keys) held at once: 128 MiB in float32."""


class ReferenceAttention(AttentionBackend):
    """Reads through `read_tokens`; batch-invariant rows depend on nothing but their own keys."""

    name: ClassVar[str] = "reference"
    takes_transforms: ClassVar[bool] = True
    takes_every_batch: ClassVar[bool] = True
    takes_recent: ClassVar[bool] = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Always."""
        return True, "runs wherever PyTorch does"

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """Always."""
        return True, "every format, head size and option"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`."""
        starts = inputs.query_start_loc.tolist()
        lengths = inputs.seq_lens.tolist()
        block_size = inputs.layout.block_size
        reach = 0 if inputs.recent is None else inputs.recent.tokens
        for i, length in enumerate(lengths):
            begin, end = starts[i], starts[i + 1]
            if begin == end:
                continue
            first = first_key(length - (end - begin), inputs.sliding_window)
            positions = torch.arange(first, length, device=inputs.pages.device)
            table = inputs.block_tables[i].long()
            slots = table[positions // block_size] * block_size + positions % block_size
            key, value = read_tokens(
                inputs.pages,
                slots,
                inputs.layout,
                inputs.k_scale,
                inputs.v_scale,
                transform=inputs.transform,
                positions=positions,
            )
            exact = None
            if inputs.recent is not None:
                exact = _recent_rows(inputs.recent, i, slice(begin, end), positions)
            one_by_one = inputs.batch_invariant or not bool(value.isfinite().all())
            count = 1 if one_by_one else end - begin
            for row in range(begin, end, count):
                rows, position = slice(row, row + count), length - (end - row)
                oldest = first_key(position, inputs.sliding_window)
                keys = slice(oldest - first, max(0, position + count - first))
                attend(
                    inputs.query[rows],
                    key[keys],
                    value[keys],
                    query_positions=torch.arange(position, position + count, device=key.device),
                    key_positions=positions[keys],
                    scale=inputs.scale,
                    sliding_window=inputs.sliding_window,
                    sinks=inputs.sinks,
                    softcap=inputs.softcap,
                    out=inputs.out[rows],
                    lse=None if inputs.lse is None else inputs.lse[rows],
                    recent=None if exact is None else (exact[0][keys], exact[1][keys], reach),
                )


def _recent_rows(
    recent: RecentInputs, seq: int, rows: slice, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence at some positions up to its last, float32; 0 where not recent.

    Args:
        rows: of the step's tokens.
        positions: int64 `[m]`, ascending by one, to the end of the sequence.
    """
    found = []
    count, new = len(positions), rows.stop - rows.start
    for ring, own in ((recent.keys, recent.key), (recent.values, recent.value)):
        result = torch.zeros((count, *own.shape[1:]), device=own.device)
        kept = min(new, count)
        result[count - kept :] = own[rows][new - kept :].float()
        old = min(count - kept, recent.tokens - 1)
        at = slice(count - kept - old, count - kept)
        slots = positions[at] % ring.shape[2]
        result[at] = ring[int(recent.entries[seq])][:, slots].transpose(0, 1).float()
        found.append(result)
    return found[0], found[1]


def first_key(first_query: int, sliding_window: int | None) -> int:
    """Position of the oldest key that a query at `first_query` or later may attend to."""
    if sliding_window is None:
        return 0
    return max(0, first_query - sliding_window + 1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    recent: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> None:
    """Causal attention of one sequence on unpacked K and V, in float32.

    Args:
        query: `[n, heads, D]`, any float dtype.
        key, value: float32 `[m, kv_heads, D]` and `[m, kv_heads, Dv]`.
        query_positions, key_positions: int64 `[n]` and `[m]`, ascending.
        scale: multiplies the dot products.
        sliding_window: attends to `q - k < sliding_window`; None for all earlier keys.
        sinks: `[heads]` logits that take part in the softmax and contribute no value.
        softcap: scores become `softcap * tanh(score / softcap)`, before masks and sinks.
        out: `[n, heads, Dv]`, written; rows that may attend to nothing become 0.
        lse: float32 `[n, heads]`, written: natural log of the softmax denominator, sink included;
            -inf for rows that may attend to nothing and have no sink.
        recent: `(key, value, reach)`, of the same shapes: used instead of `key` and `value` for
            queries less than `reach` tokens after the key.
    """
    num_queries, num_heads, _ = query.shape
    kv_heads = key.shape[1]
    group = num_heads // kv_heads
    keys = key.permute(1, 2, 0)  # [kv_heads, D, m]
    values = value.transpose(0, 1)  # [kv_heads, m, Dv]
    block = max(1, _MAX_SCORES // max(1, num_heads * key.shape[0]))
    for begin in range(0, num_queries, block):
        rows = slice(begin, min(begin + block, num_queries))
        q = query[rows].float().unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
        distance = query_positions[rows, None] - key_positions[None, :]
        scores = torch.matmul(q.flatten(1, 2), keys)
        if recent is not None:
            is_recent = (distance < recent[2]).repeat(group, 1)  # [group * rows, m]
            nearer = torch.matmul(q.flatten(1, 2), recent[0].permute(1, 2, 0))
            scores = torch.where(is_recent, nearer, scores)
        scores = scores.mul_(scale)
        scores = scores.unflatten(1, (group, q.shape[2]))  # [kv_heads, group, rows, m]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        hidden = distance < 0
        if sliding_window is not None:
            hidden = hidden | (distance >= sliding_window)
        scores = scores.masked_fill(hidden, -torch.inf)
        sink = None if sinks is None else sinks.float().view(kv_heads, group, 1, 1)
        weights, denominator_log = _softmax(scores, sink)
        flat = weights.flatten(1, 2)
        if recent is None:
            result = torch.matmul(flat, values)
        else:
            result = torch.matmul(flat.masked_fill(is_recent, 0.0), values)
            result += torch.matmul(flat.masked_fill(~is_recent, 0.0), recent[1].transpose(0, 1))
        result = result.unflatten(1, (group, q.shape[2])).permute(2, 0, 1, 3).flatten(1, 2)
        out[rows] = result.to(out.dtype)
        if lse is not None:
            lse[rows] = denominator_log.permute(2, 0, 1).flatten(1)


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights over the last dimension and the log of their denominator; no NaN for empty rows."""
    if sink is not None:
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return (weights if sink is None else weights[..., :-1]), lse
