"""CUDA C++ on NVIDIA GPUs from SM80: decode straight from packed pages."""

from typing import ClassVar

import torch

from halfbyte.attention.base import AttentionConfig, AttentionInputs, GpuAttention
from halfbyte.dispatch import Answer
from halfbyte.kernels.decode import decode, make_plan
from halfbyte.kernels.decode_variant import unsupported_reason, variant

_MAX_MEAN_QUERIES = 8
"""Beyond this the same pages would be unpacked again and again."""


class CudaAttention(GpuAttention):
    """`halfbyte.kernels.decode`; compiled at first use with NVRTC."""

    name: ClassVar[str] = "cuda"
    module: ClassVar[str] = "cuda.bindings"
    module_source: ClassVar[str] = "CUDA builds of PyTorch install it"
    purpose: ClassVar[str] = "reads packed pages, for decoding"

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """What the kernel's layouts allow."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.num_tokens > _MAX_MEAN_QUERIES * config.num_seqs:
            return False, "is for decoding: a few query tokens per sequence"
        if not config.aligned_pages:
            return False, "pages begin at multiples of 16 bytes, less than 4 GiB apart"
        layout = config.layout
        reason = unsupported_reason(layout, config.query_dtype)
        group = config.num_heads // layout.num_kv_heads
        mean_queries = config.num_tokens / max(1, config.num_seqs)
        machine = config.compute_capability
        if reason is None and not variant(
            layout, group, mean_queries, config.batch_invariant, machine
        ):
            reason = "needs more shared memory than this GPU has"
        return reason is None, reason or "reads packed pages"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`."""
        if inputs.query.shape[0]:
            _decode(inputs)


def _decode(inputs: AttentionInputs) -> None:
    query, layout, window = inputs.query, inputs.layout, inputs.sliding_window
    max_pages = inputs.block_tables.shape[1]
    query_start_loc = inputs.query_start_loc.contiguous()
    seq_lens = inputs.seq_lens.contiguous()
    shape = (query.shape[:2], max_pages, window, inputs.batch_invariant, query.device)
    plan = inputs.plans.get(
        ("cuda", layout, *shape),
        lambda: make_plan(
            layout,
            query.shape[1],
            query.shape[0],
            query_start_loc,
            seq_lens,
            max_pages,
            window,
            inputs.batch_invariant,
        ),
    )
    decode(
        query,
        inputs.pages,
        layout,
        inputs.block_tables,
        inputs.scale,
        _on_device(inputs.k_scale, query.device),
        _on_device(inputs.v_scale, query.device),
        window,
        None if inputs.sinks is None else inputs.sinks.float().contiguous(),
        inputs.softcap,
        plan,
        inputs.out,
        inputs.lse,
    )


def _on_device(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.float()
    return torch.full((), scale, dtype=torch.float32, device=device)
