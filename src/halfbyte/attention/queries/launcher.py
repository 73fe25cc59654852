"""Launcher of the kernel that transforms queries to match K changed by a recipe."""

import ctypes
from typing import NamedTuple

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.queries.kernel import transform_kernel
from halfbyte.attention.queries.positions import QueryPositions
from halfbyte.kernels.formats.dot_operands import dot_operand
from halfbyte.kernels.formats.kv_tiles import page_stride_of, side_geometry
from halfbyte.kernels.runtime.devices import current_device
from halfbyte.kvcache.transform import MARK, KVTransform, PairTables
from halfbyte.numerics.hadamard import block_size

# (rows, segments, warps) per program; each program reads the tables of means once.
_SMALL_TILE = (16, 64, 4)
_LARGE_TILE = (32, 64, 4)
_MIN_LARGE_ROWS = 1024
_STAGES = 2


class TransformedQuery(NamedTuple):
    """Query-side inputs of kernels that read transformed pages.

    Tensors are None if the transform has no such part.
    """

    query: torch.Tensor
    """`[tokens, heads, D]` in the query's dtype, rotated as K is."""
    bias: torch.Tensor | None = None
    """float32 `[tokens, heads, segments]`, `q . mean * bias_scale`; undefined past a sequence's
    end and before its window."""
    first_scores: torch.Tensor | None = None
    """float32 `[tokens, heads]`: logits of position 0 times log2(e), soft-cap included, where K
    and V there are constants that the row attends to; else -inf."""
    first_indices: torch.Tensor | None = None
    """int32 `[tokens, heads]`: which constants; else -1, and position 0 is packed as others are."""
    first_values: torch.Tensor | None = None
    """`[constants, kv_heads, Dv]`, V of the constants."""
    segment: int = 0
    """Tokens that share a mean; 0 without `bias`."""

    @property
    def num_segments(self) -> int:
        """Segments per row of `bias`; 0 without it."""
        return 0 if self.bias is None else self.bias.shape[2]


def bias_bytes(inputs: AttentionInputs) -> int:
    """Bytes of `TransformedQuery.bias` for one query token."""
    return 4 * inputs.query.shape[1] * inputs.num_segments


def transform_queries(
    inputs: AttentionInputs, bias_scale: float, tokens: slice = slice(None)
) -> TransformedQuery:
    """Transform queries to match pages of NVFP4 K that `inputs.transform` changed.

    Does not sync the GPU, except in the first call with a transform.

    Args:
        inputs: of `paged_attention`, checked, with a transform.
        bias_scale: scale of `q . mean`.
        tokens: range of query tokens; by default all.
    """
    transform = inputs.transform
    assert transform is not None
    positions = QueryPositions.of_step(
        inputs.plans, inputs.query_start_loc, inputs.seq_lens, inputs.query.shape[0]
    )
    query = inputs.query[tokens]
    query = query if query.stride(2) == 1 else query.contiguous()
    num_tokens, num_heads, _ = query.shape
    max_segments = inputs.num_segments
    bias = scores = indices = None
    if max_segments:
        bias = query.new_empty((num_tokens, num_heads, max_segments), dtype=torch.float32)
    if transform.first_keys is not None:
        scores = query.new_empty((num_tokens, num_heads), dtype=torch.float32)
        indices = query.new_empty((num_tokens, num_heads), dtype=torch.int32)
    values = transform.first_values
    result = TransformedQuery(
        query.new_empty(query.shape) if transform.rotate else query,
        bias,
        scores,
        indices,
        None if values is None else values.contiguous(),
        transform.segment if max_segments else 0,
    )
    if query.numel():
        positions = QueryPositions(*(x[tokens] for x in positions))
        _launch(inputs, transform, query, positions, result, bias_scale)
    return result


def _launch(
    inputs: AttentionInputs,
    transform: KVTransform,
    query: torch.Tensor,
    positions: QueryPositions,
    result: TransformedQuery,
    bias_scale: float,
) -> None:
    """Fill the tensors that `result` has."""
    layout, first = inputs.layout, transform.first_keys
    _, num_heads, head_size = query.shape
    rows = query.shape[0] * num_heads
    tables = None if result.bias is None else transform.pair_tables
    block_tables = inputs.block_tables
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    block = block_size(head_size) if transform.rotate else 0
    # Tiles of other sizes may round differently.
    is_large = rows >= _MIN_LARGE_ROWS and not inputs.batch_invariant
    tile, segments, warps = _LARGE_TILE if is_large else _SMALL_TILE
    # Absent tensors get any pointer; it is never read.
    with current_device(query.get_device()):
        transform_kernel[(-(-rows // tile), 1 + -(-result.num_segments // segments))](
            query=query,
            sequences=positions.sequences,
            positions=positions.positions,
            tables=block_tables,
            pages=inputs.pages,
            **(PairTables(*(query,) * 6) if tables is None else tables)._asdict(),
            first_keys=query if first is None else first.contiguous(),
            rotated=result.query,
            bias=query if result.bias is None else result.bias,
            first_scores=query if result.first_scores is None else result.first_scores,
            first_indices=query if result.first_indices is None else result.first_indices,
            scale=inputs.scale,
            bias_scale=bias_scale,
            cap=inputs.softcap or 0.0,
            num_rows=rows,
            num_segments=0 if tables is None else len(tables.cos),
            bias_stride=result.num_segments,
            table_stride=block_tables.stride(0),
            page_stride=page_stride_of(inputs.pages, layout),
            window=inputs.sliding_window or 0,
            query_token=query.stride(0),
            query_head=query.stride(1),
            k=side_geometry(layout, "k"),
            heads=num_heads,
            group=num_heads // layout.num_kv_heads,
            padded=max(32, 1 << (head_size - 1).bit_length()),
            block=block,
            norm=ctypes.c_float(block**-0.5).value if block else 1.0,
            operand=dot_operand(query.dtype, interpreted=not query.is_cuda),
            pairs=0 if tables is None else tables.cos.shape[1],
            segment=transform.segment,
            knows_first=result.first_scores is not None,
            mark=MARK,
            windowed=inputs.sliding_window is not None,
            capped=bool(inputs.softcap),
            rows=tile,
            segments=segments,
            num_warps=warps,
            num_stages=_STAGES,
        )
