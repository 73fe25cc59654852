"""Attention to recent tokens, merged with attention to the pages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfbyte.attention.base import AttentionInputs, ResultBySequence
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


def run_with_recent(
    inputs: AttentionInputs,
    run_packed: Callable[[AttentionInputs], ResultBySequence | None],
) -> None:
    """Fill `inputs.out`, and `inputs.lse` where it is not None.

    Attention to the pages runs first; then its result is merged with attention to recent tokens.

    Args:
        inputs: of `paged_attention`, checked, all on one GPU, with `recent`.
        run_packed: attends to the pages; fills output and LSE, or returns where its result is.
    """
    recent, window = inputs.recent, inputs.sliding_window
    assert recent is not None
    result = None
    if window is None or window > recent.tokens:
        lse = inputs.query.new_empty(inputs.query.shape[:2], dtype=torch.float32)
        packed = replace(inputs.packed, sinks=None, lse=lse, given_out=inputs.given_out)
        by_sequence = run_packed(packed)
        if by_sequence is None:
            inputs.set_output(packed.out)
            result = _Packed.in_place(packed.out, lse)
        else:
            result = _Packed.of(by_sequence)
    _join(inputs, recent, result)


@dataclass(frozen=True)
class _Packed:
    """Attention to the pages, as `recent_kernel` reads it.

    Args:
        out, lse: as of `ResultBySequence`; if not `by_sequence`, of one sequence of all tokens.
    """

    out: torch.Tensor
    lse: torch.Tensor
    by_sequence: bool

    @classmethod
    def in_place(cls, out: torch.Tensor, lse: torch.Tensor) -> "_Packed":
        """Of `[tokens, heads, Dv]` and `[tokens, heads]`."""
        return cls(out[None], lse.t()[None], False)

    @classmethod
    def of(cls, result: ResultBySequence) -> "_Packed":
        """Of a result by sequence."""
        return cls(*result, True)

    def arguments(self) -> dict[str, Any]:
        """Of `recent_kernel`."""
        names = ("sequence", "token", "head")
        of_logs = dict(zip(("sequence", "head", "token"), self.lse.stride(), strict=True))
        return {
            "packed": self.out,
            "packed_lse": self.lse,
            "packed_tokens": self.out.shape[1],
            **{f"packed_{n}": s for n, s in zip(names, self.out.stride()[:3], strict=True)},
            **{f"log_{n}": s for n, s in of_logs.items()},
            "joins": True,
            "by_sequence": self.by_sequence,
        }


def _nothing_packed(any_tensor: torch.Tensor) -> dict[str, Any]:
    """Arguments of `recent_kernel` without attention to the pages."""
    strides = [f"{x}_{n}" for x in ("packed", "log") for n in ("sequence", "token", "head")]
    return {
        "packed": any_tensor,
        "packed_lse": any_tensor,
        **dict.fromkeys(("packed_tokens", *strides), 0),
        "joins": False,
        "by_sequence": False,
    }


def _join(inputs: AttentionInputs, recent: RecentInputs, packed: _Packed | None) -> None:
    """Write attention to all tokens to `inputs.out`.

    Args:
        packed: attention to the pages; None if no token there is visible.
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
            **_nothing_packed(out) if packed is None else packed.arguments(),
            kv_heads=layout.num_kv_heads,
            group=group,
            ring=recent.keys.shape[2],
            head_size=head_size,
            head_size_v=layout.head_size_v,
            padded=_padded(head_size),
            padded_v=_padded(layout.head_size_v),
            operand=dot_operand(query.dtype, interpreted=not query.is_cuda),
            capped=bool(inputs.softcap),
            has_sinks=inputs.sinks is not None,
            has_lse=inputs.lse is not None,
            two_loops=prefill,
            block_m=tiles.block_m,
            block_n=tiles.block_n,
            **launch_options(tiles, triton_target(query.device).compute_capability),
        )


def _padded(head_size: int) -> int:
    """Columns of a tile: a power of two, at least 16 (Triton's min for `tl.dot`)."""
    return max(16, 1 << (head_size - 1).bit_length())
