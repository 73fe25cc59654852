"""`paged_attention`: validates its arguments; `router` chooses the backend."""

import os
from functools import partial
from typing import Literal, overload

import numpy as np
import torch

from halfbyte.attention.base import AttentionInputs, AttentionPlans
from halfbyte.attention.cpu import lengths_fit
from halfbyte.attention.router import run
from halfbyte.kvcache.recent import RecentInputs
from halfbyte.kvcache.store import NewTokens
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import KVCacheDType, PageLayout
from halfbyte.layouts.arguments import check_tensors, float32_number, integer
from halfbyte.layouts.page_layout import check_layout

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@overload
def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    *,
    layout: PageLayout,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    out: torch.Tensor | None = None,
    plans: AttentionPlans | None = None,
    transform: KVTransform | None = None,
    recent: RecentInputs | None = None,
    new: NewTokens | None = None,
) -> torch.Tensor: ...


@overload
def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    *,
    layout: PageLayout,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    return_lse: Literal[True],
    backend: str | None = None,
    out: torch.Tensor | None = None,
    plans: AttentionPlans | None = None,
    transform: KVTransform | None = None,
    recent: RecentInputs | None = None,
    new: NewTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    *,
    layout: PageLayout,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    out: torch.Tensor | None = None,
    plans: AttentionPlans | None = None,
    transform: KVTransform | None = None,
    recent: RecentInputs | None = None,
    new: NewTokens | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a ragged batch on packed pages.

    The queries of a sequence are its last tokens, whose K and V are in the cache, or `new`: query i
    of n, of a sequence of length L, stands at position L - n + i and attends to keys up to itself.

    Args:
        query: float `[tokens, heads, head_size]`; sequence s owns rows query_start_loc[s] up to
            query_start_loc[s + 1]. Heads are a multiple of the layout's KV heads.
        pages: uint8 `[num_pages, page_stride]`.
        layout: of `pages`.
        query_start_loc: int32 `[sequences + 1]`, ascending from 0 to `tokens`. On a GPU more tokens
            may follow, which pad a captured graph; their rows of the output are undefined.
        seq_lens: int32 `[sequences]`, tokens in the cache, the queries included. A sequence shorter
            than its queries (padding of a captured graph) leaves 0 in rows that attend to nothing.
        block_tables: int32 `[sequences, max_pages]`, page numbers in order of tokens. Entries
            before the window are not attended to, but must still be valid page numbers.
        scale: multiplies the dot products, usually `head_size ** -0.5`.
        k_scale, v_scale: global scales, floats or float32 scalar tensors; formats without a
            global scale ignore them.
        sliding_window: w: a query at position i attends to keys at positions j with `i - j < w`;
            None for no window.
        sinks: `[heads]` learned logits that join every row's softmax denominator; finite, or -inf
            for heads that have none.
        softcap: scores become `softcap * tanh(score / softcap)`; from 1e-30 to 1e30, None or 0 for
            none.
        batch_invariant: a row is bitwise the same whatever else is in the batch.
        return_lse: also return the log of the softmax denominators.
        backend: a name of `ATTENTION_BACKENDS`, or None to choose.
        out: `[tokens, heads, head_size_v]`, written; its elements must not share memory.
        plans: shared by the calls of a step, so that plans, which depend on lengths only, are made
            once.
        transform: how K was changed before it was packed; the one that it was stored with.
        recent: recent tokens in the model's dtype, read instead of those in the pages.
        new: tokens to store in the pages first, as `reshape_and_cache` does; by default all are
            there. With `recent`, attention may start before the store has ended. So `new` must
            hold exactly the tokens that `query` holds, and their slots must be in pages that no
            other sequence of the batch reads.

    Returns:
        `[tokens, heads, head_size_v]` of the query's dtype; with `return_lse` a pair with float32
        `[tokens, heads]` (natural logarithm, sinks included, -inf for rows that attend to nothing).

    Raises:
        ValueError: arguments that do not fit each other, or a backend that cannot do the work.
    """
    optional = {name: x for name, x in (("sinks", sinks), ("out", out)) if x is not None}
    check_layout(layout)
    check_tensors(
        query=query,
        pages=pages,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        **optional,
    )
    inputs = AttentionInputs(
        query=query,
        pages=pages,
        layout=layout,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        scale=float32_number("scale", scale),
        k_scale=_global_scale("k_scale", k_scale, layout.k_dtype, query.device),
        v_scale=_global_scale("v_scale", v_scale, layout.v_dtype, query.device),
        sliding_window=_window(sliding_window, _capacity(block_tables, layout)),
        sinks=sinks,
        softcap=None if softcap is None else float32_number("softcap", softcap) or None,
        batch_invariant=batch_invariant,
        given_out=out,
        lse=query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None,
        plans=AttentionPlans() if plans is None else plans,
        transform=transform,
        recent=recent,
    )
    _check(inputs)
    store = None
    if new is not None and len(new.slot_mapping):
        store = partial(new.store, pages, layout, k_scale, v_scale, transform)
    run(inputs, backend, store)
    result = inputs.copy_to_out()
    return result if inputs.lse is None else (result, inputs.lse)


def _window(window: int | None, max_tokens: int) -> int | None:
    """The window, or None if it is as long as the longest possible sequence."""
    if window is None:
        return None
    window = integer("sliding_window", window)
    if window <= 0:
        raise ValueError(f"sliding_window: expected at least 1, got {window}")
    return window if window < max_tokens else None


def _capacity(block_tables: torch.Tensor, layout: PageLayout) -> int:
    """Tokens that a sequence can have; the shape of `block_tables` is checked later."""
    return block_tables.shape[-1] * layout.block_size if block_tables.dim() else 0


def _global_scale(
    name: str, scale: float | torch.Tensor, dtype: KVCacheDType, device: torch.device
) -> float | torch.Tensor:
    """A number, or a tensor on the device; 1 for formats without a global scale."""
    checked = dtype.check_scale_on_host(scale, name)
    if not isinstance(checked, torch.Tensor):
        return checked
    if checked.device.type == "cpu" and device.type != "cpu":
        # Filled from its value: a copy to the GPU would sync, and fail in a graph capture.
        return torch.full((), float(checked), dtype=torch.float32, device=device)
    return checked.to(device)


def _check(inputs: AttentionInputs) -> None:
    query, layout = inputs.query, inputs.layout
    layout.check_pages(inputs.pages)
    if query.dim() != 3 or query.shape[2] != layout.head_size or query.dtype not in _DTYPES:
        raise ValueError(
            f"query: expected float [tokens, heads, {layout.head_size}], "
            f"got {query.dtype} {tuple(query.shape)}"
        )
    if query.shape[1] == 0 or query.shape[1] % layout.num_kv_heads:
        raise ValueError(
            f"query: {query.shape[1]} heads are not a multiple of {layout.num_kv_heads} KV heads"
        )
    if inputs.seq_lens.dim() != 1:
        raise ValueError(f"seq_lens: expected one dimension, got {tuple(inputs.seq_lens.shape)}")
    num_seqs = inputs.seq_lens.shape[0]
    max_pages = inputs.block_tables.shape[-1] if inputs.block_tables.dim() else 0
    for name, tensor, shape in (
        ("query_start_loc", inputs.query_start_loc, (num_seqs + 1,)),
        ("seq_lens", inputs.seq_lens, (num_seqs,)),
        ("block_tables", inputs.block_tables, (num_seqs, max_pages)),
    ):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: expected int32 {shape} for {num_seqs} sequences, "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
    out, expected_out = inputs.given_out, (*query.shape[:2], layout.head_size_v)
    if out is not None and (tuple(out.shape) != expected_out or not out.is_floating_point()):
        raise ValueError(f"out: expected float {expected_out}, got {out.dtype} {tuple(out.shape)}")
    if out is not None and any(size > 1 and not out.stride(i) for i, size in enumerate(out.shape)):
        raise ValueError(f"out: expected elements that share no memory, got strides {out.stride()}")
    if inputs.sinks is not None and tuple(inputs.sinks.shape) != (query.shape[1],):
        raise ValueError(f"sinks: expected [{query.shape[1]}], got {tuple(inputs.sinks.shape)}")
    # On the CPU only: the check must not sync the GPU.
    if inputs.sinks is not None and not inputs.sinks.is_cuda and inputs.sinks.isnan().any():
        raise ValueError("sinks: expected logits or -inf, got NaN")
    if inputs.softcap is not None and not 1e-30 <= inputs.softcap <= 1e30:
        raise ValueError(f"softcap: expected a number from 1e-30 to 1e30, got {inputs.softcap}")
    if inputs.recent is not None:
        _check_recent(inputs, inputs.recent)
    for name in ("pages", "query_start_loc", "seq_lens", "block_tables", "sinks", "given_out"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.device != query.device:
            label = name.removeprefix("given_")
            raise ValueError(f"{label}: is on {tensor.device}, query is on {query.device}")
    if query.device.type == "cpu" or os.environ.get("HALFBYTE_DEBUG") == "1":
        _check_values(inputs)


def _check_recent(inputs: AttentionInputs, recent: RecentInputs) -> None:
    layout, ring = inputs.layout, recent.keys.shape[2] if recent.keys.dim() == 4 else 0
    num_entries, num_seqs = len(recent.keys), inputs.seq_lens.shape[0]
    heads, sizes = layout.num_kv_heads, (layout.head_size, layout.head_size_v)
    for name, tensor, shape in (
        ("keys", recent.keys, (num_entries, heads, ring, sizes[0])),
        ("values", recent.values, (num_entries, heads, ring, sizes[1])),
        ("key", recent.key, (inputs.query.shape[0], heads, sizes[0])),
        ("value", recent.value, (inputs.query.shape[0], heads, sizes[1])),
    ):
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise ValueError(
                f"recent.{name}: expected float {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if not (recent.keys.is_contiguous() and recent.values.is_contiguous()):
        raise ValueError("recent: expected contiguous rings")
    if recent.entries.dtype != torch.int32 or recent.entries.shape != (num_seqs,):
        raise ValueError(
            f"recent.entries: expected int32 {(num_seqs,)}, got {recent.entries.dtype} "
            f"{tuple(recent.entries.shape)}"
        )
    if not 1 <= recent.tokens <= min(ring, 256):
        raise ValueError(
            f"recent.tokens: expected 1 up to the ring's {ring} slots, got {recent.tokens}"
        )


def _check_values(inputs: AttentionInputs) -> None:
    """Checks of values, which sync a GPU; on GPUs only with `HALFBYTE_DEBUG=1`."""
    # In C++: NumPy or tensor operations take longer than attention to a short sequence.
    if lengths_fit(
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_tables,
        inputs.query.shape[0],
        inputs.pages.shape[0],
        inputs.layout.block_size,
    ):
        return
    starts, lengths = inputs.query_start_loc.cpu().numpy(), inputs.seq_lens.cpu().numpy()
    if starts[0] != 0 or starts[-1] != inputs.query.shape[0] or (starts[1:] < starts[:-1]).any():
        raise ValueError(
            f"query_start_loc: expected to ascend from 0 to {inputs.query.shape[0]}, "
            f"got {starts.tolist()}"
        )
    if not lengths.size:
        return
    if lengths.min() < 0:
        raise ValueError(f"seq_lens: expected numbers >= 0, got {lengths.tolist()}")
    needed = -(-lengths // inputs.layout.block_size)
    tables = inputs.block_tables.cpu().numpy()
    if needed.max() > tables.shape[1]:
        raise ValueError(
            f"block_tables: {needed.max()} pages needed for {lengths.max()} tokens, "
            f"the table has {tables.shape[1]}"
        )
    used = tables[np.arange(tables.shape[1]) < needed[:, None]]
    if used.size and not 0 <= used.min() <= used.max() < inputs.pages.shape[0]:
        raise ValueError(
            f"block_tables: page numbers {used.min()} .. {used.max()} are not all in "
            f"0 .. {inputs.pages.shape[0] - 1}"
        )
