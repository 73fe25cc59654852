"""CUDA C++ on NVIDIA GPUs from SM80: decode straight from packed pages."""

from typing import ClassVar

import torch

from halfbyte.attention.base import AttentionBackend, AttentionConfig, AttentionInputs
from halfbyte.dispatch import CPU, Answer, current_compute_capability, is_installed
from halfbyte.kernels.decode import decode, make_plan, unsupported_reason, variant

_MAX_MEAN_QUERIES = 8
"""Beyond this the same pages would be unpacked again and again."""


class CudaAttention(AttentionBackend):
    """`halfbyte.kernels.decode`; compiled at first use with NVRTC."""

    name: ClassVar[str] = "cuda"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later."""
        here = compute_capability is None
        capability = current_compute_capability() if here else compute_capability
        assert capability is not None
        if capability == CPU:
            return False, "needs an NVIDIA GPU"
        if capability < 80:
            return False, f"needs compute capability 8.0, this is {capability / 10}"
        if here and not is_installed("cuda.bindings"):
            return False, "needs cuda-bindings, which CUDA builds of PyTorch install"
        return True, "reads packed pages"

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """What the kernel's layouts allow."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.num_tokens > _MAX_MEAN_QUERIES * config.num_seqs:
            return False, "is for decoding: a few query tokens per sequence"
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
            with torch.cuda.device(inputs.query.device):
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
        return scale.to(device, torch.float32)
    return torch.full((), scale, dtype=torch.float32, device=device)
