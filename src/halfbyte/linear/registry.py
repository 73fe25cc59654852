"""The registry of NVFP4 linear kernels, and the choice among them."""

import os
from dataclasses import replace

from halfbyte.dispatch import CPU, NoImplementationError, Registry, current_compute_capability
from halfbyte.linear.base import NvFp4LinearKernel, NvFp4LinearLayerConfig

BACKEND_VARIABLE = "HALFBYTE_NVFP4_GEMM_BACKEND"

LINEAR_BACKENDS: Registry[NvFp4LinearKernel] = Registry(
    "linear backend",
    {
        "torch_scaled_mm": "halfbyte.linear.w4a4.torch_scaled_mm:TorchScaledMMKernel",
        "flashinfer_cutlass": "halfbyte.linear.w4a4.flashinfer_cutlass:FlashInferCutlassKernel",
        "flashinfer_trtllm": "halfbyte.linear.w4a4.flashinfer_trtllm:FlashInferTrtllmKernel",
        "flashinfer_cudnn": "halfbyte.linear.w4a4.flashinfer_cudnn:FlashInferCudnnKernel",
        "cutlass": "halfbyte.linear.w4a4.cutlass:CutlassKernel",
        "fbgemm": "halfbyte.linear.w4a4.fbgemm:FbgemmKernel",
        "cuda": "halfbyte.linear.w4a16.cuda:CudaKernel",
        "humming": "halfbyte.linear.w4a16.humming:HummingKernel",
        "marlin": "halfbyte.linear.w4a16.marlin:MarlinKernel",
        "triton": "halfbyte.linear.w4a16.triton:TritonKernel",
        "cpu": "halfbyte.linear.w4a16.cpu:CpuKernel",
        "reference": "halfbyte.linear.reference:ReferenceKernel",
    },
)
"""In order of preference."""


def init_nvfp4_linear_kernel(
    config: NvFp4LinearLayerConfig, linear_backend: str | None = None
) -> NvFp4LinearKernel:
    """The kernel for a layer.

    Args:
        config: the layer. On "cuda" with no compute capability given, this machine's is meant.
        linear_backend: a name of `LINEAR_BACKENDS`; None for the environment variable
            `HALFBYTE_NVFP4_GEMM_BACKEND` where it is set, else the best that can do the work.

    Raises:
        NoImplementationError: the explicit choice is unknown or cannot do the work, or nothing can;
            the message gives the reason and what is usable.
    """
    config = _on_this_machine(config)
    return select_nvfp4_linear_kernel(config, linear_backend)(config)


def select_nvfp4_linear_kernel(
    config: NvFp4LinearLayerConfig, linear_backend: str | None = None
) -> type[NvFp4LinearKernel]:
    """The class that `init_nvfp4_linear_kernel` makes the kernel of.

    `config.compute_capability` may be any machine's; what is installed counts only for this one.
    """
    config = _on_this_machine(config)
    here = config.device_type != "cuda" or (
        config.compute_capability == current_compute_capability()
    )
    machine = None if here else config.compute_capability
    if linear_backend is not None:
        return LINEAR_BACKENDS.select(config, explicit=linear_backend, compute_capability=machine)
    if from_environment := os.environ.get(BACKEND_VARIABLE):
        try:
            return LINEAR_BACKENDS.select(
                config, explicit=from_environment, compute_capability=machine
            )
        except NoImplementationError as error:
            raise NoImplementationError(f"{BACKEND_VARIABLE}: {error}") from None
    return LINEAR_BACKENDS.select(config, compute_capability=machine)


def _on_this_machine(config: NvFp4LinearLayerConfig) -> NvFp4LinearLayerConfig:
    if config.device_type == "cuda" and config.compute_capability == CPU:
        return replace(config, compute_capability=current_compute_capability())
    return config
