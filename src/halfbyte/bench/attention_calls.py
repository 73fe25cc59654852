"""Calls of halfbyte's attention and store, and of PyTorch's SDPA on dense K and V."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from halfbyte.attention import AttentionPlans, paged_attention
from halfbyte.bench.cases import Case
from halfbyte.bench.data import Inputs, make_inputs
from halfbyte.kvcache import reshape_and_cache
from halfbyte.measure.timing import Call, copied, copies


def attention_calls(case: Case, inputs: Inputs, **options: Any) -> list[Call]:
    """Calls of `paged_attention`, one per pool; each returns its output.

    Args:
        options: further arguments, such as `backend`. By default calls share a plan, like the
            layers of a step.
    """
    attend = partial(
        paged_attention,
        inputs.query,
        layout=inputs.layout,
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        block_tables=inputs.block_tables,
        scale=case.head_size**-0.5,
        k_scale=inputs.scale,
        v_scale=inputs.scale,
        sliding_window=inputs.window,
        sinks=inputs.sinks,
        **{"plans": AttentionPlans(), **options},
    )
    return [partial(attend, pages) for pages in inputs.pools]


def store_calls(case: Case, dtype: str, device: torch.device) -> tuple[list[Call], int]:
    """Calls of `reshape_and_cache` on different tokens and pages, and bytes moved per call."""
    inputs, size = make_inputs(case, dtype, device), case.block_size
    tokens = torch.arange(case.context, device=device)
    slots = inputs.block_tables[0].long()[tokens // size] * size + tokens % size
    generator = torch.Generator(device).manual_seed(2)
    shape = (2, case.context, case.kv_heads, case.head_size)
    calls: list[Call] = []
    for pages in inputs.pools:
        key, value = torch.randn(shape, generator=generator, device=device).bfloat16()
        store = (key, value, pages, slots, inputs.layout, inputs.scale, inputs.scale)
        calls.append(partial(reshape_and_cache, *store))
    return calls, 2 * key.nbytes + slots.nbytes + inputs.num_bytes


def sdpa_dtypes(case: Case, device: torch.device) -> tuple[torch.dtype, ...]:
    """Dtypes to measure SDPA in; empty if it does not support the case: sinks, window."""
    plain = case.kind == "prefill" or (case.kind == "decode" and case.query_tokens == 1)
    if case.sinks or case.sliding_window or not plain:
        return ()
    # On a CPU also float32, which can be faster.
    return (torch.bfloat16, torch.float32)[: 1 if device.type == "cuda" else 2]


def sdpa_calls(case: Case, dtype: torch.dtype, device: torch.device) -> list[Call]:
    """SDPA on dense K and V.

    For decode the GQA group is folded into the query dimension; for prefill on a CPU, K and V are
    repeated for every query head, since `enable_gqa` is far slower there.
    """
    fold = case.kind == "decode"
    repeat = 1 if fold or device.type == "cuda" else case.group
    shape = (2, case.batch, case.kv_heads, case.context, case.head_size)
    first = torch.randn(shape, dtype=dtype, device=device).repeat_interleave(repeat, dim=2)
    rows = (case.kv_heads, case.group) if fold else (case.heads, case.query_tokens)
    query = torch.randn((case.batch, *rows, case.head_size), dtype=dtype, device=device)
    mask = causal_lower_right(case.query_tokens, case.context)
    options: dict[str, Any] = {} if fold else {"enable_gqa": repeat == 1, "attn_mask": mask}
    attend = partial(F.scaled_dot_product_attention, query, **options)
    key_values = copied(first, copies(first.nbytes, device))
    return [partial(attend, *key_value) for key_value in key_values]
