"""The registry of NVFP4 linear kernels, and their selection."""

import os
from dataclasses import replace

from halfbyte.dispatch import CPU, NoImplementationError, Registry, current_compute_capability
from halfbyte.linear.base import NvFp4LinearKernel, NvFp4LinearLayerConfig

BACKEND_VARIABLE = "HALFBYTE_NVFP4_GEMM_BACKEND"
"""Named as vLLM's `VLLM_NVFP4_GEMM_BACKEND`, which is for the same layers."""

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
"""Backends in order of preference."""


def init_nvfp4_linear_kernel(
    config: NvFp4LinearLayerConfig, linear_backend: str | None = None
) -> NvFp4LinearKernel:
    """The kernel for a layer.

    Args:
        config: the layer. On "cuda" without a compute capability, this machine's is used.
        linear_backend: a name of `LINEAR_BACKENDS`; None for the environment variable
            `HALFBYTE_NVFP4_GEMM_BACKEND` if set, else the first that supports the layer.

    Raises:
        NoImplementationError: the named backend is unknown or does not support the layer, or none
            does; the message gives the reason and the usable backends.
    """
    config = _on_this_machine(config)
    return select_nvfp4_linear_kernel(config, linear_backend)(config)


def select_nvfp4_linear_kernel(
    config: NvFp4LinearLayerConfig, linear_backend: str | None = None
) -> type[NvFp4LinearKernel]:
    """The kernel class for a layer; arguments as of `init_nvfp4_linear_kernel`.

    `config.compute_capability` may be of another GPU; then installed packages are not checked.
    """
    config = _on_this_machine(config)
    here = config.device_type != "cuda" or (
        config.compute_capability == current_compute_capability()
    )
    capability = None if here else config.compute_capability
    if linear_backend is not None:
        return LINEAR_BACKENDS.select(
            config, explicit=linear_backend, compute_capability=capability
        )
    if from_environment := os.environ.get(BACKEND_VARIABLE):
        try:
            return LINEAR_BACKENDS.select(
                config, explicit=from_environment, compute_capability=capability
            )
        except NoImplementationError as error:
            raise NoImplementationError(f"{BACKEND_VARIABLE}: {error}") from None
    return LINEAR_BACKENDS.select(config, compute_capability=capability)


def _on_this_machine(config: NvFp4LinearLayerConfig) -> NvFp4LinearLayerConfig:
    if config.device_type == "cuda" and config.compute_capability == CPU:
        return replace(config, compute_capability=current_compute_capability())
    return config
