"""Random caches: codes, scales and page tables as a benchmark needs them.

Zeros and data that fit the caches flatter: codes are random, block scales between 0.25 and 4, pages
in random order, and every cache comes in enough copies to leave a GPU's L2 or a CPU's last cache.
"""

from dataclasses import dataclass

import torch

from halfbyte.bench.cases import Case
from halfbyte.bench.processor import bytes_beyond_caches
from halfbyte.layouts import KVCacheDType, PageLayout

_ROTATED_BYTES = {"cuda": 400_000_000, "cpu": bytes_beyond_caches()}
_MOST_COPIES = {"cuda": 256, "cpu": 64}
GLOBAL_SCALE = 0.02


@dataclass(frozen=True)
class Cache:
    """Sequences of a case in one format, in several copies that share tables and lengths."""

    layout: PageLayout
    pools: list[torch.Tensor]
    """uint8 `[num_pages, page_bytes]` each."""
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: torch.Tensor
    """float32 scalar, the global scale of K and V."""
    window: int | None
    """The case's sliding window where it hides anything."""
    num_bytes: int
    """What attention has to read: once the K and V of every token that any query attends to."""


def make_layout(case: Case, dtype: str) -> PageLayout:
    """The layout of a case's pages; dtype is a name of `KVCacheDType`."""
    return PageLayout(dtype, dtype, case.head_size, None, case.kv_heads, case.block_size)


def make_cache(case: Case, dtype: str, device: torch.device) -> Cache:
    """Random pages for all sequences of a case."""
    layout = make_layout(case, dtype)
    lengths = case.lengths()
    window = case.sliding_window
    hides = window is not None and window < int(lengths.max())
    hidden = (lengths - (window or 0) - case.query_tokens + 1).clamp(min=0) if hides else None
    table, num_pages = random_tables(lengths, case.block_size, hidden)
    generator = torch.Generator(device).manual_seed(0)
    pools = []
    for _ in range(copies(num_pages * layout.page_bytes, device)):
        pages = torch.empty((num_pages, layout.page_bytes), dtype=torch.uint8, device=device)
        _fill(pages, layout, generator)
        pools.append(pages)
    scale = torch.tensor(GLOBAL_SCALE, device=device)
    return Cache(
        layout,
        pools,
        lengths.to(device),
        table.to(device),
        scale,
        window if hides else None,
        int(case.tokens_read * layout.bytes_per_token),
    )


def copies(num_bytes: int, device: torch.device) -> int:
    """How many copies of data leave the caches together."""
    return min(_MOST_COPIES[device.type], 1 + _ROTATED_BYTES[device.type] // max(num_bytes, 1))


def random_tables(
    lengths: torch.Tensor, block_size: int, hidden: torch.Tensor | None = None
) -> tuple[torch.Tensor, int]:
    """int32 block tables of sequences whose pages lie in random order, and how many pages.

    Args:
        lengths: in tokens.
        block_size: tokens in a page.
        hidden: first tokens of each that nobody reads, none by default. Whole pages of them are
            none of the pages: their entries name the first page.
    """
    counts = -(-lengths.long() // block_size)
    dead = torch.zeros_like(counts) if hidden is None else hidden.long() // block_size
    total = int((counts - dead).sum())
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0), device="cpu").int()
    table = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32, device="cpu")
    place = torch.arange(table.shape[1], device="cpu")
    table[(dead[:, None] <= place) & (place < counts[:, None])] = order
    return table, total


def _fill(pages: torch.Tensor, layout: PageLayout, generator: torch.Generator) -> None:
    views = layout.views(pages)
    for dtype, data, scale in (
        (layout.k_dtype, views.k_data, views.k_scale),
        (layout.v_dtype, views.v_data, views.v_scale),
    ):
        if not dtype.is_quantized:
            data.normal_(generator=generator)
        elif scale is None:
            # One-byte floats between 0.25 and 4 (in E4M3) of either sign: neither NaN nor infinity.
            data.random_(0x28, 0x48, generator=generator)
            data.bitwise_or_(torch.empty_like(data).random_(0, 2, generator=generator) << 7)
        else:
            data.random_(0, 256, generator=generator)
            low, high = (0x28, 0x48) if dtype.is_nvfp4 else (125, 130)  # E4M3, or E8M0: 1/4 .. 4
            scale.random_(low, high, generator=generator)


def short_name(dtype: str) -> str:
    """A format's name in reports: `nvfp4`, `fp8`, `bf16`."""
    name = KVCacheDType.parse(dtype).value
    names = {"fp8_e4m3": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return names.get(name, name)
