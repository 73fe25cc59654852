"""C++ on CPUs, W4A16: packed weights are streamed with AVX-512, AVX2 or plain vectors.

Every sum has one order, so rows are bitwise the same whatever else is in the batch.
"""

from typing import ClassVar

import torch
from torch import nn

from halfbyte.dispatch import Answer
from halfbyte.kernels.cpu_library import library
from halfbyte.kernels.linear_cpu import PackedWeight, linear_cpu, pack_weight, unpack_weight
from halfbyte.linear.base import NvFp4LinearLayerConfig
from halfbyte.linear.ops import linear_op
from halfbyte.linear.row_scaled import RowScaledKernel
from halfbyte.linear.runs import set_tensor, tensor_of


@linear_op("nvfp4_linear_cpu")
def nvfp4_linear_cpu(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """`linear_cpu` of x `[..., K]`, to `[..., N]`; the others as in `PackedWeight`."""
    weight = PackedWeight(codes, scales, row_scales)
    rows = x.reshape(-1, x.shape[-1])
    out = linear_cpu(rows, weight, bias, batch_invariant=batch_invariant)
    return out.view(*x.shape[:-1], n)


class CpuKernel(RowScaledKernel):
    """`halfbyte.kernels.linear_cpu`; built with the package.

    Its form of a layer: `weight` and `weight_scale` in the kernel's order, and `weight_row_scale`,
    float32 `[N]`, the global scale of each row's part.
    """

    name: ClassVar[str] = "cpu"
    product = staticmethod(nvfp4_linear_cpu)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the kernel was built; every machine has a CPU."""
        if library() is None:
            return False, "was not built: the package was installed without a C++ compiler"
        return True, "streams packed weights"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """W4A16 of every shape, on the CPU."""
        if config.device_type != "cpu":
            return False, f"tensors are on {config.device_type}, not on the CPU"
        if config.quantize_activations:
            return False, "W4A16 only: it does not quantize activations"
        return True, "W4A16, every shape, batch-invariant"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Turn codes and scales, and give every row its global scale."""
        codes, scales = pack_weight(tensor_of(layer, "weight"), tensor_of(layer, "weight_scale"))
        set_tensor(layer, "weight", codes)
        set_tensor(layer, "weight_scale", scales)
        self.set_row_scales(layer)

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The same bytes in the order as loaded."""
        return unpack_weight(
            tensor_of(layer, "weight"),
            tensor_of(layer, "weight_scale"),
            self.config.n,
            self.config.k,
        )
