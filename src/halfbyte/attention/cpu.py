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
from halfbyte.kvcache.recent import RecentInputs, packed_part

_RECENT = struct.Struct("6P4q4i")
"""`Recent` of the source."""


class _Call(ctypes.Structure):
    """`Call` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "pages", "query_start_loc", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "sinks", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("transform", "recent")),
        *((name, ctypes.c_int64) for name in ("page_stride", "query_token", "query_head")),
        *((name, ctypes.c_int64) for name in ("out_token", "out_head")),
        *((name, ctypes.c_int32) for name in ("query_format", "out_format", "num_seqs")),
        *((name, ctypes.c_int32) for name in ("max_pages", "heads", "window", "threads", "unused")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "k_global", "v_global", "softcap")),
    )


def run(inputs: AttentionInputs) -> None:
    """Fill `inputs.out`, and `inputs.lse` where it is not None.

    Rows are bitwise the same whatever else is in the batch, however many queries come with them
    and however many threads there are.

    Args:
        inputs: of `halfbyte.attention.paged_attention`, checked, all on the CPU.
    """
    loaded = library()
    assert loaded is not None
    query, out, recent, layout = inputs.query, inputs.out, inputs.recent, inputs.layout
    if query.dtype not in FLOATS or query.stride(2) != 1:
        query = query.contiguous() if query.dtype in FLOATS else query.float().contiguous()
    result = out
    if out.dtype not in FLOATS or out.stride(2) != 1:
        result = torch.empty(out.shape, dtype=torch.float32, device="cpu")
    # Assigned to names, so that they outlive the call.
    tables, starts = inputs.block_tables.contiguous(), inputs.query_start_loc.contiguous()
    lengths = inputs.seq_lens.contiguous()
    window = inputs.sliding_window or 0
    recent_call = None if recent is None else _Recent(recent, lengths, window)
    if recent is not None:
        lengths, window = packed_part(recent.tokens, lengths, window)
    float_sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
    transform = None if inputs.transform is None else inputs.transform.for_cpu
    call = _Call(
        query=query.data_ptr(),
        pages=inputs.pages.data_ptr(),
        query_start_loc=starts.data_ptr(),
        seq_lens=lengths.data_ptr(),
        block_tables=tables.data_ptr(),
        sinks=0 if float_sinks is None else float_sinks.data_ptr(),
        out=result.data_ptr(),
        lse=0 if inputs.lse is None else inputs.lse.data_ptr(),
        transform=0 if transform is None else transform.address,
        recent=0 if recent_call is None else recent_call.address,
        page_stride=inputs.pages.stride(0),
        query_token=query.stride(0),
        query_head=query.stride(1),
        out_token=result.stride(0),
        out_head=result.stride(1),
        query_format=FLOATS[query.dtype],
        out_format=FLOATS[result.dtype],
        num_seqs=tables.shape[0],
        max_pages=tables.shape[1],
        heads=query.shape[1],
        window=window,
        threads=torch.get_num_threads(),
        softmax_scale=inputs.scale,
        k_global=float(inputs.k_scale) if layout.k_dtype.has_global_scale else 1.0,
        v_global=float(inputs.v_scale) if layout.v_dtype.has_global_scale else 1.0,
        softcap=inputs.softcap or 0.0,
    )
    loaded.halfbyte_attention(pack_layout(layout), bytes(call))
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
        """Address of the C++ struct, valid as long as this object."""


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


class CpuAttention(AttentionBackend):
    """`attend`; built with the package."""

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
        run(inputs)
