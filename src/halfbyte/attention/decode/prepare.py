"""Launcher of `prepare.cu`: what decoding needs before pages that a recipe changed are read."""

import ctypes
import math
from functools import lru_cache
from typing import NamedTuple

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.decode.variant import geometry_macros
from halfbyte.kernels.runtime import nvrtc
from halfbyte.layouts import PageLayout, page_stride

_LOG2E = math.log2(math.e)
_THREADS = 128
_WARPS = _THREADS // 32
_MAX_ROWS = 16
"""Heads of a query token, of one KV head, in a CTA."""
_TILE_ROWS, _TILE_SEGMENTS = 32, 32
"""Of the CTAs that multiply rows with means."""


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


class Prepared(NamedTuple):
    """What the attention kernel is given beside the pages."""

    inputs: AttentionInputs
    """Lengths and window of what is read from the pages."""
    query: torch.Tensor
    transformed: Transformed
    segment: int
    """Tokens that share a mean; 0 where K is not centred."""
    knows_first: bool
    has_initial: bool
    is_launched: bool
    """Whether a kernel is in front of the attention kernel, that may still run."""
    kept: tuple[torch.Tensor, ...] = ()
    """What must live as long as the launch is prepared."""


def prepare(inputs: AttentionInputs) -> Prepared:
    """Rotate queries, score means and first tokens, attend to the last tokens.

    Never waits for the GPU, but for the first call with a transform.

    Args:
        inputs: of `paged_attention`, checked, all on one GPU.
    """
    transform, recent = inputs.transform, inputs.recent
    if transform is None and recent is None:
        return Prepared(inputs, inputs.query, Transformed(), 0, False, False, False)
    packed, layout = inputs.packed, inputs.layout
    query = aligned(inputs.query)
    num_tokens, num_heads, _ = query.shape
    params = _Params(
        query=query.data_ptr(),
        query_stride_token=query.stride(0),
        query_stride_head=query.stride(1),
        pages=inputs.pages.data_ptr(),
        page_stride=page_stride(inputs.pages),
        packed_window=packed.sliding_window or 0,
        has_packed=1,
        softmax_scale=inputs.scale,
        softcap=inputs.softcap or 0.0,
        bias_scale=inputs.scale * (1.0 if inputs.softcap else _LOG2E),
        tokens=num_tokens,
    )
    kept = [query]

    def give(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            setattr(params, name, tensor.data_ptr())
            kept.append(tensor)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=query.device)

    block_tables = inputs.block_tables.contiguous()
    params.max_pages = block_tables.shape[1]
    segments = packed.num_segments
    tables = None if transform is None or not segments else transform.pair_tables
    rotated, segment, knows_first = query, 0, False
    if transform is not None:
        if transform.rotate:
            rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            give({"rotated": rotated})
        if tables is not None:
            segment = transform.segment
            names = ("low", "high", "cosines", "sines", "low_mean", "high_mean")
            give(dict(zip(names, tables, strict=True)))
            params.mean_segments = len(tables.cos)
            params.bias_segments = segments
            give({"bias": floats(num_tokens, num_heads, segments)})
        if transform.first_keys is not None and transform.first_values is not None:
            knows_first = True
            indices = torch.empty((num_tokens, num_heads), dtype=torch.int32, device=query.device)
            firsts = {"first_keys": transform.first_keys, "first_values": transform.first_values}
            give({name: x.to(query.dtype).contiguous() for name, x in firsts.items()})
            give({"first_indices": indices, "first_scores": floats(num_tokens, num_heads)})
    if recent is not None:
        keys, values = recent.keys.to(query.dtype), recent.values.to(query.dtype)
        key, value = (aligned(x.to(query.dtype)) for x in (recent.key, recent.value))
        give({"ring_keys": keys, "ring_values": values, "new_keys": key})
        give({"new_values": value})
        params.key_stride_token, params.key_stride_head = key.stride()[:2]
        params.value_stride_token, params.value_stride_head = value.stride()[:2]
        params.ring = recent.keys.shape[2]
        window = inputs.sliding_window
        params.reach = min(window or recent.tokens, recent.tokens)
        params.has_packed = int(window is None or window > recent.tokens)
        give({"initial_out": floats(num_tokens, num_heads, layout.head_size_v)})
        give({"initial_lse": floats(num_tokens, num_heads)})
    group = num_heads // layout.num_kv_heads
    rows_of_cta = min(group, _MAX_ROWS)
    kernels = _kernels(
        layout,
        group,
        query.dtype,
        bool(inputs.softcap),
        transform is not None and transform.rotate,
        0 if recent is None else recent.tokens,
        segment,
        0 if tables is None else tables.cos.shape[1],
        knows_first,
        query.device.index,
    )
    ctas = num_tokens * layout.num_kv_heads * -(-group // rows_of_cta)
    if tables is not None:
        ctas += -(-num_tokens * num_heads // _TILE_ROWS) * -(-segments // _TILE_SEGMENTS)
    give({"tokens_known": _tokens(inputs, kernels["find_tokens"]), "block_tables": block_tables})
    nvrtc.launch(kernels["prepare"], ctas, _THREADS, [params])
    return Prepared(
        packed,
        rotated,
        Transformed(
            *(params.bias, params.first_scores, params.first_indices),
            *(params.first_values, params.initial_out, params.initial_lse),
            segments if segment else 0,
        ),
        segment,
        knows_first,
        recent is not None,
        True,
        tuple(kept),
    )


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A tensor `[a, b, size]` of 16-bit values whose rows are read 16 bytes at a time."""
    if x.stride(2) != 1 or any(n % 8 for n in (x.data_ptr() // 2, *x.stride()[:2])):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _tokens(inputs: AttentionInputs, kernel: nvrtc.Kernel) -> torch.Tensor:
    """int32 `[tokens, 4]`, `Token` of each; found once for all layers that share plans."""
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

    key = ("query tokens", num_tokens, None if entries is None else entries.data_ptr())
    return inputs.plans.get(key, find)


@lru_cache(maxsize=256)
def _kernels(
    layout: PageLayout,
    group: int,
    dtype: torch.dtype,
    softcap: bool,
    rotate: bool,
    recent: int,
    segment: int,
    pairs: int,
    knows_first: bool,
    device: int,
) -> dict[str, nvrtc.Kernel]:
    macros = {
        **geometry_macros(layout, group, dtype, softcap),
        "ROTATE": int(rotate),
        "RECENT": recent,
        "SEGMENT": segment,
        "PAIRS": pairs,
        "KNOWS_FIRST": int(knows_first),
    }
    rows = min(group, _MAX_ROWS)
    shared_bytes = 4 * _WARPS * rows * (layout.head_size_v + 4) + 4 * rows * (2 * _WARPS + 1)
    query_bytes = 2 * _TILE_ROWS * (layout.head_size + 8) + 4 * pairs
    shared_bytes = max(shared_bytes if recent else 0, query_bytes if segment else 0)
    entries = (("prepare", shared_bytes), ("find_tokens", 0))
    return nvrtc.load("attention/decode/prepare.cu", tuple(macros.items()), entries, device)
