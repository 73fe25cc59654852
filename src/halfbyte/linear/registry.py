"""The registry of NVFP4 linear kernels, and their selection."""

from halfbyte.dispatch import LayerRegistry, on_this_machine
from halfbyte.linear.base import NvFp4LinearKernel, NvFp4LinearLayerConfig

BACKEND_VARIABLE = "HALFBYTE_NVFP4_GEMM_BACKEND"
"""Named as vLLM's `VLLM_NVFP4_GEMM_BACKEND`, which is for the same layers."""

LINEAR_BACKENDS: LayerRegistry[NvFp4LinearKernel] = LayerRegistry(
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
    BACKEND_VARIABLE,
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
    config = on_this_machine(config)
    return select_nvfp4_linear_kernel(config, linear_backend)(config)


def select_nvfp4_linear_kernel(
    config: NvFp4LinearLayerConfig, linear_backend: str | None = None
) -> type[NvFp4LinearKernel]:
    """The kernel class for a layer; arguments as of `init_nvfp4_linear_kernel`.

    `config.compute_capability` may be of another GPU; then installed packages are not checked.
    """
    return LINEAR_BACKENDS.select_for(config, linear_backend)
