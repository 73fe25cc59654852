"""Launcher of the Triton attention kernels (`kernels.py`): every format, decode and prefill.

There is no sync: the grid and the work of programs depend on shapes only (`plan.py`), so that a
launch can be captured in a CUDA graph and follows lengths and block tables that change between
replays.
"""

from functools import lru_cache
from typing import Any

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.paged.kernels import attention_kernel, merge_kernel
from halfbyte.attention.paged.plan import (
    PagedPlan,
    Tiles,
    TritonTarget,
    exponent_factors,
    make_plan,
    operand_dtype,
    triton_target,
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


def run(inputs: AttentionInputs, plan: PagedPlan | None = None) -> None:
    """Fill `inputs.out`, and `inputs.lse` where it is not None. Does not sync the GPU.

    Args:
        inputs: of `paged_attention`, checked, all on one GPU. Scales may be floats, or tensors of
            one element; one on the GPU is read there.
        plan: overrides `make_plan`.

    Raises:
        ValueError: pages whose alignment does not suit a 16- or 32-bit format.
    """
    num_tokens, device = inputs.query.shape[0], inputs.query.device
    if num_tokens == 0:
        return
    target = triton_target(device)
    capacity = inputs.block_tables.shape[1] * inputs.layout.block_size
    launch = _Launch(inputs, plan or make_plan(inputs.config(), capacity, target), target)
    with current_device(inputs.query.get_device()):
        for first in range(0, num_tokens, launch.tokens_per_launch):
            tokens = slice(first, min(num_tokens, first + launch.tokens_per_launch))
            launch.attention(tokens)
            if launch.plan.merges:
                launch.merge(tokens)


class _Launch:
    """What the launches of a call share."""

    def __init__(self, inputs: AttentionInputs, plan: PagedPlan, target: TritonTarget) -> None:
        query, layout, tables = inputs.query, inputs.layout, inputs.block_tables
        self.inputs, self.plan = inputs, plan
        self.page_stride = page_stride_of(inputs.pages, layout)
        num_tokens, num_heads, _ = query.shape
        self.kernel = kernel_constants(
            layout, query.dtype, num_heads, plan.tiles, target.compute_capability
        )
        self.query = query if query.stride(2) == 1 else query.contiguous()
        self.block_tables = tables if tables.stride(1) == 1 else tables.contiguous()
        k_factor, self.k_global = scale_factor(inputs.k_scale, layout.k_dtype, query.device)
        v_factor, self.v_global = scale_factor(inputs.v_scale, layout.v_dtype, query.device)
        casts = self.kernel["casts"]
        self.unit = k_factor * 2.0 ** operand_shift(self.kernel["k"].kind, casts)
        self.out_scale = v_factor * 2.0 ** operand_shift(self.kernel["v"].kind, casts)
        self.exponents, self.cap = exponent_factors(inputs.scale, inputs.softcap)
        self.tokens_per_launch = plan.tokens_per_launch
        if inputs.transform is not None:
            fit = max(1, _MAX_BIAS_BYTES // max(1, bias_bytes(inputs)))
            self.tokens_per_launch = min(self.tokens_per_launch, fit)
        rows = (plan.num_splits, min(self.tokens_per_launch, num_tokens), num_heads)
        if not plan.merges:
            rows = (0, 0, 0)
        self.partial_out = query.new_empty((*rows, layout.head_size_v), dtype=torch.float32)
        self.partial_stats = query.new_empty((*rows, 2), dtype=torch.float32)
        self.sinks = None if inputs.sinks is None else inputs.sinks.contiguous()

    def _pointer(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """The tensor; if it is absent, any pointer, which is never read."""
        return self.partial_stats if tensor is None else tensor

    def _outputs(self) -> dict[str, Any]:
        """Arguments of both kernels: tensors and strides of the output and the partial results."""
        out = self.inputs.out
        return {
            "partial_out": self.partial_out,
            "partial_stats": self.partial_stats,
            "v_global": self._pointer(self.v_global),
            "sinks": self._pointer(self.sinks),
            "out": out,
            "lse": self._pointer(self.inputs.lse),
            "out_scale": self.out_scale,
            "num_splits": self.plan.num_splits,
            "out_token": out.stride(0),
            "out_head": out.stride(1),
            "out_column": out.stride(2),
            "v_global_on_device": self.v_global is not None,
            "has_sinks": self.sinks is not None,
            "has_lse": self.inputs.lse is not None,
        }

    def attention(self, tokens: slice) -> None:
        """Write the output of query tokens, or their partial results."""
        inputs, plan, kernel = self.inputs, self.plan, self.kernel
        num_seqs, layout = len(self.block_tables), inputs.layout
        heads_per_tile = min(kernel["group"], plan.tiles.block_m)
        head_tiles = layout.num_kv_heads * -(-kernel["group"] // heads_per_tile)
        count = tokens.stop - tokens.start
        tiles = count // (plan.tiles.block_m // heads_per_tile) + num_seqs
        made = TransformedQuery(self.query[tokens])
        if inputs.transform is not None:
            made = transform_queries(inputs, self.exponents, tokens)
        attention_kernel[(tiles, head_tiles, plan.num_splits)](
            query=made.query,
            pages=inputs.pages,
            tables=self.block_tables,
            starts=inputs.query_start_loc.contiguous(),
            lengths=inputs.seq_lens.contiguous(),
            k_global=self._pointer(self.k_global),
            bias=self._pointer(made.bias),
            first_scores=self._pointer(made.first_scores),
            first_indices=self._pointer(made.first_indices),
            first_values=self._pointer(made.first_values),
            score_scale=self.exponents * self.unit,
            cap=self.cap,
            window=inputs.sliding_window or 0,
            num_seqs=num_seqs,
            first_token=tokens.start,
            last_token=tokens.stop,
            table_stride=self.block_tables.stride(0),
            bias_stride=made.num_segments,
            query_token=made.query.stride(0),
            query_head=made.query.stride(1),
            page_stride=self.page_stride,
            k_global_on_device=self.k_global is not None,
            windowed=inputs.sliding_window is not None,
            capped=bool(inputs.softcap),
            segment=made.segment,
            knows_first=made.first_scores is not None,
            split=plan.merges,
            split_length=plan.split_length,
            num_warps=plan.tiles.num_warps,
            num_stages=plan.tiles.num_stages,
            **self._outputs(),
            **kernel,
        )

    def merge(self, tokens: slice) -> None:
        """Merge the partial results of query tokens into the output."""
        inputs, head_size_v = self.inputs, self.inputs.layout.head_size_v
        count, num_heads = tokens.stop - tokens.start, inputs.query.shape[1]
        merge_kernel[(count, num_heads)](
            first_token=tokens.start,
            num_tokens=count,
            num_heads=num_heads,
            head_size_v=head_size_v,
            padded_v=1 << (head_size_v - 1).bit_length(),
            block=_MERGED_AT_ONCE,
            **self._outputs(),
        )


@lru_cache(maxsize=256)
def kernel_constants(
    layout: PageLayout,
    query_dtype: torch.dtype,
    num_heads: int,
    tiles: Tiles,
    compute_capability: int,
) -> dict[str, Any]:
    """Compile-time constants, in addition to the options of a call.

    Args:
        compute_capability: of the GPU (90 for SM90); 0 for Triton's interpreter, which has no
            inline assembly and no true bfloat16 matmul.
    """
    operands = [operand_dtype(side, query_dtype) for side in (layout.k_dtype, layout.v_dtype)]
    return {
        "k": side_geometry(layout, "k"),
        "v": side_geometry(layout, "v"),
        "kv_heads": layout.num_kv_heads,
        "group": num_heads // layout.num_kv_heads,
        "k_operand": dot_operand(operands[0], compute_capability == 0),
        "v_operand": dot_operand(operands[1], compute_capability == 0),
        # Queries in bfloat16 may exceed float16's range: each row is scaled by a power of two.
        "scale_query": operands[0] == torch.float16 and query_dtype == torch.bfloat16,
        "block_m": tiles.block_m,
        "block_n": tiles.block_n,
        "ptx": compute_capability > 0,
        # Not for wgmma, which reads K and V from shared memory in any case.
        "pin": compute_capability > 0 and not (compute_capability == 90 and tiles.block_m >= 64),
        "casts": compute_capability >= 89,
    }
