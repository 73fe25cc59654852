"""Launches the two CUDA kernels of a MoE layer for one token."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import allocate, contiguous_memory
from halfbyte.linear.w4a16.gpu import dtype_macros, gpu_of
from halfbyte.moe.cuda.launcher import Params, fraction_of, product_arguments, work_of
from halfbyte.moe.cuda.packed import PackedMatrix
from halfbyte.moe.cuda.pairs import Pairs, pairs_of
from halfbyte.moe.cuda.plan import Work
from halfbyte.moe.cuda.token_plan import TokenPlan, ctas_per_sm, make_token_plan, usual_token_plans
from halfbyte.moe.experts import GatedActivation


def run(
    hidden: torch.Tensor,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    activation: GatedActivation,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """`launcher.run` for one token, see `token.cu`.

    Only if `make_token_plan` has plans. Launches and sizes depend on shapes alone. Results are not
    those of `launcher.run` bit for bit: experts' are added before they are rounded.
    """
    pairs = pairs_of(topk_ids, topk_weights, gate_up.packed.shape[0])
    middle = _launch(hidden, gate_up, activation, pairs, (pairs.count, down.k))
    return _launch(middle, down, None, pairs, (1, down.n))


def _launch(
    x: torch.Tensor,
    matrices: PackedMatrix,
    activation: GatedActivation | None,
    pairs: Pairs,
    shape: tuple[int, int],
) -> torch.Tensor:
    """A product; the result has this shape."""
    device = x.get_device()
    work, gpu = work_of(matrices, activation), gpu_of(device)
    plan = make_token_plan(work, pairs.count, gpu)
    assert plan is not None, "the caller looks for plans"
    grid = plan.grid(work, pairs.count, gpu.num_sms)
    shares = {"max_entries": pairs.count, "fraction": fraction_of(grid)}
    arguments = product_arguments(Params, matrices, activation, **shares)
    arguments.params.pairs = pairs
    out = allocate(contiguous_memory(shape, x.dtype), device)
    arguments.bind(weight=matrices.packed, x=x, out=out)
    kernel = _kernel(x.dtype, plan, work, device)
    kernel = kernel._replace(shared_bytes=plan.shared_bytes(work, pairs.count))
    nvrtc.launch(
        *(kernel, grid, plan.threads, (arguments.params,)),
        overlap=True,
        ctas_per_sm=ctas_per_sm(work),
    )
    return out


def compile_token(works: tuple[Work, Work], dtype: torch.dtype, device: int) -> None:
    """Compile every kernel that a layer may need, so that graph capture compiles nothing."""
    variants = [(plan, work) for work in works for plan in usual_token_plans(work, gpu_of(device))]

    def compile_one(variant: tuple[TokenPlan, Work]) -> None:
        _kernel(dtype, *variant, device)

    with ThreadPoolExecutor(max(1, len(variants))) as pool:
        list(pool.map(compile_one, variants))


@lru_cache(maxsize=4096)
def _kernel(dtype: torch.dtype, plan: TokenPlan, work: Work, device: int) -> nvrtc.Kernel:
    functions = (("moe_token", gpu_of(device).block_bytes),)
    macros = (*dtype_macros(dtype), *plan.macros(work))
    path = "moe/cuda/token.cu"
    return nvrtc.load(path, macros, functions, device, largest_share=True)["moe_token"]
