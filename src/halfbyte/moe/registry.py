"""The registry of kernels for mixture-of-experts layers, and their selection."""

from halfbyte.dispatch import LayerRegistry, on_this_machine
from halfbyte.moe.base import MoeConfig, MoeKernel

BACKEND_VARIABLE = "HALFBYTE_MOE_BACKEND"

MOE_BACKENDS: LayerRegistry[MoeKernel] = LayerRegistry(
    "MoE backend",
    {
        "cuda": "halfbyte.moe.cuda.kernel:CudaKernel",
        "triton": "halfbyte.moe.triton:TritonKernel",
        "cpu": "halfbyte.moe.cpu:CpuKernel",
        "reference": "halfbyte.moe.reference:ReferenceKernel",
    },
    BACKEND_VARIABLE,
)
"""Backends in order of preference."""


def init_moe_kernel(config: MoeConfig, backend: str | None = None) -> MoeKernel:
    """The kernel for a layer.

    Args:
        config: the layer. On "cuda" without a compute capability, this machine's is used.
        backend: a name of `MOE_BACKENDS`; None for the environment variable
            `HALFBYTE_MOE_BACKEND` if set, else the first that supports the layer.

    Raises:
        NoImplementationError: the named backend is unknown or does not support the layer, or none
            does; the message gives the reason and the usable backends.
    """
    config = on_this_machine(config)
    return select_moe_kernel(config, backend)(config)


def select_moe_kernel(config: MoeConfig, backend: str | None = None) -> type[MoeKernel]:
    """The kernel class for a layer; arguments as of `init_moe_kernel`.

    `config.compute_capability` may be of another GPU; then installed packages are not checked.
    """
    return MOE_BACKENDS.select_for(config, backend)
