"""Merges attention results over several sets of keys.

With part i's output `o_i` and log-denominator `l_i`, the output is `sum(exp(l_i - l) * o_i)` where
`l = log(sum(exp(l_i)))`; a sink is one more term of the sum without a value (Rabe & Staats 2021,
"Self-attention Does Not Need O(n^2) Memory").
"""

# Triton's functions have no annotations that mypy could read.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from halfbyte.attention.prefill.plan import MAX_PARTS
from halfbyte.kernels.runtime.devices import current_device

_OF_PARTS = [f"l{i}{suffix}" for i in range(MAX_PARTS) for suffix in ("", "_stride_head")]


# What changes per batch must not trigger recompilation: numbers, and the alignment of logs.
@triton.jit(do_not_specialize=["num_rows", "lse", *_OF_PARTS])
def combine_kernel(
    out,
    out_stride_row,
    out_stride_head,
    lse,
    lse_stride_row,
    sinks,
    o0,
    o1,
    o2,
    o3,
    l0,
    l1,
    l2,
    l3,
    l0_stride_head,
    l1_stride_head,
    l2_stride_head,
    l3_stride_head,
    num_rows,
    num_heads: tl.constexpr,
    head_size: tl.constexpr,
    num_parts: tl.constexpr,
    has_sinks: tl.constexpr,
    wants_lse: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_HEADS: tl.constexpr,  # noqa: N803
    BLOCK_DIMS: tl.constexpr,  # noqa: N803
):
    """BLOCK_ROWS rows of `[num_rows, num_heads, head_size]`, BLOCK_HEADS heads of each."""
    pairs = tl.arange(0, BLOCK_ROWS * BLOCK_HEADS)
    row = (tl.program_id(0) * BLOCK_ROWS + pairs // BLOCK_HEADS).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + pairs % BLOCK_HEADS
    dims = tl.arange(0, BLOCK_DIMS)
    valid = (row < num_rows) & (heads < num_heads)
    mask = valid[:, None] & (dims < head_size)[None, :]
    at = (row * num_heads + heads)[:, None] * head_size + dims[None, :]
    top = tl.full(pairs.shape, -float("inf"), tl.float32)
    if has_sinks:
        sink = tl.load(sinks + heads, mask=valid, other=-float("inf")).to(tl.float32)
        top = sink
    logs0 = tl.load(l0 + heads * l0_stride_head + row, mask=valid, other=-float("inf"))
    top = tl.maximum(top, logs0)
    if num_parts > 1:
        logs1 = tl.load(l1 + heads * l1_stride_head + row, mask=valid, other=-float("inf"))
        top = tl.maximum(top, logs1)
    if num_parts > 2:
        logs2 = tl.load(l2 + heads * l2_stride_head + row, mask=valid, other=-float("inf"))
        top = tl.maximum(top, logs2)
    if num_parts > 3:
        logs3 = tl.load(l3 + heads * l3_stride_head + row, mask=valid, other=-float("inf"))
        top = tl.maximum(top, logs3)
    top = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp(logs0 - top)
    total = weight
    result = weight[:, None] * tl.load(o0 + at, mask=mask, other=0.0).to(tl.float32)
    if num_parts > 1:
        weight = tl.exp(logs1 - top)
        total += weight
        result += weight[:, None] * tl.load(o1 + at, mask=mask, other=0.0).to(tl.float32)
    if num_parts > 2:
        weight = tl.exp(logs2 - top)
        total += weight
        result += weight[:, None] * tl.load(o2 + at, mask=mask, other=0.0).to(tl.float32)
    if num_parts > 3:
        weight = tl.exp(logs3 - top)
        total += weight
        result += weight[:, None] * tl.load(o3 + at, mask=mask, other=0.0).to(tl.float32)
    if has_sinks:
        total += tl.exp(sink - top)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (row * out_stride_row + heads * out_stride_head)[:, None] + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
    if wants_lse:
        tl.store(lse + row * lse_stride_row + heads, top + tl.log(total), mask=valid)


def combine(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write the attention output over the keys of all parts.

    Args:
        parts: per set of keys the output, float `[rows, heads, D]`, and the natural log of its
            softmax denominators, float32 `[heads, rows]`.
        sinks: `[heads]` logits that join the denominators, or None.
        out: float `[rows, heads, D]`, written; the last dimension contiguous.
        lse: float32 `[rows, heads]`, written, sinks included; contiguous heads; or None.
    """
    rows, num_heads, head_size = out.shape
    parts = [(o.contiguous(), log if log.stride(1) == 1 else log.contiguous()) for o, log in parts]
    while len(parts) > MAX_PARTS:
        parts = [*parts[MAX_PARTS:], join(parts[:MAX_PARTS])]
    sinks = None if sinks is None else sinks.contiguous()
    outs = [o for o, _ in parts] + [parts[0][0]] * (MAX_PARTS - len(parts))
    all_logs = [log for _, log in parts] + [parts[0][1]] * (MAX_PARTS - len(parts))
    block_dims = triton.next_power_of_2(head_size)
    # Logs of 8 rows of a head are a 32-byte sector. A thread has 32 values.
    block_rows = 8
    values_of_head = block_rows * block_dims
    block_heads = min(triton.next_power_of_2(num_heads), max(1, 4096 // values_of_head))
    with current_device(out.get_device()):
        combine_kernel[triton.cdiv(rows, block_rows), triton.cdiv(num_heads, block_heads)](
            out=out,
            out_stride_row=out.stride(0),
            out_stride_head=out.stride(1),
            lse=out if lse is None else lse,
            lse_stride_row=0 if lse is None else lse.stride(0),
            sinks=out if sinks is None else sinks,
            **{f"o{i}": o for i, o in enumerate(outs)},
            **{f"l{i}": log for i, log in enumerate(all_logs)},
            **{f"l{i}_stride_head": log.stride(0) for i, log in enumerate(all_logs)},
            num_rows=rows,
            num_heads=num_heads,
            head_size=head_size,
            num_parts=len(parts),
            has_sinks=sinks is not None,
            wants_lse=lse is not None,
            BLOCK_ROWS=block_rows,
            BLOCK_HEADS=block_heads,
            BLOCK_DIMS=block_dims,
        )


def join(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge parts, as of `combine`, into one part in float32."""
    rows, num_heads, _ = parts[0][0].shape
    out = torch.empty(parts[0][0].shape, dtype=torch.float32, device=parts[0][0].device)
    logs = torch.empty((rows, num_heads), dtype=torch.float32, device=out.device)
    combine(parts, None, out, logs)
    return out, logs.t().contiguous()
