"""Decode attention in CUDA C++ for NVIDIA GPUs from SM80; reads packed pages directly."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar

import torch

from halfbyte.attention.base import (
    AttentionConfig,
    AttentionInputs,
    GpuAttention,
    OverlapsStore,
)
from halfbyte.attention.decode.plan import MERGE_THREADS, DecodePlan, PlanView, plan_of, slice_ctas
from halfbyte.attention.decode.recipe import RecipeParams, RecipeVariant, bind_recipe
from halfbyte.attention.decode.variant import (
    WARPS,
    DecodeVariant,
    choose_variant,
    macros,
    unsupported_reason,
)
from halfbyte.dispatch import Answer
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import current_device
from halfbyte.kernels.runtime.parameters import aligned
from halfbyte.kernels.runtime.tensor_maps import TensorMap, tensor_map_of_pages
from halfbyte.layouts import PageLayout, page_stride

_MEAN_TOKENS = 64
"""Tokens that must share a mean of K: the kernels load one bias per (at most) 64 tokens."""
_MAX_MEAN_QUERIES = 8
"""Max mean query tokens per sequence; with more, the same pages would be unpacked repeatedly."""


class _Output(ctypes.Structure):
    """`Output` of `output.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "lse", "sinks")),
        ("stride_token", ctypes.c_uint64),
        ("stride_head", ctypes.c_uint64),
    )


class _Params(ctypes.Structure):
    """`Params` of `params.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "pages", "partial_out", "partial_ml")),
        ("plan", PlanView),
        *((name, ctypes.c_void_p) for name in ("block_tables", "k_scale", "v_scale")),
        ("query_stride_token", ctypes.c_uint64),
        ("query_stride_head", ctypes.c_uint64),
        ("page_stride", ctypes.c_uint32),
        ("max_pages", ctypes.c_int),
        ("num_seqs", ctypes.c_int),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int),
        ("follows_store", ctypes.c_int),
        ("output", _Output),
        ("recipe", RecipeParams),
    )


class _MergeParams(ctypes.Structure):
    """`MergeParams` of `merge.cu`."""

    _fields_ = (
        ("partial_out", ctypes.c_void_p),
        ("partial_ml", ctypes.c_void_p),
        ("plan", PlanView),
        ("output", _Output),
        ("num_tokens", ctypes.c_int),
    )


class CudaAttention(GpuAttention, OverlapsStore):
    """`run`; compiled at first use with NVRTC."""

    name: ClassVar[str] = "cuda"
    module: ClassVar[str] = "cuda.bindings"
    module_source: ClassVar[str] = "CUDA builds of PyTorch install it"
    purpose: ClassVar[str] = "reads packed pages, for decoding"
    takes_transforms: ClassVar[bool] = True
    takes_recent: ClassVar[bool] = True

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """What the kernel's layouts allow."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.num_tokens > _MAX_MEAN_QUERIES * config.num_seqs:
            return False, "is for decoding: a few query tokens per sequence"
        if not config.aligned_pages:
            return False, "needs pages aligned to 16 bytes, less than 4 GiB apart"
        layout = config.layout
        reason = unsupported_reason(layout, config.query_dtype)
        if reason is None and config.segment % _MEAN_TOKENS:
            reason = f"means of multiples of {_MEAN_TOKENS} tokens, not {config.segment}"
        group = config.num_heads // layout.num_kv_heads
        mean_queries = config.num_tokens / max(1, config.num_seqs)
        machine = config.compute_capability
        recipe = RecipeVariant(
            recent=int(config.recent), pairs=config.pairs, knows_first=config.transform
        )
        if reason is None and not choose_variant(
            layout, group, mean_queries, config.batch_invariant, machine, recipe
        ):
            reason = "needs more shared memory than this GPU has"
        return reason is None, reason or "reads packed pages"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`."""
        if inputs.query.shape[0]:
            run(inputs)

    @classmethod
    def store_and_forward(cls, inputs: AttentionInputs, store: Callable[[], None]) -> None:
        """The kernel starts before `store` has ended."""
        if inputs.query.shape[0]:
            run(inputs, store=store)
        else:
            store()


def _on_device(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.float()
    return torch.full((), scale, dtype=torch.float32, device=device)


def run(
    inputs: AttentionInputs,
    plan: DecodePlan | None = None,
    store: Callable[[], None] | None = None,
) -> None:
    """Fill `inputs.out`, and `inputs.lse` where it is not None. Does not sync the GPU.

    Args:
        inputs: of `paged_attention`, checked, all on one GPU.
        plan: `make_plan` of the same work; by default taken from `inputs.plans`.
        store: stores the step's tokens, at least one; None if they are in the pages.

    Raises:
        ValueError: pages that are not aligned to 16 bytes, or 4 GiB apart.
    """
    pages, layout, out = inputs.pages, inputs.layout, inputs.out
    stride = _stride(pages)
    recipe = bind_recipe(inputs)
    plan = plan or plan_of(inputs.packed, recipe.variant)
    block_tables = inputs.block_tables.contiguous()
    k_scale, v_scale = (_on_device(x, pages.device) for x in (inputs.k_scale, inputs.v_scale))
    sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
    query = aligned(inputs.query)
    kernels = _kernels(
        layout,
        query.shape[1] // layout.num_kv_heads,
        query.dtype,
        bool(inputs.softcap),
        plan.variant,
        recipe.variant,
        query.device.index,
    )
    params = _Params(
        query=query.data_ptr(),
        pages=pages.data_ptr(),
        partial_out=plan.partial_out.data_ptr(),
        partial_ml=plan.partial_ml.data_ptr(),
        plan=plan.view,
        block_tables=block_tables.data_ptr(),
        k_scale=k_scale.data_ptr(),
        v_scale=v_scale.data_ptr(),
        query_stride_token=query.stride(0),
        query_stride_head=query.stride(1),
        page_stride=stride,
        max_pages=block_tables.shape[1],
        num_seqs=block_tables.shape[0],
        softmax_scale=inputs.scale,
        softcap=inputs.softcap or 0.0,
        window=inputs.packed.sliding_window or 0,
        follows_store=int(store is not None),
        output=_Output(
            out.data_ptr(),
            None if inputs.lse is None else inputs.lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.stride(0),
            out.stride(1),
        ),
        recipe=recipe.struct,
    )
    arguments: list[nvrtc.Argument] = [params]
    if plan.variant.whole_pages:
        arguments.append(_pages_map(pages if len(pages) else plan.data[None], stride, layout))
    # Directly before the kernel, which relies on no other launch between them.
    if store is not None:
        store()
    nvrtc.launch(
        *(kernels["decode"], plan.slots, 32 * WARPS, arguments),
        overlap=True,
        ctas_per_sm=plan.variant.ctas,
    )
    _merge(plan, kernels, params.output, inputs)


def _stride(pages: torch.Tensor) -> int:
    """Bytes from page to page; raises ValueError for what the kernel cannot copy."""
    stride = page_stride(pages)
    if pages.data_ptr() % 16 or stride % 16 or stride >= 2**32:
        raise ValueError(
            f"pages: the kernel copies 16 bytes at a time; the base {pages.data_ptr():#x} and the "
            f"stride {stride} (below 2^32) must be multiples of 16"
        )
    return stride


def _merge(
    plan: DecodePlan, kernels: dict[str, nvrtc.Kernel], output: _Output, inputs: AttentionInputs
) -> None:
    """Merge the partial results of rows that several units work on."""
    num_tokens, num_heads, _ = inputs.query.shape
    params = _MergeParams(
        partial_out=plan.partial_out.data_ptr(),
        partial_ml=plan.partial_ml.data_ptr(),
        plan=plan.view,
        output=output,
        num_tokens=num_tokens,
    )
    rows, head_size_v = num_tokens * num_heads, inputs.layout.head_size_v
    if plan.merge in ("merge_8", "merge_32"):
        grid = slice_ctas(rows, head_size_v)
    else:
        grid = rows * (head_size_v // 32)
    nvrtc.launch(kernels[plan.merge], grid, MERGE_THREADS[plan.merge], [params], overlap=True)


@lru_cache(maxsize=256)
def _kernels(
    layout: PageLayout,
    group: int,
    dtype: torch.dtype,
    softcap: bool,
    variant: DecodeVariant,
    recipe: RecipeVariant,
    device: int,
) -> dict[str, nvrtc.Kernel]:
    options = tuple((macros(layout, group, dtype, softcap, variant) | recipe.macros()).items())
    entry = ("decode", variant.cta_bytes(layout))
    return {
        **nvrtc.load(variant.source, options, (entry,), device),
        **nvrtc.load(
            "attention/decode/merge.cu", options, tuple((name, 0) for name in MERGE_THREADS), device
        ),
    }


def _pages_map(pages: torch.Tensor, stride: int, layout: PageLayout) -> TensorMap:
    """TMA map of pages with one KV head, as boxes of rows of K's width.

    Args:
        pages: at least one; if there are none, any memory, since nothing is read.
        stride: bytes from page to page; 0 for a single page.
    """
    width = layout.k_dtype.data_bytes(layout.head_size)
    rows = layout.page_bytes // width
    with current_device(pages.get_device()):
        return tensor_map_of_pages(
            pages.data_ptr(), len(pages), rows, width, stride or rows * width
        )
