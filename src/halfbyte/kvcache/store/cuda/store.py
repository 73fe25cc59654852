"""CUDA C++ on NVIDIA GPUs from SM80: recipes that weigh rounding errors, one launch, no sync.

Recipes without weights go to Triton, which stored 8,192 tokens of them faster on an H200
(`dev/LOG.md`).
"""

import ctypes
from functools import lru_cache
from typing import Any, ClassVar

import torch

from halfbyte.dispatch import Answer, missing_module, runs_on_gpu
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import num_sms, shared_bytes_of_sm
from halfbyte.kernels.runtime.parameters import KernelArguments, aligned
from halfbyte.kvcache.recent import RingSlots
from halfbyte.kvcache.store.base import (
    StoreBackend,
    StoreConfig,
    StoreInputs,
    global_scale_on,
)
from halfbyte.kvcache.store.cuda.variant import (
    BY_BLOCK,
    BY_LANES,
    BY_ROW,
    BY_TILE,
    TILE,
    V_KINDS,
    StoreVariant,
)
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout, page_stride
from halfbyte.numerics.nvfp4 import BLOCK_SIZE

_OLDEST = 80
_HEAD_SIZES = (64, 128, 256)
_K_FORMATS = tuple(dtype for dtype in V_KINDS if dtype.is_nvfp4)
_TILES_PER_SM = 12
"""Tiles that one SM works on; 16 if they lack their first blocks, which then takes longer."""
_SHARED_BYTES_OF_MORE = 228 * 1024
"""Shared memory of an SM for 16 of them, of heads of 128."""
_ROWS_PER_SM = 32
"""Min (token, head) rows per SM for error feedback by tiles of 32 tokens. With fewer, one warp per
row is faster, although it does six times the work."""

_MAX_TOKENS = 4
"""Max tokens per thread, a power of two: it loads means and weights once for all of its tokens."""
_BLOCKS_PER_SM = 1024
"""Min blocks of 16 values per SM before a thread takes another token: the GPU stays full."""


class _Params(ctypes.Structure):
    """`Params` of `rows.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key", "value")),
        *((name, ctypes.c_uint64) for name in ("key_token", "key_head")),
        *((name, ctypes.c_uint64) for name in ("value_token", "value_head")),
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("page_stride", "capacity")),
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("positions", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "mean", "partner_mean")),
        *((name, ctypes.c_void_p) for name in ("first_keys", "first_values")),
        *((name, ctypes.c_void_p) for name in ("feedback", "k_weights", "v_weights")),
        *((name, ctypes.c_void_p) for name in ("ring_keys", "ring_values")),
        *((name, ctypes.c_void_p) for name in ("ring_rows", "ring_owners", "ring_slots")),
        *((name, ctypes.c_float) for name in ("k_scale_number", "v_scale_number")),
        *((name, ctypes.c_uint32) for name in ("num_slots", "last_slot", "num_first")),
        *((name, ctypes.c_uint32) for name in ("num_segments", "num_kept", "ring")),
        *((name, ctypes.c_uint32) for name in ("last_position", "tokens", "last_token")),
        *((name, ctypes.c_uint32) for name in ("k_ctas", "v_ctas")),
    )


class CudaStore(StoreBackend):
    """`store.cu`; compiled with NVRTC at first use."""

    name: ClassVar[str] = "cuda"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later, where `cuda-bindings` is installed."""
        return runs_on_gpu(
            compute_capability,
            _OLDEST,
            lambda: missing_module("cuda.bindings", "comes with PyTorch for CUDA"),
            "writes NVFP4 pages by recipes that weigh rounding errors",
        )

    @classmethod
    def can_implement(cls, config: StoreConfig) -> Answer:
        """Recipes with weighted errors, K in NVFP4, V in NVFP4 or FP8, heads of 64, 128 or 256."""
        layout = config.layout
        if not config.weighs_errors:
            return False, "stores only by recipes that weigh rounding errors, unlike `plain`"
        if layout.k_dtype not in _K_FORMATS:
            return False, f"writes K in NVFP4, not {layout.k_dtype}"
        if layout.head_size not in _HEAD_SIZES or layout.head_size_v % BLOCK_SIZE:
            return False, (
                f"takes K of 64, 128 or 256 and V of a multiple of {BLOCK_SIZE}, "
                f"not {layout.head_size} and {layout.head_size_v}"
            )
        return config.answer_of("cuda", V_KINDS)

    @classmethod
    def store(cls, inputs: StoreInputs) -> None:
        """See `StoreBackend.store`; slots past the last page are skipped."""
        store_transformed(inputs)


def store_transformed(inputs: StoreInputs) -> None:
    """Quantize and write tokens of a recipe; all tensors are on one GPU.

    Does not sync the GPU; slots past the last page are skipped. Inputs whose rows are not aligned
    to 16 bytes are copied first.

    Args:
        inputs: checked, with a transform and positions. Scales may be floats, or float32 tensors
            of one element; one on a GPU is read there.

    Raises:
        ValueError: a float scale that `KVCacheDType.check_scale` refuses, or a scale of
            several elements.
    """
    pages, slot_mapping, layout = inputs.pages, inputs.slot_mapping, inputs.layout
    transform, positions, recent = inputs.transform, inputs.positions, inputs.recent
    assert transform is not None
    assert positions is not None
    num_slots = slot_mapping.shape[0]
    arguments = KernelArguments(_Params, num_slots=num_slots, page_stride=page_stride(pages))
    arguments.params.capacity = pages.shape[0] * layout.block_size
    scales = {
        "k_scale": global_scale_on(pages.device, "k_scale", inputs.k_scale, layout.k_dtype),
        "v_scale": global_scale_on(pages.device, "v_scale", inputs.v_scale, layout.v_dtype),
    }
    key, value = aligned(inputs.key), aligned(inputs.value)
    ring = recent is not None and num_slots > 0 and _share_dtypes(recent, key, value)
    if recent is not None and not ring:
        recent.write(key, value)
    if num_slots == 0:
        return
    slots = slot_mapping if slot_mapping.stride(0) < 1 << 29 else slot_mapping.contiguous()
    arguments.bind(key=key, value=value, pages=pages, slots=slots)
    arguments.bind(positions=positions.contiguous())
    params = arguments.params
    params.key_token, params.key_head = key.stride()[:2]
    params.value_token, params.value_head = value.stride()[:2]
    params.slot_bytes = slots.stride(0) * slots.element_size()
    params.last_slot = num_slots - 1
    for name, scale in scales.items():
        if isinstance(scale, torch.Tensor):
            arguments.bind(**{name: scale})
        else:
            setattr(params, f"{name}_number", scale)
    fill = _blocks(layout, num_slots) / (_BLOCKS_PER_SM * num_sms(pages.get_device()) or 1)
    variant = StoreVariant(
        key.dtype,
        value.dtype,
        *_bind_transform(arguments, transform, layout),
        by=_unit(transform, num_slots * layout.num_kv_heads, pages.get_device(), fill < 1),
        ring=ring,
        in_words=(pages.data_ptr() | params.page_stride) % 4 == 0,
        small_grid=fill < 1,
    )
    variant = variant._replace(left_out=_leaves_out(variant, layout, num_slots, pages.get_device()))
    tokens = max(1, min(_MAX_TOKENS, int(fill)))
    params.tokens = tokens = 1 << tokens.bit_length() - 1
    params.last_token = tokens - 1
    params.k_ctas = variant.k_ctas(layout, num_slots, tokens)
    params.v_ctas = variant.v_ctas(layout, num_slots, tokens)
    ctas = params.k_ctas + params.v_ctas
    if recent is not None and ring:
        arguments.bind(**dict(zip(_RING_NAMES, recent, strict=True)))
        params.num_kept, params.ring = len(recent.rows), recent.keys.shape[2]
        row = max(x.shape[2] * x.element_size() for x in (key, value)) // 16
        ctas += -(-len(recent.rows) * layout.num_kv_heads * row // variant.threads)
    kernel = _kernel(layout, variant, pages.get_device())
    nvrtc.launch(kernel, ctas, variant.threads, [params], overlap=True)


def _leaves_out(variant: StoreVariant, layout: PageLayout, num_slots: int, device: int) -> bool:
    """Whether there are more tiles than fit the GPU, unless they lack their first blocks.

    Without weights for K the kernel has no registers for more tiles.
    """
    has_registers = variant.k_weighted and not variant.small_grid
    if variant.by != BY_TILE or layout.head_size != 128 or not has_registers:
        return False
    tiles = layout.num_kv_heads * -(-num_slots // TILE)
    many = tiles > _TILES_PER_SM * num_sms(device)
    return many and shared_bytes_of_sm(device) >= _SHARED_BYTES_OF_MORE


_RING_NAMES = ("ring_keys", "ring_values", "ring_rows", "ring_owners", "ring_slots")


def _bind_transform(
    arguments: KernelArguments, transform: KVTransform, layout: PageLayout
) -> tuple[torch.dtype | None, bool, int, bool, bool]:
    """Bind the transform's tensors; returns `StoreVariant`'s fields from `first_dtype` on."""
    tables, first = transform.mean_tables, transform.first_keys
    arguments.params.last_position = 1
    if tables is not None:
        names = ("cos", "sin", "mean", "partner_mean")
        arguments.bind(**dict(zip(names, tables, strict=True)))
        arguments.params.num_segments = len(tables.cos)
        last = min(len(tables.cos) * transform.segment, 1 << 32) - 1
        arguments.params.last_position = max(last, 1)
    first_dtype = None
    if first is not None and transform.first_values is not None and len(first):
        first_dtype = first.dtype
        arguments.bind(
            first_keys=first.contiguous(),
            first_values=transform.first_values.to(first_dtype).contiguous(),
        )
        arguments.params.num_first = len(first)
    v_weights = transform.v_weights if layout.v_dtype.is_nvfp4 else None
    weights = {"k_weights": transform.k_weights, "v_weights": v_weights}
    for name, x in (*weights.items(), ("feedback", transform.feedback)):
        if x is not None:
            arguments.bind(**{name: x.contiguous()})
    segment = 0 if tables is None else transform.segment
    return (
        first_dtype,
        transform.rotate,
        segment,
        transform.k_weights is not None,
        v_weights is not None,
    )


def _unit(transform: KVTransform, rows: int, device: int, small_grid: bool) -> int:
    """A warp's part of K: blocks, rows, or tiles of rows; `rows` (token, head) pairs in total."""
    if transform.feedback is None:
        return BY_LANES if small_grid and transform.k_weights is not None else BY_BLOCK
    return BY_TILE if rows >= _ROWS_PER_SM * num_sms(device) else BY_ROW


def _blocks(layout: PageLayout, num_slots: int) -> int:
    return num_slots * layout.num_kv_heads * (layout.head_size + layout.head_size_v) // BLOCK_SIZE


def _share_dtypes(recent: RingSlots, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether tokens can be copied to the rings byte by byte."""
    return recent.keys.dtype == key.dtype and recent.values.dtype == value.dtype


@lru_cache(maxsize=256)
def _kernel(layout: PageLayout, variant: StoreVariant, device: int) -> Any:
    macros = tuple(variant.macros(layout).items())
    entries = (("store", variant.shared_bytes(layout)),)
    return nvrtc.load("kvcache/store/cuda/store.cu", macros, entries, device)["store"]
