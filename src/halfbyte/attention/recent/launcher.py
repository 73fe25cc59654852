"""Attention to recent tokens, merged with attention to the pages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.paged.plan import Tiles, exponent_factors, triton_target
from halfbyte.attention.recent.kernel import recent_kernel
from halfbyte.kernels.formats.dot_operands import dot_operand
from halfbyte.kernels.runtime.devices import current_device
from halfbyte.kvcache.recent import RecentInputs

_MAX_TOKENS = 8
"""Max mean query tokens per sequence for the small tile."""


def choose_tiles(dtype: torch.dtype, head_size: int, prefill: bool) -> Tiles:
    """Tiles that fit the shared memory of every GPU (99 KiB) without register spills.

    Args:
        dtype: of the queries.
        head_size: max of K's and V's.
        prefill: whether to use large tiles, for many query tokens per sequence.
    """
    if dtype == torch.float32 or head_size > 256:
        return Tiles(16, 16, 4, 1)
    if not prefill:
        return Tiles(16, 32, 4, 2 if head_size <= 128 else 1)
    if head_size > 128:
        return Tiles(64, 32, 8, 2)
    return Tiles(128, 32, 8, 3)


def launch_options(tiles: Tiles, compute_capability: int) -> dict[str, Any]:
    """Triton's launch options for tiles on a compute capability."""
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if compute_capability == 90 and tiles.block_m == 128:
        # Two programs per SM, of which one loads while the other computes. With wgmma that spills
        # six registers outside the loops; with mma, whose operands are in registers, it would 25.
        options["maxnreg"] = 128
    return options


def run_with_recent(inputs: AttentionInputs, run_packed: Callable[[AttentionInputs], None]) -> None:
    """Fill `inputs.out`, and `inputs.lse` where it is not None.

    Attention to the pages runs first; its result is then merged in place.

    Args:
        inputs: of `paged_attention`, checked, all on one GPU, with `recent`.
        run_packed: attends to the pages.
    """
    recent, window = inputs.recent, inputs.sliding_window
    assert recent is not None
    packed_lse = None
    if window is None or window > recent.tokens:
        packed_lse = inputs.query.new_empty(inputs.query.shape[:2], dtype=torch.float32)
        packed = replace(inputs.packed, sinks=None, lse=packed_lse, given_out=inputs.given_out)
        run_packed(packed)
        inputs.set_output(packed.out)
    _join(inputs, recent, packed_lse)


def _join(inputs: AttentionInputs, recent: RecentInputs, packed_lse: torch.Tensor | None) -> None:
    """Merge attention to recent tokens into `inputs.out`.

    Args:
        packed_lse: float32 `[tokens, heads]`, contiguous: LSE (natural log, without sinks) of the
            result in `inputs.out`; None if `inputs.out` is empty.
    """
    layout, out = inputs.layout, inputs.out
    query, key, value = (
        x if x.stride(2) == 1 else x.contiguous() for x in (inputs.query, recent.key, recent.value)
    )
    num_tokens, num_heads, head_size = query.shape
    num_seqs, group = inputs.seq_lens.shape[0], num_heads // layout.num_kv_heads
    if not num_tokens or not num_seqs:
        return
    # Large tiles round differently.
    prefill = num_tokens > _MAX_TOKENS * num_seqs and not inputs.batch_invariant
    tiles = choose_tiles(query.dtype, max(head_size, layout.head_size_v), prefill)
    head_blocks = -(-group // tiles.block_m)
    num_tiles = num_tokens // tiles.tokens(group) + num_seqs
    score_scale, cap = exponent_factors(inputs.scale, inputs.softcap)
    # Absent tensors get any pointer; it is never read.
    with current_device(query.get_device()):
        recent_kernel[(num_tiles * layout.num_kv_heads * head_blocks,)](
            query=query,
            keys=recent.keys,
            values=recent.values,
            entries=recent.entries.contiguous(),
            key=key,
            value=value,
            starts=inputs.query_start_loc.contiguous(),
            lengths=inputs.seq_lens.contiguous(),
            packed_lse=out if packed_lse is None else packed_lse,
            sinks=out if inputs.sinks is None else inputs.sinks.contiguous(),
            out=out,
            lse=out if inputs.lse is None else inputs.lse,
            score_scale=score_scale,
            cap=cap,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            reach=min(inputs.sliding_window or recent.tokens, recent.tokens),
            query_token=query.stride(0),
            query_head=query.stride(1),
            key_token=key.stride(0),
            key_head=key.stride(1),
            value_token=value.stride(0),
            value_head=value.stride(1),
            out_token=out.stride(0),
            out_head=out.stride(1),
            kv_heads=layout.num_kv_heads,
            group=group,
            ring=recent.keys.shape[2],
            head_size=head_size,
            head_size_v=layout.head_size_v,
            padded=_padded(head_size),
            padded_v=_padded(layout.head_size_v),
            operand=dot_operand(query.dtype, interpreted=not query.is_cuda),
            capped=bool(inputs.softcap),
            joins=packed_lse is not None,
            has_sinks=inputs.sinks is not None,
            has_lse=inputs.lse is not None,
            apart=prefill,
            block_m=tiles.block_m,
            block_n=tiles.block_n,
            **launch_options(tiles, triton_target(query.device).compute_capability),
        )


def _padded(head_size: int) -> int:
    """Columns of a tile: a power of two, at least 16 (Triton's min for `tl.dot`)."""
    return max(16, 1 << (head_size - 1).bit_length())
