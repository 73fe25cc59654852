"""Error of attention, and of bfloat16, against float64 on the dequantized cache."""

from typing import NamedTuple

import torch

from halfbyte.bench import Case
from halfbyte.bench.data import Inputs
from halfbyte.kvcache import read_tokens


class Error(NamedTuple):
    """Max errors relative to the max value."""

    ours: float
    bfloat16: float
    """Error of attention in bfloat16 on the same cache; tests allow twice as much."""


def attention_error(out: torch.Tensor, case: Case, inputs: Inputs) -> Error:
    """Error against float64, on a sample of query tokens.

    Samples the first, the longest and the shortest sequence, and the first, middle and last query
    token of each.

    Args:
        out: `[tokens, heads, head_size]`, the output of attention to the first pool.
    """
    lengths = case.lengths()
    errors, baselines, values = [], [], []
    for s in {0, int(lengths.argmax()), int(lengths.argmin())}:
        length = int(lengths[s])
        key, value = _sequence(inputs, s, length)
        for i in {0, case.query_tokens // 2, case.query_tokens - 1}:
            seen = length - case.query_tokens + i + 1
            row = s * case.query_tokens + i
            first = 0 if inputs.window is None else max(0, seen - inputs.window)
            work = inputs.query[row], key[first:seen], value[first:seen], case, inputs.sinks
            exact = _attend(*work, torch.float64)
            rounded = _attend(*work, torch.bfloat16)
            errors.append((out[row].double() - exact).abs().max())
            baselines.append((rounded.double() - exact).abs().max())
            values.append(exact.abs().max())
    largest = torch.stack(values).max()
    return Error(
        float(torch.stack(errors).max() / largest),  # NaN if any is
        float(torch.stack(baselines).max() / largest),
    )


def _sequence(inputs: Inputs, s: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 K and V `[length, kv_heads, head_size]`."""
    block_size = inputs.layout.block_size
    positions = torch.arange(length, device=inputs.block_tables.device)
    slots = inputs.block_tables[s].long()[positions // block_size] * block_size
    return read_tokens(
        inputs.pools[0],
        slots + positions % block_size,
        inputs.layout,
        inputs.scale,
        inputs.scale,
        torch.float64,
    )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    case: Case,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`[heads, head_size]` of one query token `[heads, head_size]`, computed in `dtype`."""
    grouped = query.to(dtype).unflatten(0, (case.kv_heads, case.group))
    logits = torch.einsum("hgd,nhd->hgn", grouped, key.to(dtype)) * case.head_size**-0.5
    if sinks is not None:
        column = sinks.to(dtype).view(case.kv_heads, case.group, 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hgn,nhd->hgd", weights, value.to(dtype)).flatten(0, 1)
