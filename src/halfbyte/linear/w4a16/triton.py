"""Triton on NVIDIA GPUs from SM80, W4A16: one kernel for every dtype, on the weights as loaded.

Needs no repacking, no library and no CUDA C++; also the kernel for float32 activations.
"""

from typing import ClassVar

import torch
from torch import nn

from halfbyte.dispatch import Answer, runs_on_triton
from halfbyte.linear.base import NvFp4LinearLayerConfig
from halfbyte.linear.ops import linear_op
from halfbyte.linear.tensors import matrix_of, set_tensor, tensor_of
from halfbyte.linear.w4a16.row_scaled import RowScaledKernel


@linear_op("nvfp4_linear_triton")
def nvfp4_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """`linear_triton` of x `[..., K]`, to `[..., n]`."""
    # Imported here: other backends must not need Triton.
    from halfbyte.linear.w4a16.triton_kernel import linear_triton

    bias = None if bias is None else bias.contiguous()
    out = linear_triton(matrix_of(x), weight, weight_scale, row_scale, bias, batch_invariant)
    return out.view(*x.shape[:-1], n)


class TritonKernel(RowScaledKernel):
    """`halfbyte.linear.w4a16.triton_kernel`; compiled at first use.

    Its form of a layer: `weight` and `weight_scale` as loaded, and `weight_row_scale`, float32
    `[N]`, the global scale of each row's part.
    """

    name: ClassVar[str] = "triton"
    product = staticmethod(nvfp4_linear_triton)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later; on this machine also where Triton is installed."""
        return runs_on_triton(compute_capability, "decodes weights as loaded")

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """W4A16 of every shape."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.quantize_activations:
            return False, "W4A16 only: it does not quantize activations"
        return True, "W4A16, every shape, batch-invariant"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make codes and block scales contiguous, and add the global scale of every row."""
        for name in ("weight", "weight_scale"):
            tensor = tensor_of(layer, name)
            if not tensor.is_contiguous():
                set_tensor(layer, name, tensor.contiguous())
        self.set_row_scales(layer)

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's own tensors."""
        return tensor_of(layer, "weight"), tensor_of(layer, "weight_scale")
