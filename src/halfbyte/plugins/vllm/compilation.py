"""Options of vLLM's compilation."""

from typing import Any

from halfbyte.kernels.runtime.inductor import OVERLAP, can_overlap
from halfbyte.plugins.vllm.layers import FUSIONS, is_timed, joins_head_norms, wants_layers
from halfbyte.plugins.vllm.registry import uses_halfbyte, wants_kernels


def overlap_launches(vllm_config: Any) -> None:
    """Set `OVERLAP` for runs with halfbyte's attention on Hopper, where it was measured.

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
    if is_timed(vllm_config):
        options.setdefault(OVERLAP, True)


def fuse_operators(vllm_config: Any) -> None:
    """Let NVFP4 layers apply the SwiGLU after them, and rotary embeddings the norms before them.

    Only in runs whose norms, activations and embeddings are halfbyte's.

    A pass of the user's takes precedence, and a vLLM that has none is left alone.

    Args:
        vllm_config: vLLM's, modified in place.
    """
    options = getattr(
        getattr(vllm_config, "compilation_config", None), "inductor_compile_config", None
    )
    if options is None or not uses_halfbyte(vllm_config):
        return
    swiglu = wants_layers(vllm_config) and wants_kernels(vllm_config, "linear")
    head_norms = joins_head_norms(vllm_config)
    if not (swiglu or head_norms):
        return
    try:
        from halfbyte.plugins.vllm.fusions import Fusions
    except ImportError:
        return
    options.setdefault(FUSIONS, Fusions(swiglu, head_norms))
