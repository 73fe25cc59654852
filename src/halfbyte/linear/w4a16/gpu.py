"""Properties of a GPU for the plans and the compilation of linear kernels."""

from functools import lru_cache

import torch

from halfbyte.dispatch import compute_capability_of_gpu
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import num_sms
from halfbyte.linear.w4a16.gemv.plan import PAIR, Gpu
from halfbyte.linear.w4a16.packed_words import DTYPES


@lru_cache(maxsize=8)
def gpu_of(device: int) -> Gpu:
    """The properties of a GPU that plans depend on."""
    from cuda.bindings import driver

    compute_capability = compute_capability_of_gpu(device)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    _, handle = driver.cuDeviceGet(device)
    status, block_bytes = driver.cuDeviceGetAttribute(attribute, handle)
    if int(status):
        raise RuntimeError(f"CUDA: {status.name} ({int(status)})")
    return Gpu(
        compute_capability,
        block_bytes,
        num_sms(device),
        _max_active_clusters(block_bytes, device) if compute_capability >= 90 else 0,
    )


def _max_active_clusters(shared_bytes: int, device: int) -> int:
    """Max resident clusters of two CTAs, one CTA per SM."""
    from cuda.bindings import driver

    kernels = nvrtc.load(
        "linear/w4a16/dequant/dequant.cu",
        dtype_macros(DTYPES[0]),
        (("linear_probe", shared_bytes),),
        device,
    )
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = PAIR, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 512, 1, 1
    config.sharedMemBytes = shared_bytes
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = PAIR
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    config.attrs, config.numAttrs = [attribute], 1
    with torch.cuda.device(device):
        status, clusters = driver.cuOccupancyMaxActiveClusters(
            kernels["linear_probe"].function, config
        )
    if int(status):
        raise RuntimeError(f"CUDA: {status.name} ({int(status)})")
    return int(clusters)


def dtype_macros(dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Macros of the CUDA sources for a dtype of x."""
    return (("X_BF16", int(dtype == torch.bfloat16)),)
