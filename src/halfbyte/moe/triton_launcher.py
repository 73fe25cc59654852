"""Launches the four kernels of a MoE layer: sort, gate_up with activation, down, sum."""

from functools import lru_cache

import torch
import triton

from halfbyte.dispatch import compute_capability_of
from halfbyte.kernels.runtime.devices import current_device
from halfbyte.linear.w4a16.triton_kernel import Tiles
from halfbyte.moe.as_loaded import MatrixTensors
from halfbyte.moe.cuda.packed import PackedMatrix
from halfbyte.moe.experts import GatedActivation, WeightFormat
from halfbyte.moe.triton_kernel import (
    ProductKey,
    ProductTiles,
    choose_tiles,
    grouped_kernel,
    kernel_constants,
)
from halfbyte.moe.triton_routing import Routing, sort_pairs, sum_results


def moe_triton(
    hidden: torch.Tensor,
    gate_up: MatrixTensors | PackedMatrix,
    down: MatrixTensors | PackedMatrix,
    activation: GatedActivation,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    batch_invariant: bool = False,
    tiles: ProductTiles | None = None,
) -> torch.Tensor:
    """`moe_experts` in Triton, see `triton_kernel.py`.

    Never syncs the GPU; launches and sizes depend on shapes alone, so that a call can be captured
    in a CUDA graph. The first call for a dtype and a tile size compiles.

    Args:
        hidden: bfloat16, float16 or float32 `[M, H]`, contiguous.
        gate_up, down: of the experts, as loaded, or packed for the dtype of `hidden`.
        activation: of the experts.
        topk_ids, topk_weights: `[M, top_k]`, contiguous.
        batch_invariant: whether a token's bits must not depend on the other tokens.
        tiles: tile sizes; by default from `choose_tiles`.

    Returns:
        `[M, H]` of the dtype of `hidden`.
    """
    interpreted = not hidden.is_cuda
    num_experts, num_pairs = gate_up[0].shape[0], topk_ids.numel()
    if num_pairs == 0:
        return torch.empty_like(hidden)
    tiles = tiles or choose_tiles(
        num_pairs, num_experts, hidden.dtype, _compute_capability_of(hidden.device), batch_invariant
    )
    with current_device(hidden.get_device()):
        routing = sort_pairs(topk_ids, num_experts, tiles.down.m)
        top_k = topk_ids.shape[1]
        middle = _launch(hidden, gate_up, activation, routing, top_k, topk_weights, tiles.gate_up)
        results = _launch(
            middle, down, None, routing, top_k, topk_weights, tiles.down, hidden.dtype
        )
        # The interpreter cannot round to bfloat16.
        narrow = interpreted and hidden.dtype == torch.bfloat16
        dtype = torch.float32 if narrow else hidden.dtype
        return sum_results(results, topk_ids, num_experts, dtype).to(hidden.dtype)


def _launch(
    x: torch.Tensor,
    matrices: MatrixTensors | PackedMatrix,
    activation: GatedActivation | None,
    routing: Routing,
    top_k: int,
    topk_weights: torch.Tensor,
    tiles: Tiles,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`[pairs, n]` of the first product (by sorted pair), or without activation of the second."""
    interpreted, dtype = not x.is_cuda, dtype or x.dtype
    global_scale, bias = matrices.global_scale, matrices.bias
    if isinstance(matrices, PackedMatrix):
        weight, scales, packed_for = matrices.packed, matrices.packed, dtype
        n, k = matrices.n, matrices.k
    else:
        weight, scales, packed_for = matrices.weight, matrices.scales, None
        n, k = weight.shape[1], 2 * weight.shape[2]
    n = n if activation is None else n // 2
    parts = 0 if global_scale is None else global_scale.shape[1]
    weight_format: WeightFormat = "mxfp4" if global_scale is None else "nvfp4"
    product = ProductKey(activation, weight_format, parts, k, bias is not None, packed_for)
    constants = kernel_constants(dtype, product, tiles, interpreted)
    narrow = interpreted and dtype == torch.bfloat16
    out = x.new_empty((routing.pairs.shape[0], n), dtype=torch.float32 if narrow else dtype)
    num_tiles = routing.tiles.shape[1]
    grouped_kernel[(num_tiles * triton.cdiv(n, constants["tile_n"]),)](
        x=x,
        weight=weight,
        scales=scales.view(torch.uint8),
        global_scale=topk_weights if global_scale is None else global_scale,
        bias=topk_weights if bias is None else bias,
        out=out,
        pairs=routing.pairs,
        tiles=routing.tiles,
        pair_weights=topk_weights,
        num_tiles=num_tiles,
        n=n,
        k=k,
        top_k=top_k,
        **constants,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


_compute_capability_of = lru_cache(maxsize=8)(compute_capability_of)
