"""Inductor options for the code around halfbyte's kernels."""

from typing import Any

from halfbyte.plugins.vllm.registry import uses_halfbyte

OVERLAP = "triton.enable_pdl"
"""Inductor's option for programmatic dependent launch (PDL): a kernel may start before the
previous one has ended. halfbyte's kernels use PDL as well. A step of a small batch is some 350
kernels of a few µs each, and launch overhead takes a tenth of its time. PDL hides that, and lets
the next layer's weights be prefetched (docs/vllm.md has figures)."""


def overlap_launches(vllm_config: Any) -> None:
    """Set `OVERLAP` for dense models with halfbyte's attention on Hopper, where it was measured.

    A value in `--compilation-config` takes precedence.

    Args:
        vllm_config: vLLM's, modified in place.
    """
    from vllm.platforms import current_platform

    compilation = getattr(vllm_config, "compilation_config", None)
    options = getattr(compilation, "inductor_compile_config", None)
    if options is None or not uses_halfbyte(vllm_config):
        return
    capability = current_platform.get_device_capability()
    if capability is None or capability.to_int() != 90 or not _inductor_knows():
        return
    # Inductor lets kernels that only fill memory start without waiting for the previous kernel.
    # Dense models have none; other models are not changed.
    model = vllm_config.model_config
    if getattr(model, "is_moe", False) or getattr(model, "is_hybrid", False):
        return
    options.setdefault(OVERLAP, True)


def _inductor_knows() -> bool:
    from torch._inductor import config

    return hasattr(config.triton, OVERLAP.partition(".")[2])
