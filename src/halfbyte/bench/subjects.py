"""halfbyte's own calls, as the benchmark makes them: the only place that does."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from halfbyte.attention import ATTENTION_BACKENDS, AttentionPlans, paged_attention
from halfbyte.attention.base import AttentionConfig
from halfbyte.bench.cases import Case
from halfbyte.bench.data import GLOBAL_SCALE, Cache, copies, make_layout, random_tables
from halfbyte.dispatch import CPU, current_compute_capability
from halfbyte.kvcache import read_tokens, reshape_and_cache
from halfbyte.layouts import PageLayout

_CHECKED_TOKENS = 64


@dataclass(frozen=True)
class Queries:
    """What a case asks of its caches; the same for every format and every peer."""

    query: torch.Tensor
    """`[batch * query_tokens, heads, head_size]`."""
    start_loc: torch.Tensor
    sinks: torch.Tensor | None

    @classmethod
    def make(
        cls, case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> "Queries":
        """Random queries (and sinks) of a case."""
        generator = torch.Generator(device).manual_seed(1)
        tokens = case.batch * case.query_tokens
        query = torch.empty((tokens, case.heads, case.head_size), device=device)
        sinks = torch.empty(case.heads, device=device)
        for tensor in (query, sinks):
            tensor.normal_(generator=generator)
        return cls(
            query.to(dtype),
            torch.arange(0, tokens + 1, case.query_tokens, dtype=torch.int32, device=device),
            sinks if case.sinks else None,
        )


def attention_calls(
    case: Case,
    cache: Cache,
    queries: Queries,
    backend: str | None,
    *,
    softcap: float | None = None,
    plan_inside: bool = False,
) -> list[Callable[[], torch.Tensor]]:
    """Calls of `paged_attention`, one per pool; each returns its output.

    Args:
        plan_inside: make the plan in every call, as a step's first layer does; otherwise the calls
            share one that the first of them makes, as its other layers do and as peers' calls do.
    """
    shared = None if plan_inside else AttentionPlans()

    def call(pages: torch.Tensor) -> torch.Tensor:
        return paged_attention(
            queries.query,
            pages,
            layout=cache.layout,
            query_start_loc=queries.start_loc,
            seq_lens=cache.seq_lens,
            block_tables=cache.block_tables,
            scale=case.head_size**-0.5,
            k_scale=cache.scale,
            v_scale=cache.scale,
            sliding_window=cache.window,
            sinks=queries.sinks,
            softcap=softcap,
            backend=backend,
            plans=shared,
        )

    return [partial(call, pages) for pages in cache.pools]


def attention_backend(case: Case, cache: Cache, queries: Queries, backend: str | None) -> str:
    """Name of the backend that `attention_calls` runs on."""
    query = queries.query
    config = AttentionConfig(
        layout=cache.layout,
        num_heads=case.heads,
        query_dtype=query.dtype,
        device_type=query.device.type,
        num_tokens=query.shape[0],
        num_seqs=case.batch,
        sliding_window=cache.window,
        has_sinks=case.sinks,
        compute_capability=current_compute_capability() if query.is_cuda else CPU,
    )
    return ATTENTION_BACKENDS.select(config, explicit=backend).name


def store_calls(
    case: Case, dtype: str, device: torch.device
) -> tuple[list[Callable[[], None]], int]:
    """Calls of `reshape_and_cache` on different tokens and pages, and the bytes each must move.

    Raises:
        RuntimeError: what was written is not what the reference writes on a CPU.
    """
    layout = make_layout(case, dtype)
    tokens = case.batch * case.context
    generator = torch.Generator(device).manual_seed(2)
    shape = (2, tokens, case.kv_heads, case.head_size)
    element = torch.bfloat16
    written = int(tokens * layout.bytes_per_token)
    num_bytes = 2 * shape[1] * shape[2] * shape[3] * element.itemsize + 8 * tokens + written
    count = copies(num_bytes, device)
    table, num_pages = random_tables(torch.full((count,), tokens, device="cpu"), layout.block_size)
    pages = torch.zeros((num_pages, layout.page_bytes), dtype=torch.uint8, device=device)
    positions = torch.arange(tokens, device="cpu")
    scale = torch.tensor(GLOBAL_SCALE, device=device)

    def call(data: torch.Tensor, slots: torch.Tensor) -> None:
        reshape_and_cache(data[0], data[1], pages, slots, layout, scale, scale)

    calls: list[Callable[[], None]] = []
    for i in range(count):
        data = torch.randn(shape, generator=generator, device=device).to(element)
        slots = table[i].long()[positions // layout.block_size] * layout.block_size
        slots = (slots + positions % layout.block_size).to(device)
        calls.append(partial(call, data, slots))
        if i == 0:
            calls[0]()
            _check_stored(data, pages, slots, layout, scale)
    return calls, num_bytes


def _check_stored(
    data: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    layout: PageLayout,
    scale: torch.Tensor,
) -> None:
    """Compare the first tokens with what is stored on a CPU, bit by bit."""
    few = min(_CHECKED_TOKENS, len(slots))
    count = -(-few // layout.block_size)
    expected = torch.zeros((count, layout.page_bytes), dtype=torch.uint8, device="cpu")
    key, value = data[:, :few].cpu()
    there = torch.arange(few, device="cpu")
    reshape_and_cache(key, value, expected, there, layout, scale.cpu(), scale.cpu())
    for ours, reference in zip(
        read_tokens(pages, slots[:few], layout, scale, scale),
        read_tokens(expected, there, layout, scale.cpu(), scale.cpu()),
        strict=True,
    ):
        if not torch.equal(ours.cpu(), reference):
            raise RuntimeError("stored other values than the reference does")
