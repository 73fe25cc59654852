"""Launcher of the Triton attention kernels (`kernels.py`): every format, decode and prefill.

There is no sync: the grid and the work of programs depend on shapes only (`plan.py`), so that a
launch can be captured in a CUDA graph and follows lengths and block tables that change between
replays.
"""

from functools import lru_cache
from typing import Any

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.paged.kernels import attend_kernel, merge_kernel
from halfbyte.attention.paged.plan import (
    AttendPlan,
    Tiles,
    exponent_factors,
    gpu_of,
    make_plan,
    operand_dtype,
)
from halfbyte.attention.queries.launcher import TransformedQuery, bias_bytes, transform_queries
from halfbyte.kernels.formats.dot_operands import dot_operand
from halfbyte.kernels.formats.kv_tiles import (
    operand_shift,
    page_stride_of,
    scale_factor,
    side_geometry,
)
from halfbyte.kernels.runtime.devices import current_device
from halfbyte.layouts import PageLayout

_MERGED_AT_ONCE = 16
"""Splits per iteration of the merge; fixed, because results depend on it."""
_MAX_BIAS_BYTES = 2**28
"""Max bytes of biases (`q . mean` of segments) per launch."""


def attend(inputs: AttentionInputs, plan: AttendPlan | None = None) -> None:
    """Fill `inputs.out`, and `inputs.lse` where it is not None. Does not sync the GPU.

    Args:
        inputs: of `paged_attention`, checked, all on one GPU. Scales may be floats, or tensors of
            one element; one on the GPU is read there.
        plan: overrides `make_plan`.

    Raises:
        ValueError: pages whose alignment does not suit a 16- or 32-bit format.
    """
    query, pages, layout, out = inputs.query, inputs.pages, inputs.layout, inputs.out
    num_tokens, num_heads, _ = query.shape
    num_seqs, max_pages = inputs.block_tables.shape
    if num_tokens == 0:
        return
    page_stride = page_stride_of(pages, layout)
    gpu = gpu_of(query.device)
    plan = plan or make_plan(
        layout,
        query.dtype,
        num_heads,
        num_tokens,
        num_seqs,
        max_pages * layout.block_size,
        inputs.sliding_window,
        inputs.batch_invariant,
        gpu,
    )
    kernel = kernel_constants(layout, query.dtype, num_heads, plan.tiles, gpu.capability)
    query = query if query.stride(2) == 1 else query.contiguous()
    block_tables = inputs.block_tables
    block_tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    k_factor, k_global = scale_factor(inputs.k_scale, layout.k_dtype, query.device)
    v_factor, v_global = scale_factor(inputs.v_scale, layout.v_dtype, query.device)
    unit = k_factor * 2.0 ** operand_shift(kernel["k"].kind, kernel["casts"])
    exponents, cap = exponent_factors(inputs.scale, inputs.softcap)
    out_scale = v_factor * 2.0 ** operand_shift(kernel["v"].kind, kernel["casts"])
    tokens_per_launch = plan.tokens_per_launch
    if inputs.transform is not None:
        tokens_per_launch = min(
            tokens_per_launch, max(1, _MAX_BIAS_BYTES // max(1, bias_bytes(inputs)))
        )
    merged_rows = (plan.num_splits, min(tokens_per_launch, num_tokens), num_heads)
    if not plan.merges:
        merged_rows = (0, 0, 0)
    partial_out = query.new_empty((*merged_rows, layout.head_size_v), dtype=torch.float32)
    partial_stats = query.new_empty((*merged_rows, 2), dtype=torch.float32)
    closing = {
        "v_global_on_device": v_global is not None,
        "has_sinks": inputs.sinks is not None,
        "has_lse": inputs.lse is not None,
    }
    # Any pointer stands for what is absent and never read.
    v_global_pointer = partial_stats if v_global is None else v_global
    sinks_pointer = partial_stats if inputs.sinks is None else inputs.sinks.contiguous()
    lse_pointer = partial_stats if inputs.lse is None else inputs.lse
    heads_per_tile = min(kernel["group"], plan.tiles.block_m)
    head_tiles = layout.num_kv_heads * -(-kernel["group"] // heads_per_tile)
    with current_device(query.get_device()):
        for first in range(0, num_tokens, tokens_per_launch):
            last = min(num_tokens, first + tokens_per_launch)
            tiles = (last - first) // (plan.tiles.block_m // heads_per_tile) + num_seqs
            made = TransformedQuery(query[first:last])
            if inputs.transform is not None:
                made = transform_queries(inputs, exponents, slice(first, last))
            attend_kernel[(tiles, head_tiles, plan.num_splits)](
                made.query,
                pages,
                block_tables,
                inputs.query_start_loc.contiguous(),
                inputs.seq_lens.contiguous(),
                partial_stats if k_global is None else k_global,
                v_global_pointer,
                sinks_pointer,
                out,
                lse_pointer,
                partial_out,
                partial_stats,
                *(partial_stats if x is None else x for x in made[1:5]),
                exponents * unit,
                cap,
                out_scale,
                inputs.sliding_window or 0,
                num_seqs,
                first,
                last,
                plan.num_splits,
                block_tables.stride(0),
                made.num_segments,
                made.query.stride(0),
                made.query.stride(1),
                *out.stride(),
                page_stride,
                k_global_on_device=k_global is not None,
                windowed=inputs.sliding_window is not None,
                capped=bool(inputs.softcap),
                segment=made.segment,
                knows_first=made.first_scores is not None,
                split=plan.merges,
                split_length=plan.split_length,
                num_warps=plan.tiles.num_warps,
                num_stages=plan.tiles.num_stages,
                **closing,
                **kernel,
            )
            if plan.merges:
                merge_kernel[(last - first, num_heads)](
                    partial_out,
                    partial_stats,
                    v_global_pointer,
                    sinks_pointer,
                    out,
                    lse_pointer,
                    out_scale,
                    plan.num_splits,
                    first,
                    last - first,
                    *out.stride(),
                    num_heads=num_heads,
                    head_size_v=layout.head_size_v,
                    padded_v=1 << (layout.head_size_v - 1).bit_length(),
                    block=_MERGED_AT_ONCE,
                    **closing,
                )


@lru_cache(maxsize=256)
def kernel_constants(
    layout: PageLayout,
    query_dtype: torch.dtype,
    num_heads: int,
    tiles: Tiles,
    capability: int,
) -> dict[str, Any]:
    """Compile-time constants, in addition to the options of a call.

    Args:
        capability: of the GPU (90 for SM90); 0 for Triton's interpreter, which has no inline
            assembly and no true bfloat16 matmul.
    """
    operands = [operand_dtype(side, query_dtype) for side in (layout.k_dtype, layout.v_dtype)]
    return {
        "k": side_geometry(layout, "k"),
        "v": side_geometry(layout, "v"),
        "kv_heads": layout.num_kv_heads,
        "group": num_heads // layout.num_kv_heads,
        "k_operand": dot_operand(operands[0], capability == 0),
        "v_operand": dot_operand(operands[1], capability == 0),
        # bfloat16 reaches beyond float16; a power of two per row brings it back.
        "scale_query": operands[0] == torch.float16 and query_dtype == torch.bfloat16,
        "block_m": tiles.block_m,
        "block_n": tiles.block_n,
        "ptx": capability > 0,
        # wgmma reads keys and values from shared memory anyway.
        "pin": capability > 0 and not (capability == 90 and tiles.block_m >= 64),
        "casts": capability >= 89,
    }
