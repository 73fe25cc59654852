"""Attention to the last tokens and to the pages, joined."""

import math
from dataclasses import replace

import torch

from halfbyte.attention.base import AttentionBackend, AttentionInputs, AttentionPlans
from halfbyte.attention.paged.plan import exponent_factors
from halfbyte.attention.prefill.combine import combine
from halfbyte.attention.queries.launcher import TransformedQuery
from halfbyte.attention.recent.kernel import recent_kernel
from halfbyte.kernels.formats.dot_operands import dot_operand
from halfbyte.kernels.runtime.devices import current_device
from halfbyte.kvcache.recent import RecentInputs, packed_part

_LN2 = math.log(2.0)


def is_large(dtype: torch.dtype, head_size: int) -> bool:
    """Whether tiles of usual sizes find no room in the shared memory of every GPU."""
    return dtype == torch.float32 or head_size > 256


def tile_of_keys(is_wide: bool) -> dict[str, int]:
    """Keys that a program takes at a time, and how many such tiles are under way."""
    return {"block_n": 16 if is_wide else 32, "num_stages": 1 if is_wide else 2}


def without_recent(inputs: AttentionInputs, recent: RecentInputs) -> AttentionInputs:
    """The same work on what is read from the pages; its output is its own."""
    window = inputs.sliding_window
    key = ("lengths of what is packed", recent.tokens, window or 0)
    lengths, packed_window = inputs.plans.get(
        key, lambda: packed_part(recent.tokens, inputs.seq_lens, window or 0)
    )
    return replace(
        inputs,
        seq_lens=lengths,
        sliding_window=packed_window or None,
        given_out=None,
        plans=inputs.plans.get(("packed", *key), AttentionPlans),
        recent=None,
    )


def attend_with_recent(inputs: AttentionInputs, backend: type[AttentionBackend]) -> None:
    """Fill `inputs.out`, and `inputs.lse` where it is not None.

    Args:
        inputs: of `paged_attention`, checked, all on one GPU, with `recent`.
        backend: for the pages.
    """
    recent = inputs.recent
    assert recent is not None
    out, lse = attend_recent(inputs, recent)
    parts = [(out, lse.t() * _LN2)]
    window = inputs.sliding_window
    if window is None or window > recent.tokens:
        rows = inputs.query.new_empty(inputs.query.shape[:2], dtype=torch.float32)
        packed = replace(without_recent(inputs, recent), sinks=None, lse=rows)
        backend.forward(packed)
        parts.append((packed.out, rows.t()))
    combine(parts, inputs.sinks, inputs.out, inputs.lse)


def attend_recent(
    inputs: AttentionInputs, recent: RecentInputs, made: TransformedQuery | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query to its last tokens alone, without sinks.

    Args:
        made: adds a first token that is none of the page's.

    Returns:
        float32 `[tokens, heads, Dv]` and log2 of the softmax denominators `[tokens, heads]`; rows
        past the last sequence's are undefined.
    """
    query, layout = inputs.query, inputs.layout
    query = query if query.stride(2) == 1 else query.contiguous()
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (recent.key, recent.value))
    num_tokens, num_heads, head_size = query.shape
    out = query.new_empty((num_tokens, num_heads, layout.head_size_v), dtype=torch.float32)
    lse = query.new_empty((num_tokens, num_heads), dtype=torch.float32)
    num_seqs = inputs.seq_lens.shape[0]
    if not num_tokens or not num_seqs:
        return out, lse
    group = num_heads // layout.num_kv_heads
    is_wide = is_large(query.dtype, max(head_size, layout.head_size_v))
    # Larger heads leave no registers for more rows; and other tiles may round differently.
    many = num_tokens > 8 * num_seqs and not inputs.batch_invariant and not is_wide
    block_m = 64 if many and max(head_size, layout.head_size_v) <= 128 else 16
    heads_per_tile = min(group, block_m)
    tiles = num_tokens // (block_m // heads_per_tile) + num_seqs
    window = inputs.sliding_window or recent.tokens
    sizes = (head_size, layout.head_size_v)
    first = (None,) * 3 if made is None else made[2:5]
    with current_device(query.get_device()):
        recent_kernel[(tiles, layout.num_kv_heads * -(-group // heads_per_tile))](
            query,
            recent.keys,
            recent.values,
            recent.entries.contiguous(),
            key,
            value,
            inputs.query_start_loc.contiguous(),
            inputs.seq_lens.contiguous(),
            *(lse if x is None else x for x in first),
            out,
            lse,
            *exponent_factors(inputs.scale, inputs.softcap),
            num_seqs,
            num_tokens,
            min(window, recent.tokens),
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            kv_heads=layout.num_kv_heads,
            group=group,
            ring=recent.keys.shape[2],
            head_size=head_size,
            head_size_v=layout.head_size_v,
            padded=max(16, 1 << (sizes[0] - 1).bit_length()),
            padded_v=max(16, 1 << (sizes[1] - 1).bit_length()),
            operand=dot_operand(query.dtype, interpreted=not query.is_cuda),
            capped=bool(inputs.softcap),
            knows_first=first[0] is not None,
            block_m=block_m,
            **tile_of_keys(is_wide),
        )
    return out, lse
