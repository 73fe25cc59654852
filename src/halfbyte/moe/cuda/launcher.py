"""Launches the CUDA kernels of a MoE layer: gate_up with activation, down, sum."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import inf
from typing import NamedTuple

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import allocate, contiguous_memory
from halfbyte.kernels.runtime.parameters import KernelArguments
from halfbyte.linear.w4a16.gpu import dtype_macros, gpu_of
from halfbyte.moe.cuda.packed import PackedMatrix
from halfbyte.moe.cuda.pairs import DTYPES, Pairs, pairs_of
from halfbyte.moe.cuda.plan import StreamingPlan, Work, make_plan, max_entries, usual_plans
from halfbyte.moe.cuda.sums import compile_sum, sum_results
from halfbyte.moe.experts import GatedActivation, WeightFormat


class Params(ctypes.Structure):
    """`Params` of `loader.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "global_scale", "bias")),
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        ("pairs", Pairs),
        *((name, ctypes.c_int) for name in ("parts", "bias_dtype", "max_entries")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "up_offset")),
        *((name, ctypes.c_void_p) for name in ("tickets", "sum")),
        ("num_tickets", ctypes.c_int),
        ("fraction", ctypes.c_uint),
    )


def run(
    hidden: torch.Tensor,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    activation: GatedActivation,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """`moe_experts` in CUDA C++ for few tokens per expert, see `experts.cu`.

    Never syncs the GPU; launches and sizes depend on shapes alone, so that a call can be captured
    in a CUDA graph, after `compile_experts` or a first call. A token's bits depend on the number
    of tokens, not on the other tokens' values and experts.

    Args:
        hidden: bfloat16 or float16 `[M, H]`, contiguous.
        gate_up, down: of the experts; H and I multiples of 32.
        activation: of the experts.
        topk_ids: int32 or int64 `[M, top_k]`, contiguous.
        topk_weights: floating point `[M, top_k]`, contiguous.

    Returns:
        `[M, H]` of the dtype of `hidden`.
    """
    m = topk_ids.shape[0]
    if m == 0:
        return torch.empty_like(hidden)
    pairs = pairs_of(topk_ids, topk_weights, gate_up.packed.shape[0])
    device, work = hidden.get_device(), work_of(down, None)
    if not _plan(work, m, pairs.top_k, device).few:
        middle = _launch(hidden, gate_up, activation, pairs, m)
        return sum_results(_launch(middle, down, None, pairs, m), pairs)
    last = _Last(
        allocate(contiguous_memory((work.tiles,), torch.int32), device),
        allocate(contiguous_memory((m, down.n), hidden.dtype), device),
    )
    middle = _launch(hidden, gate_up, activation, pairs, m, last)
    _launch(middle, down, None, pairs, m, last)
    return last.sum


class _Last(NamedTuple):
    """What the last warp of a tile needs that adds its results (`last.cuh`)."""

    tickets: torch.Tensor
    sum: torch.Tensor


def _launch(
    x: torch.Tensor,
    matrices: PackedMatrix,
    activation: GatedActivation | None,
    pairs: Pairs,
    m: int,
    last: _Last | None = None,
) -> torch.Tensor:
    """`[pairs, N/2]` of the first product, or without activation `[pairs, N]` of the second."""
    device = x.get_device()
    work = work_of(matrices, activation)
    gpu = gpu_of(device)
    plan = _plan(work, m, pairs.top_k, device)
    pairs.columns_log2 = plan.columns.bit_length() - 1
    entries = max_entries(pairs.count, work.num_experts, plan.columns)
    grid = plan.grid(work, pairs.count, gpu.num_sms)
    shares = {"max_entries": entries, "fraction": fraction_of(grid)}
    arguments = product_arguments(Params, matrices, activation, **shares)
    arguments.params.pairs = pairs
    columns = work.n if activation is None else work.n // 2
    out = allocate(contiguous_memory((pairs.count, columns), x.dtype), device)
    arguments.bind(weight=matrices.packed, x=x, out=out)
    if last:
        arguments.bind(tickets=last.tickets, sum=last.sum)
        arguments.params.num_tickets = len(last.tickets)
    kernel = _product_kernel(x.dtype, plan.macros(work), gpu.block_bytes, device)
    kernel = kernel._replace(shared_bytes=plan.shared_bytes(work, pairs.count, gpu.num_sms))
    nvrtc.launch(
        *(kernel, grid, plan.threads, (arguments.params,)),
        overlap=True,
        ctas_per_sm=plan.ctas,
    )
    return out


def fraction_of(grid: int) -> int:
    """`fraction` of `Params`: what a CTA has of all work, in units of 2^-32."""
    return min(-(-(2**32) // grid), 2**32 - 1)


def product_arguments(
    params: type[ctypes.Structure],
    matrices: PackedMatrix,
    activation: GatedActivation | None,
    **fields: int,
) -> KernelArguments:
    """Arguments of a product: global scales, bias and activation.

    Args:
        params: of the kernel, with these fields.
        matrices: of the experts.
        activation: None for the second product.
        fields: further ones.
    """
    scale, bias = matrices.global_scale, matrices.bias
    gated = activation or GatedActivation()
    arguments = KernelArguments(
        params,
        parts=1 if scale is None else scale.shape[1],
        bias_dtype=0 if bias is None else DTYPES[bias.dtype],
        alpha=gated.alpha,
        limit=inf if gated.limit is None else gated.limit,
        up_offset=gated.up_offset,
        **fields,
    )
    if scale is not None:
        arguments.bind(global_scale=scale)
    if bias is not None:
        arguments.bind(bias=bias)
    return arguments


def work_of(matrices: PackedMatrix, activation: GatedActivation | None) -> Work:
    """The product with an activation, or without that of `down`."""
    weight_format: WeightFormat = "mxfp4" if matrices.global_scale is None else "nvfp4"
    interleaved = activation is not None and activation.interleaved
    sizes = matrices.n, matrices.k, matrices.packed.shape[0]
    return Work(*sizes, weight_format, activation is not None, interleaved)


def compile_experts(
    gate_up: PackedMatrix,
    down: PackedMatrix,
    activation: GatedActivation,
    dtype: torch.dtype,
    device: int,
) -> None:
    """Compile every kernel that a layer may need, so that graph capture compiles nothing."""
    gpu = gpu_of(device)
    works = work_of(gate_up, activation), work_of(down, None)
    variants = {plan.macros(work) for work in works for plan in usual_plans(work, gpu)}

    def compile_one(macros: tuple[tuple[str, int], ...]) -> None:
        _product_kernel(dtype, macros, gpu.block_bytes, device)

    with ThreadPoolExecutor(len(variants)) as pool:
        list(pool.map(compile_one, variants))
    compile_sum(dtype, is_sorted=False, device=device)


@lru_cache(maxsize=4096)
def _plan(work: Work, m: int, top_k: int, device: int) -> StreamingPlan:
    return make_plan(work, m, top_k, gpu_of(device))


@lru_cache(maxsize=4096)
def _product_kernel(
    dtype: torch.dtype, macros: tuple[tuple[str, int], ...], block_bytes: int, device: int
) -> nvrtc.Kernel:
    functions = (("moe_product", block_bytes),)
    macros = (*dtype_macros(dtype), *macros)
    path = "moe/cuda/experts.cu"
    return nvrtc.load(path, macros, functions, device, largest_share=True)["moe_product"]
