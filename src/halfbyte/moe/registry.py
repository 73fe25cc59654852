"""The registry of kernels for mixture-of-experts layers, and their selection."""

import os
from dataclasses import replace

from halfbyte.dispatch import CPU, NoImplementationError, Registry, current_compute_capability
from halfbyte.moe.base import MoeConfig, MoeKernel

BACKEND_VARIABLE = "HALFBYTE_MOE_BACKEND"

MOE_BACKENDS: Registry[MoeKernel] = Registry(
    "MoE backend",
    {
        "cuda": "halfbyte.moe.cuda.kernel:CudaKernel",
        "triton": "halfbyte.moe.triton:TritonKernel",
        "cpu": "halfbyte.moe.cpu:CpuKernel",
        "reference": "halfbyte.moe.reference:ReferenceKernel",
    },
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
    return select_moe_kernel(config, backend)(config)


def select_moe_kernel(config: MoeConfig, backend: str | None = None) -> type[MoeKernel]:
    """The kernel class for a layer; arguments as of `init_moe_kernel`.

    `config.compute_capability` may be of another GPU; then installed packages are not checked.
    """
    here = current_compute_capability()
    if config.device_type == "cuda" and config.compute_capability == CPU:
        config = replace(config, compute_capability=here)
    is_here = config.device_type != "cuda" or config.compute_capability == here
    capability = None if is_here else config.compute_capability
    from_environment = os.environ.get(BACKEND_VARIABLE) if backend is None else None
    try:
        return MOE_BACKENDS.select(
            config, explicit=backend or from_environment or None, compute_capability=capability
        )
    except NoImplementationError as error:
        if from_environment:
            raise NoImplementationError(f"{BACKEND_VARIABLE}: {error}") from None
        raise
