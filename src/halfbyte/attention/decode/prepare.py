"""Launcher of `prepare.cu`: rotated queries, biases and attention to recent tokens for decode."""

import ctypes
import math
from functools import lru_cache
from typing import NamedTuple

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.decode.variant import geometry_macros
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.parameters import KernelArguments, aligned
from halfbyte.kvcache.recent import RecentInputs
from halfbyte.kvcache.transform import MARK, KVTransform, PairTables
from halfbyte.layouts import PageLayout, page_stride

_LOG2E = math.log2(math.e)
_THREADS = 128
_WARPS = _THREADS // 32
_MAX_ROWS = 16
"""Max query heads (of one token and one KV head) per CTA."""
_TILE_ROWS, _TILE_SEGMENTS = 32, 32
"""Output tile of a CTA that multiplies query rows with means of K."""


class Transformed(ctypes.Structure):
    """`Transformed` of `loader.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias", "first_scores", "first_indices")),
        *((name, ctypes.c_void_p) for name in ("first_values", "initial_out", "initial_lse")),
        ("bias_stride", ctypes.c_uint64),
    )


class _Params(ctypes.Structure):
    """`Params` of `prepare.cu`."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("query_stride_token", ctypes.c_uint64),
        ("query_stride_head", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("tokens_known", "block_tables", "pages")),
        ("max_pages", ctypes.c_int),
        ("page_stride", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("low", "high", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("low_mean", "high_mean")),
        ("mean_segments", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("first_keys", "first_values")),
        *((name, ctypes.c_void_p) for name in ("ring_keys", "ring_values")),
        *((name, ctypes.c_void_p) for name in ("new_keys", "new_values")),
        ("key_stride_token", ctypes.c_uint64),
        ("key_stride_head", ctypes.c_uint64),
        ("value_stride_token", ctypes.c_uint64),
        ("value_stride_head", ctypes.c_uint64),
        ("ring", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("reach", "packed_window", "has_packed")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "softcap", "bias_scale")),
        *((name, ctypes.c_void_p) for name in ("rotated", "bias", "first_scores")),
        *((name, ctypes.c_void_p) for name in ("first_indices", "initial_out", "initial_lse")),
        ("tokens", ctypes.c_int),
        ("bias_segments", ctypes.c_int),
    )


class _FindParams(ctypes.Structure):
    """`FindParams` of `prepare.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "entries", "known")),
        ("sequences", ctypes.c_int),
        ("tokens", ctypes.c_int),
    )


class PrepareVariant(NamedTuple):
    """Compile-time options, in addition to the layout and the query's dtype."""

    group: int
    """Query heads per KV head."""
    softcap: bool
    rotate: bool
    recent: int
    """Recent tokens read from rings; 0 for none."""
    segment: int
    """Tokens that share a mean; 0 where K is not centred."""
    pairs: int
    """Channel pairs of `PairTables`; 0 where K is not centred."""
    knows_first: bool
    """Whether pages may mark the first token."""

    @property
    def rows(self) -> int:
        """Query heads of a token per CTA."""
        return min(self.group, _MAX_ROWS)

    def ctas(self, num_tokens: int, kv_heads: int, num_segments: int) -> int:
        """Grid size: CTAs for rows, then CTAs for means."""
        of_rows = num_tokens * kv_heads * -(-self.group // self.rows)
        if not self.segment:
            return of_rows
        num_rows = num_tokens * kv_heads * self.group
        return of_rows + -(-num_rows // _TILE_ROWS) * -(-num_segments // _TILE_SEGMENTS)

    def shared_bytes(self, layout: PageLayout) -> int:
        """Dynamic shared memory: the larger of `Shared` and `Queries` of `prepare.cu`."""
        sums = self.rows * (_WARPS * (layout.head_size_v + 4) + 2 * _WARPS + 1)
        queries = 2 * _TILE_ROWS * (layout.head_size + 8) + 4 * self.pairs
        return max(4 * sums if self.recent else 0, queries if self.segment else 0)

    def macros(self) -> dict[str, int]:
        """Macros of the attention kernel that reads what `prepare.cu` wrote."""
        return {
            "PREPARED": 1,
            "SEGMENT": self.segment,
            "KNOWS_FIRST": int(self.knows_first),
            "INITIAL": int(self.recent > 0),
        }

    def own_macros(self, layout: PageLayout, dtype: torch.dtype) -> dict[str, int | None]:
        """Macros that `prepare.cu` is compiled with."""
        return {
            **geometry_macros(layout, self.group, dtype, self.softcap),
            "ROTATE": int(self.rotate),
            "RECENT": self.recent,
            "SEGMENT": self.segment,
            "PAIRS": self.pairs,
            "KNOWS_FIRST": int(self.knows_first),
            "MARK": MARK,
            "WARPS": _WARPS,
            "ROWS": self.rows,
            "TILE_ROWS": _TILE_ROWS,
            "TILE_SEGMENTS": _TILE_SEGMENTS,
        }


class Prepared(NamedTuple):
    """Inputs of the attention kernel, in addition to the pages."""

    query: torch.Tensor
    transformed: Transformed = Transformed()
    variant: PrepareVariant | None = None
    """None without a transform or recent tokens: no kernel was launched."""
    kept: tuple[torch.Tensor, ...] = ()
    """Keeps the launch's tensors alive."""


def prepare(inputs: AttentionInputs) -> Prepared:
    """Rotate queries, score means and first tokens, attend to the recent tokens.

    Does not sync the GPU, except in the first call with a transform.

    Args:
        inputs: of `paged_attention`, checked, all on one GPU.
    """
    transform, recent, layout = inputs.transform, inputs.recent, inputs.layout
    if transform is None and recent is None:
        return Prepared(inputs.query)
    query = rotated = aligned(inputs.query)
    num_tokens, num_heads, _ = query.shape
    block_tables = inputs.block_tables.contiguous()
    arguments = KernelArguments(
        _Params,
        query_stride_token=query.stride(0),
        query_stride_head=query.stride(1),
        max_pages=block_tables.shape[1],
        page_stride=page_stride(inputs.pages),
        packed_window=inputs.packed.sliding_window or 0,
        has_packed=1,
        softmax_scale=inputs.scale,
        softcap=inputs.softcap or 0.0,
        bias_scale=inputs.scale * (1.0 if inputs.softcap else _LOG2E),
        tokens=num_tokens,
    )
    arguments.bind(query=query, pages=inputs.pages, block_tables=block_tables)
    tables = None
    if transform is not None:
        tables = transform.pair_tables if inputs.num_segments else None
        rotated = _bind_transform(arguments, transform, tables, query, inputs.num_segments)
    if recent is not None:
        _bind_recent(arguments, recent, query, inputs)
    params = arguments.params
    variant = PrepareVariant(
        group=num_heads // layout.num_kv_heads,
        softcap=bool(inputs.softcap),
        rotate=rotated is not query,
        recent=0 if recent is None else recent.tokens,
        segment=0 if transform is None or tables is None else transform.segment,
        pairs=0 if tables is None else tables.cos.shape[1],
        knows_first=bool(params.first_keys),
    )
    kernels = _kernels(layout, query.dtype, variant, query.device.index)
    arguments.bind(tokens_known=_tokens(inputs, kernels["find_tokens"]))
    ctas = variant.ctas(num_tokens, layout.num_kv_heads, params.bias_segments)
    nvrtc.launch(kernels["prepare"], ctas, _THREADS, [params], overlap=True)
    transformed = Transformed(
        *(params.bias, params.first_scores, params.first_indices, params.first_values),
        *(params.initial_out, params.initial_lse, params.bias_segments),
    )
    return Prepared(rotated, transformed, variant, tuple(arguments.tensors))


def _bind_transform(
    arguments: KernelArguments,
    transform: KVTransform,
    tables: PairTables | None,
    query: torch.Tensor,
    num_segments: int,
) -> torch.Tensor:
    """Bind the transform's inputs and outputs; returns the query for the attention kernel."""
    num_tokens, num_heads, _ = query.shape
    rotated = query
    if transform.rotate:
        rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        arguments.bind(rotated=rotated)
    if tables is not None:
        names = ("low", "high", "cosines", "sines", "low_mean", "high_mean")
        arguments.bind(
            **dict(zip(names, tables, strict=True)),
            bias=_floats(query, num_tokens, num_heads, num_segments),
        )
        arguments.params.mean_segments = len(tables.cos)
        arguments.params.bias_segments = num_segments
    if (first := transform.first_tokens(query.dtype)) is not None:
        arguments.bind(
            first_keys=first[0],
            first_values=first[1],
            first_indices=_floats(query, num_tokens, num_heads).view(torch.int32),
            first_scores=_floats(query, num_tokens, num_heads),
        )
    return rotated


def _bind_recent(
    arguments: KernelArguments, recent: RecentInputs, query: torch.Tensor, inputs: AttentionInputs
) -> None:
    """Bind the rings, the step's K and V, and the outputs of attention to recent tokens."""
    key, value = (aligned(x.to(query.dtype)) for x in (recent.key, recent.value))
    arguments.bind(
        ring_keys=recent.keys.to(query.dtype),
        ring_values=recent.values.to(query.dtype),
        new_keys=key,
        new_values=value,
        initial_out=_floats(query, *query.shape[:2], inputs.layout.head_size_v),
        initial_lse=_floats(query, *query.shape[:2]),
    )
    params, window = arguments.params, inputs.sliding_window
    params.key_stride_token, params.key_stride_head = key.stride()[:2]
    params.value_stride_token, params.value_stride_head = value.stride()[:2]
    params.ring = recent.keys.shape[2]
    params.reach = min(window or recent.tokens, recent.tokens)
    params.has_packed = int(window is None or window > recent.tokens)


def _floats(query: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=query.device)


class _TokensKey(NamedTuple):
    """What the `Token` structs depend on besides the lengths."""

    num_tokens: int
    entries: int | None
    """Address of the sequences' entries in the rings."""


def _tokens(inputs: AttentionInputs, kernel: nvrtc.Kernel) -> torch.Tensor:
    """`Token` structs as int32 `[tokens, 4]`; computed once for all layers that share plans."""
    num_tokens, device = inputs.query.shape[0], inputs.query.device
    entries = None if inputs.recent is None else inputs.recent.entries.contiguous()

    def find() -> torch.Tensor:
        found = torch.empty((num_tokens, 4), dtype=torch.int32, device=device)
        starts, lengths = inputs.query_start_loc.contiguous(), inputs.seq_lens.contiguous()
        params = _FindParams(
            starts.data_ptr(),
            lengths.data_ptr(),
            None if entries is None else entries.data_ptr(),
            found.data_ptr(),
            len(lengths),
            num_tokens,
        )
        nvrtc.launch(kernel, -(-num_tokens // _THREADS), _THREADS, [params])
        return found

    return inputs.plans.get(
        _TokensKey(num_tokens, None if entries is None else entries.data_ptr()), find
    )


@lru_cache(maxsize=256)
def _kernels(
    layout: PageLayout, dtype: torch.dtype, variant: PrepareVariant, device: int
) -> dict[str, nvrtc.Kernel]:
    macros = tuple(variant.own_macros(layout, dtype).items())
    entries = (("prepare", variant.shared_bytes(layout)), ("find_tokens", 0))
    return nvrtc.load("attention/decode/prepare.cu", macros, entries, device)
