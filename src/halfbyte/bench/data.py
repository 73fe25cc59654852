"""Random KV caches for benchmarks: codes, scales and block tables.

Zeros, and data that fit into L2, give times that are too good. So codes are random, block scales
are between 0.25 and 4, pages are in random order, and every cache has copies that together exceed
L2 or a CPU's caches. Formats whose scales are not known here hold quantized normal values.
"""

from dataclasses import dataclass

import torch

from halfbyte.bench.cases import Case
from halfbyte.bench.machine import bytes_beyond_caches
from halfbyte.kvcache import get_kv_cache_quant_method
from halfbyte.layouts import KVCacheDType, PageLayout

_ROTATED_BYTES = {"cuda": 400_000_000, "cpu": bytes_beyond_caches()}
_MAX_COPIES = {"cuda": 256, "cpu": 64}
_PAGES_AT_ONCE = 1024
GLOBAL_SCALE = 0.02
_ONE_BYTE_FLOATS = (KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2)
_E4M3, _E8M0 = (0x28, 0x48), (125, 130)  # 1/4 .. 4
_SCALE_BYTES = {
    KVCacheDType.NVFP4: _E4M3,
    KVCacheDType.NVFP4_4OVER6: _E4M3,
    KVCacheDType.FP4_BLOCK16: _E8M0,
    KVCacheDType.MXFP4: _E8M0,
}
"""The range of random bytes of block scales."""


@dataclass(frozen=True)
class Cache:
    """Sequences of a case in one format, in copies that share block tables and lengths."""

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


def make_cache(case: Case, dtype: str, device: torch.device) -> Cache:
    """Random pages for all sequences of a case; dtype is a name of `KVCacheDType`."""
    layout = PageLayout(dtype, dtype, case.head_size, None, case.kv_heads, case.block_size)
    lengths = case.lengths()
    hides = case.window < int(lengths.max())
    hidden = (lengths - case.window - case.query_tokens + 1).clamp(min=0) if hides else None
    table, num_pages = random_tables(lengths, case.block_size, hidden)
    generator = torch.Generator(device).manual_seed(0)
    one = torch.empty((num_pages, layout.page_bytes), dtype=torch.uint8, device=device)
    pools = [torch.empty_like(one) for _ in range(copies(one.nbytes, device))]
    for pages in pools:
        _fill(pages, layout, generator)
    return Cache(
        layout,
        pools,
        lengths.to(device),
        table.to(device),
        torch.tensor(GLOBAL_SCALE, device=device),
        case.window if hides else None,
        int(case.tokens_read * layout.bytes_per_token),
    )


def copies(num_bytes: int, device: torch.device) -> int:
    """Number of copies that together exceed the hardware caches."""
    return min(_MAX_COPIES[device.type], 1 + _ROTATED_BYTES[device.type] // max(num_bytes, 1))


def random_tables(
    lengths: torch.Tensor, block_size: int, hidden: torch.Tensor | None = None
) -> tuple[torch.Tensor, int]:
    """int32 block tables of sequences with pages in random order, and the number of pages.

    Args:
        lengths: in tokens.
        hidden: first tokens of each sequence that no query attends to. Pages that hold only such
            tokens are not allocated; their entries are 0.
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
        elif dtype in _ONE_BYTE_FLOATS:
            # One-byte floats between 0.25 and 4 (in E4M3) of either sign: neither NaN nor infinity.
            data.random_(0x28, 0x48, generator=generator)
            data.bitwise_or_(torch.empty_like(data).random_(0, 2, generator=generator) << 7)
        elif scale is not None and dtype in _SCALE_BYTES:
            data.random_(0, 256, generator=generator)
            scale.random_(*_SCALE_BYTES[dtype], generator=generator)
        else:
            head_size = layout.head_size if data is views.k_data else layout.head_size_v
            method = get_kv_cache_quant_method(dtype)
            for start in range(0, len(data), _PAGES_AT_ONCE):
                some = slice(start, start + _PAGES_AT_ONCE)
                values = torch.empty((*data[some].shape[:-1], head_size), device=data.device)
                codes, scales = method.quantize(values.normal_(generator=generator), GLOBAL_SCALE)
                data[some] = codes
                if scale is not None:
                    assert scales is not None
                    scale[some] = scales


def short_name(dtype: str) -> str:
    """A format's name in reports: `nvfp4`, `fp8`, `bf16`."""
    name = KVCacheDType.parse(dtype).value
    names = {"fp8_e4m3": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return names.get(name, name)


def relative_errors(
    exact: torch.Tensor, out: torch.Tensor, baseline: torch.Tensor
) -> tuple[float, float]:
    """Max error of a result relative to the max value of float64's, and the allowed error.

    Allowed is twice the error of `baseline`, computed with bfloat16 weights and inputs, and 1e-5.
    """
    errors = [(y.double() - exact).abs().max() / exact.abs().max() for y in (out, baseline)]
    return float(errors[0]), 2 * float(errors[1]) + 1e-5
