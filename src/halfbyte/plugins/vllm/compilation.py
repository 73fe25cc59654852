"""Options of vLLM's compilation."""

from typing import Any

from halfbyte.kernels.runtime.inductor import OVERLAP, can_overlap
from halfbyte.plugins.vllm.registry import is_dense, uses_halfbyte


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
    if capability is None or not can_overlap(capability.to_int()):
        return
    if is_dense(vllm_config.model_config):
        options.setdefault(OVERLAP, True)
