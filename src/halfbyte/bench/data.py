"""Random inputs of attention: queries, pages in random order, block tables."""

from dataclasses import dataclass

import torch

from halfbyte.bench.cases import Case
from halfbyte.kvcache import reshape_and_cache
from halfbyte.layouts import PageLayout
from halfbyte.measure.timing import copies

_TOKENS_AT_ONCE = 16384
_SCALE = 0.02


@dataclass(frozen=True)
class Inputs:
    """A case's queries, and its sequences in one format, in copies that share block tables."""

    query: torch.Tensor
    """`[batch * query_tokens, heads, head_size]`."""
    query_start_loc: torch.Tensor
    sinks: torch.Tensor | None
    layout: PageLayout
    pools: list[torch.Tensor]
    """uint8 `[num_pages, page_bytes]` each."""
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: torch.Tensor
    """float32 scalar, the global scale of K and V."""
    window: int | None
    """The case's sliding window if it is shorter than the context."""
    num_bytes: int
    """Bytes that attention must read: K and V of all tokens that any query attends to, once."""


def make_inputs(
    case: Case, dtype: str, device: torch.device, query_dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    """Normal queries, K and V (and sinks) of a case; dtype is a name of `KVCacheDType`.

    Queries are the same for every format.
    """
    layout = PageLayout(dtype, dtype, case.head_size, None, case.kv_heads, case.block_size)
    lengths, tokens = case.lengths(), case.batch * case.query_tokens
    table, num_pages = random_tables(case)
    scale = torch.tensor(_SCALE, device=device)
    pages = _random_pages(layout, num_pages, scale)
    generator = torch.Generator(device).manual_seed(1)
    query = torch.randn(tokens, case.heads, case.head_size, generator=generator, device=device)
    sinks = torch.randn(case.heads, generator=generator, device=device) if case.sinks else None
    return Inputs(
        query.to(query_dtype),
        torch.arange(0, tokens + 1, case.query_tokens, dtype=torch.int32, device=device),
        sinks,
        layout,
        # The same bytes in other pages.
        [pages.roll(i, 0) for i in range(copies(pages.nbytes, device))],
        lengths.to(device),
        table.to(device),
        scale,
        case.window if case.window < int(lengths.max()) else None,
        int(case.tokens_read * layout.bytes_per_token),
    )


def _random_pages(layout: PageLayout, num_pages: int, scale: torch.Tensor) -> torch.Tensor:
    device = scale.device
    generator = torch.Generator(device).manual_seed(0)
    pages = torch.zeros((num_pages, layout.page_bytes), dtype=torch.uint8, device=device)
    slots = torch.arange(num_pages * layout.block_size, device=device)
    for some in slots.split(_TOKENS_AT_ONCE):
        shape = (2, len(some), layout.num_kv_heads, layout.head_size)
        key, value = torch.randn(shape, generator=generator, device=device).bfloat16()
        reshape_and_cache(key, value, pages, some, layout, scale, scale)
    return pages


def random_tables(case: Case) -> tuple[torch.Tensor, int]:
    """int32 block tables of sequences with pages in random order, and the number of pages.

    Pages that no query attends to are not allocated; their entries are 0.
    """
    lengths = case.lengths().long()
    ends = -(-lengths // case.block_size)
    starts = (lengths - case.window - case.query_tokens + 1).clamp(min=0) // case.block_size
    places = torch.arange(int(ends.max()), device="cpu")
    used = (starts[:, None] <= places) & (places < ends[:, None])
    num_pages = int(used.sum())
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(used.shape, dtype=torch.int32, device="cpu")
    table[used] = torch.randperm(num_pages, generator=generator, device="cpu").int()
    return table, num_pages
