"""What Inductor compiles around halfbyte's kernels."""

from typing import Any

from halfbyte.plugins.vllm.registry import uses_halfbyte

OVERLAP = "triton.enable_pdl"
"""Inductor's option: its kernels start before the one in front has ended, and let the next one.

halfbyte's do so, too. A step of a small batch is some 350 kernels of a few µs each: beside them,
what a launch costs takes a tenth of the time, and the next layer's weights can be on their way
(docs/vllm.md has figures)."""


def overlap_launches(vllm_config: Any) -> None:
    """Turn `OVERLAP` on for a dense model with halfbyte's attention on Hopper, as was measured.

    What the user says of it in `--compilation-config` stays.

    Args:
        vllm_config: vLLM's, changed in place.
    """
    from vllm.platforms import current_platform

    compilation = getattr(vllm_config, "compilation_config", None)
    options = getattr(compilation, "inductor_compile_config", None)
    if options is None or not uses_halfbyte(vllm_config):
        return
    capability = current_platform.get_device_capability()
    if capability is None or capability.to_int() != 90 or not _inductor_knows():
        return
    # Inductor lets a kernel that only fills memory start without waiting for the one in front.
    # Dense models have none; others are left alone.
    model = vllm_config.model_config
    if getattr(model, "is_moe", False) or getattr(model, "is_hybrid", False):
        return
    options.setdefault(OVERLAP, True)


def _inductor_knows() -> bool:
    from torch._inductor import config

    return hasattr(config.triton, OVERLAP.partition(".")[2])
