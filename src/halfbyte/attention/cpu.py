"""C++ on CPUs: every format, packed NVFP4 read in place, with AVX-512, AVX2 or plain loops.

The source is `kernels/cpu/attention/attention.cpp`.
"""

import ctypes
import struct
from typing import ClassVar

import torch

from halfbyte.attention.base import AttentionBackend, AttentionConfig, AttentionInputs
from halfbyte.dispatch import Answer
from halfbyte.kernels.cpu.library import FLOATS, FORMATS, is_built, library, pack_layout
from halfbyte.kernels.cpu.transform import CpuTransform
from halfbyte.kvcache.recent import RecentInputs, packed_part
from halfbyte.layouts import PageLayout

_CALL = struct.Struct("10P5q8i4f")
"""`Call` of the source."""
_RECENT = struct.Struct("6P4q4i")
"""`Recent` of the source."""


def attention_cpu(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    transform: CpuTransform | None = None,
    recent: RecentInputs | None = None,
) -> None:
    """As `halfbyte.attention.paged_attention`, on arguments already checked, all on the CPU.

    Rows are bitwise the same whatever else is in the batch, however many queries come with them
    and however many threads there are.
    """
    loaded = library()
    assert loaded is not None
    if query.dtype not in FLOATS or query.stride(2) != 1:
        query = query.contiguous() if query.dtype in FLOATS else query.float().contiguous()
    result = out
    if out.dtype not in FLOATS or out.stride(2) != 1:
        result = torch.empty(out.shape, dtype=torch.float32, device="cpu")
    # Assigned to names, so that they outlive the call.
    tables, starts = block_tables.contiguous(), query_start_loc.contiguous()
    lengths = seq_lens.contiguous()
    window = sliding_window or 0
    recent_call = None if recent is None else _Recent(recent, lengths, window)
    if recent is not None:
        lengths, window = packed_part(recent.tokens, lengths, window)
    float_sinks = None if sinks is None else sinks.float().contiguous()
    call = _CALL.pack(
        query.data_ptr(),
        pages.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        tables.data_ptr(),
        0 if float_sinks is None else float_sinks.data_ptr(),
        result.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if transform is None else transform.address,
        0 if recent_call is None else recent_call.address,
        pages.stride(0),
        *query.stride()[:2],
        *result.stride()[:2],
        FLOATS[query.dtype],
        FLOATS[result.dtype],
        *tables.shape,
        query.shape[1],
        window,
        torch.get_num_threads(),
        0,
        scale,
        _without_scale(layout.k_dtype.has_global_scale, k_scale),
        _without_scale(layout.v_dtype.has_global_scale, v_scale),
        softcap or 0.0,
    )
    loaded.halfbyte_attention(pack_layout(layout), call)
    if result is not out:
        out.copy_(result)


class _Recent:
    """`Recent` of the source, and what must outlive the call.

    Args:
        seq_lens: int32 `[sequences]`, contiguous.
        window: 0 for none.
    """

    def __init__(self, recent: RecentInputs, seq_lens: torch.Tensor, window: int) -> None:
        key, value = (
            x if x.dtype == ring.dtype and x.stride(2) == 1 else x.to(ring.dtype).contiguous()
            for x, ring in ((recent.key, recent.keys), (recent.value, recent.values))
        )
        tensors = (recent.keys, recent.values, key, value, recent.entries.contiguous(), seq_lens)
        packed = _RECENT.pack(
            *(tensor.data_ptr() for tensor in tensors),
            *key.stride()[:2],
            *value.stride()[:2],
            recent.tokens,
            recent.keys.shape[2],
            FLOATS[recent.keys.dtype],
            window,
        )
        self._kept = tensors
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self.address = ctypes.addressof(self._buffer)
        """Of the C++ struct, as long as this lives."""


def lengths_fit(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_tokens: int,
    num_pages: int,
    block_size: int,
) -> bool:
    """Whether the values of int32 tensors of valid shapes are valid for attention.

    Also False if it cannot tell: without the C++ library, not on the CPU, or not contiguous.
    """
    loaded = library()
    tensors = (query_start_loc, seq_lens, block_tables)
    if loaded is None or not all(x.device.type == "cpu" and x.is_contiguous() for x in tensors):
        return False
    return bool(
        loaded.halfbyte_fits(
            *(x.data_ptr() for x in tensors),
            *block_tables.shape,
            num_tokens,
            num_pages,
            block_size,
        )
    )


def _without_scale(has_global_scale: bool, scale: float) -> float:
    return scale if has_global_scale else 1.0


class CpuAttention(AttentionBackend):
    """`attention_cpu`; built with the package."""

    name: ClassVar[str] = "cpu"
    takes_transforms: ClassVar[bool] = True
    takes_every_batch: ClassVar[bool] = True
    takes_recent: ClassVar[bool] = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the C++ library was built."""
        return is_built("reads packed pages")

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """Every format of the C++ library, every head size and option."""
        if config.device_type != "cpu":
            return False, f"tensors are on {config.device_type}, not on the CPU"
        reason = config.layout.unknown_format(FORMATS)
        return reason is None, reason or "every format, head size and option"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`."""
        attention_cpu(
            inputs.query,
            inputs.pages,
            inputs.layout,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.block_tables,
            inputs.scale,
            float(inputs.k_scale),
            float(inputs.v_scale),
            inputs.sliding_window,
            inputs.sinks,
            inputs.softcap,
            inputs.out,
            inputs.lse,
            None if inputs.transform is None else inputs.transform.for_cpu,
            inputs.recent,
        )
