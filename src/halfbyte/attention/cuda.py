"""CUDA C++ on NVIDIA GPUs from SM80: decode straight from packed NVFP4 pages."""

from importlib.util import find_spec
from typing import ClassVar

import torch

from halfbyte.attention.base import AttentionBackend, AttentionConfig, AttentionInputs
from halfbyte.dispatch import CPU, Answer, current_compute_capability
from halfbyte.kernels.decode_nvfp4 import decode_nvfp4, shared_bytes, unsupported_reason

# Shared memory that one CTA may have (CUDA C++ Programming Guide, "Technical Specifications").
_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_SMALLEST_SHARED_KIB = 99
_MAX_MEAN_QUERIES = 8
"""Beyond this the same pages would be unpacked again and again."""


class CudaAttention(AttentionBackend):
    """`halfbyte.kernels.decode_nvfp4`; compiled at first use with NVRTC."""

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
        if here and find_spec("cuda.bindings") is None:
            return False, "needs cuda-bindings, which CUDA builds of PyTorch install"
        return True, "reads packed nvfp4 pages"

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """What the kernel's layouts allow."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.num_tokens > _MAX_MEAN_QUERIES * config.num_seqs:
            return False, "is for decoding: a few query tokens per sequence"
        reason = unsupported_reason(config.layout, config.query_dtype)
        if reason is None:
            needed = shared_bytes(config.layout)
            available = _SHARED_KIB.get(config.compute_capability, _SMALLEST_SHARED_KIB) * 1024
            if needed > available:
                reason = f"needs {needed} bytes of shared memory, this GPU has {available}"
        return reason is None, reason or "reads packed nvfp4 pages"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`."""
        device = inputs.query.device
        decode_nvfp4(
            inputs.query,
            inputs.pages,
            inputs.layout,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.block_tables,
            inputs.scale,
            _on_device(inputs.k_scale, device),
            _on_device(inputs.v_scale, device),
            inputs.sliding_window,
            None if inputs.sinks is None else inputs.sinks.float().contiguous(),
            inputs.softcap,
            inputs.batch_invariant,
            inputs.out,
            inputs.lse,
        )


def _on_device(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.to(device, torch.float32)
    return torch.full((), scale, dtype=torch.float32, device=device)
