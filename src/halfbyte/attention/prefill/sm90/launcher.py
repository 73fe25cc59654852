"""Launches `prefill.cu`: attention of prompts on SM90, also to last tokens in the model's dtype."""

import ctypes
from functools import lru_cache

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.paged.plan import exponent_factors
from halfbyte.dispatch import compute_capability_of, missing_module
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import num_sms
from halfbyte.kernels.runtime.parameters import KernelArguments, aligned
from halfbyte.kvcache.recent import RecentInputs

_WORKERS = {64: 3, 128: 2}
"""Warpgroups that have 64 rows of a tile each, by head size."""
_COLUMNS = {64: 96, 128: 128}
"""Keys of a step."""
_SLOTS = {64: 12, 128: 6}
"""Of the ring, for the keys or values of a step."""


class _Matrix(ctypes.Structure):
    """`Matrix` of `work.cuh`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride_token", ctypes.c_uint64),
        ("stride_head", ctypes.c_uint64),
    )


class _Params(ctypes.Structure):
    """`Params` of `work.cuh`."""

    _fields_ = (
        *((x, _Matrix) for x in ("query", "packed_key", "packed_value", "new_key", "new_value")),
        *((x, ctypes.c_void_p) for x in ("ring_keys", "ring_values", "entries", "sinks", "out")),
        ("out_token", ctypes.c_uint64),
        ("out_head", ctypes.c_uint64),
        *((x, ctypes.c_void_p) for x in ("lse", "work")),
        *((x, ctypes.c_int) for x in ("num_tiles", "kv_heads", "ring")),
        ("scale", ctypes.c_float),
    )


def supports(inputs: AttentionInputs) -> bool:
    """Whether `run_tiles` can attend to the inputs' unpacked pages, and to their recent tokens."""
    layout, recent, dtype = inputs.layout, inputs.recent, inputs.query.dtype
    return (
        compute_capability_of(inputs.query.device) == 90
        and not missing_module("cuda.bindings", "")
        and dtype in (torch.bfloat16, torch.float16)
        and layout.head_size == layout.head_size_v
        and layout.head_size in _WORKERS
        and inputs.sliding_window is None
        and inputs.softcap is None
        and (recent is None or _takes(recent, dtype))
    )


def _takes(recent: RecentInputs, dtype: torch.dtype) -> bool:
    """Whether rings and the step's tokens have the query's dtype, and rings suit copies of 16
    bytes."""
    tensors = (recent.keys, recent.values, recent.key, recent.value)
    aligned_rings = not (recent.keys.data_ptr() | recent.values.data_ptr()) % 16
    return aligned_rings and all(x.dtype == dtype for x in tensors)


def tokens_of_tile(group: int, head_size: int) -> int:
    """Max query tokens of a tile, with `group` query heads per KV head."""
    return max(1, _rows(head_size) // group)


def _rows(head_size: int) -> int:
    """Rows of a tile: tokens times query heads."""
    return 64 * _WORKERS[head_size]


def run_tiles(
    inputs: AttentionInputs, key: torch.Tensor, value: torch.Tensor, work: torch.Tensor
) -> None:
    """Write the rows of the output, and of the LSE, of the query tokens in `work`.

    Does not sync the GPU.

    Args:
        inputs: of `paged_attention`, checked, supported; the pages are not read. With `recent`, the
            last R keys of a query are those, and `key` has earlier ones.
        key, value: of the query's dtype, `[rows, kv_heads, head_size]`, contiguous.
        work: as of `chunks.Chunks`; tiles have at most `tokens_of_tile` query tokens.
    """
    query, recent, device = inputs.query, inputs.recent, inputs.query.get_device()
    kv_heads, head_size = key.shape[1:]
    num_heads, scale = query.shape[1], inputs.scale
    if scale <= 0:  # scores must ascend with logits: the kernel scales their maximum
        query, scale = (-query, -scale) if scale < 0 else (torch.zeros_like(query), 1.0)
    arguments = KernelArguments(
        _Params,
        num_tiles=len(work),
        kv_heads=kv_heads,
        ring=0 if recent is None else recent.keys.shape[2],
        scale=exponent_factors(scale, None)[0],
    )
    matrices = {"query": query, "packed_key": key, "packed_value": value}
    if recent is not None:
        matrices |= {"new_key": recent.key, "new_value": recent.value}
        entries = recent.entries.contiguous()
        arguments.bind(ring_keys=recent.keys, ring_values=recent.values, entries=entries)
    for name, x in matrices.items():
        x = aligned(x)
        setattr(arguments.params, name, _Matrix(x.data_ptr(), *x.stride()[:2]))
        arguments.tensors.append(x)
    arguments.bind(out=inputs.out, work=work)
    arguments.params.out_token, arguments.params.out_head = inputs.out.stride()[:2]
    if inputs.sinks is not None:
        arguments.bind(sinks=inputs.sinks.float().contiguous())
    if inputs.lse is not None:
        arguments.bind(lse=inputs.lse)
    group = num_heads // kv_heads
    items = len(work) * kv_heads * -(-group // _rows(head_size))
    kernel = _kernel(query.dtype, head_size, group, recent.tokens if recent else 0, device)
    threads, ctas = 128 * (1 + _WORKERS[head_size]), min(num_sms(device), items)
    nvrtc.launch(kernel, ctas, threads, (arguments.params,), overlap=True)


@lru_cache(maxsize=64)
def _kernel(
    dtype: torch.dtype, head_size: int, group: int, recent: int, device: int
) -> nvrtc.Kernel:
    macros = {
        "X_BF16": int(dtype == torch.bfloat16),
        "HEAD_SIZE": head_size,
        "GROUP": group,
        "RECENT": recent,
    }
    functions = (("prefill", shared_bytes(head_size)),)
    path = "attention/prefill/sm90/prefill.cu"
    return nvrtc.load(path, tuple(macros.items()), functions, device)["prefill"]


def shared_bytes(head_size: int) -> int:
    """Dynamic shared memory: queries, the ring, barriers."""
    slots = _SLOTS[head_size]
    return (_rows(head_size) + slots * _COLUMNS[head_size]) * head_size * 2 + 16 * (1 + slots)
