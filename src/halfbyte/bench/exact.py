"""How far attention is from float64 on the dequantized cache."""

import torch

from halfbyte.bench.cases import Case
from halfbyte.bench.data import Cache
from halfbyte.kvcache import read_tokens


def attention_error(
    out: torch.Tensor,
    query: torch.Tensor,
    case: Case,
    cache: Cache,
    sinks: torch.Tensor | None,
) -> float:
    """Largest error over the largest value, on a sample of query tokens.

    Looked at are the first, the longest and the shortest sequence, and of each the first, the
    middle and the last query token.

    Args:
        out: `[tokens, heads, head_size]`, what attention to the cache's first pool gave.
        query: of the same shape.
        sinks: `[heads]`, or None where they took no part.
    """
    lengths = case.lengths()
    errors, values = [], []
    for s in {0, int(lengths.argmax()), int(lengths.argmin())}:
        length = int(lengths[s])
        key, value = _sequence(cache, s, length)
        for i in {0, case.query_tokens // 2, case.query_tokens - 1}:
            seen = length - case.query_tokens + i + 1
            row = s * case.query_tokens + i
            exact = _attend(query[row], key[:seen], value[:seen], case, sinks)
            errors.append((out[row].double() - exact).abs().max())
            values.append(exact.abs().max())
    return float(torch.stack(errors).max() / torch.stack(values).max())  # NaN if any is


def _sequence(cache: Cache, s: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 K and V `[length, kv_heads, head_size]`."""
    block_size = cache.layout.block_size
    positions = torch.arange(length, device=cache.block_tables.device)
    slots = cache.block_tables[s].long()[positions // block_size] * block_size
    return read_tokens(
        cache.pools[0],
        slots + positions % block_size,
        cache.layout,
        cache.scale,
        cache.scale,
        torch.float64,
    )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    case: Case,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """float64 `[heads, head_size]` of one query token `[heads, head_size]`."""
    grouped = query.double().unflatten(0, (case.kv_heads, case.group))
    logits = torch.einsum("hgd,nhd->hgn", grouped, key) * case.head_size**-0.5
    if sinks is not None:
        column = sinks.double().view(case.kv_heads, case.group, 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hgn,nhd->hgd", weights, value).flatten(0, 1)
