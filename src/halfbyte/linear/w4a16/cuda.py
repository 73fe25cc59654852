"""CUDA C++ on NVIDIA GPUs from SM80, W4A16: weights repacked once, read at the speed of memory.

How many rows x has decides the way (`_way`). Few: the weights stream through the registers
(`gemv.cu`). More, on SM90: they are unpacked inside a `wgmma` matmul
(`gemm.cu`). More, elsewhere: they are written out in 16 bits and cuBLAS multiplies.
A batch-invariant layer takes the first way for every number of rows, as its order of sums does not
depend on it.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from halfbyte.dispatch import Answer, missing_module, runs_on_gpu
from halfbyte.kernels.runtime.tensor_maps import SHAPES
from halfbyte.linear.base import NvFp4LinearLayerConfig
from halfbyte.linear.ops import linear_op
from halfbyte.linear.runs import matrix_of, set_tensor, tensor_of
from halfbyte.linear.w4a16.dequant.launcher import compile_unpack, linear_unpacked
from halfbyte.linear.w4a16.gemm_sm90.launcher import compile_wide, wide_product
from halfbyte.linear.w4a16.gemm_sm90.plan import wide_plan
from halfbyte.linear.w4a16.gemv.launcher import compile_few, few_product
from halfbyte.linear.w4a16.gemv.plan import MOST_K, Machine, few_plan
from halfbyte.linear.w4a16.machine import machine_of
from halfbyte.linear.w4a16.packed_weight import (
    DTYPES,
    TILE_K,
    PackedWeight,
    pack_weight,
    unpack_weight,
)
from halfbyte.linear.w4a16.row_scaled import RowScaledKernel

_OLDEST = 80

_Product = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]
"""Of x, the weights' three tensors and the bias, for one shape of x."""


_MOST_FEW_ROWS = 192
"""Of x, where there is no `wgmma`; beyond, cuBLAS makes up for writing the weights out."""
_WIDE_MICROSECONDS = 3.5
"""What `linear_wide` takes in a graph besides what its plan counts, on an H200."""


@linear_op("nvfp4_linear_cuda")
def nvfp4_linear_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """x `[..., K]` times weights as `PackedWeight` has them, to `[..., n]`."""
    rows = x if x.is_contiguous() else matrix_of(x)
    bias = None if bias is None else bias.contiguous()
    product = _product(x.shape, n, x.dtype, x.get_device(), batch_invariant)
    out = product(rows, weight, weight_scale, row_scale, bias)
    return out if rows is x else out.view(*x.shape[:-1], n)


@lru_cache(maxsize=SHAPES)
def _product(
    shape: torch.Size, n: int, dtype: torch.dtype, device: int, batch_invariant: bool
) -> _Product:
    k = shape[-1]
    m = shape.numel() // k
    if not m:
        return partial(_of_no_rows, n)
    way = "few" if batch_invariant else _way(m, n, k, machine_of(device))
    if way == "few":
        return few_product(shape, n, dtype, device, batch_invariant, None)
    if way == "wide":
        return wide_product(shape, n, dtype, device, None)
    return partial(linear_unpacked, n=n)


def _of_no_rows(n: int, x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _way(m: int, n: int, k: int, machine: Machine) -> Literal["few", "wide", "unpacked"]:
    """The fastest way known for m rows of x."""
    if machine.capability != 90:
        return "few" if m <= _MOST_FEW_ROWS else "unpacked"
    few = few_plan(n, k, m, machine).microseconds(n, k, m, machine)
    wide = wide_plan(n, k, m, machine.multiprocessors).microseconds(k, m)
    return "few" if few < wide + _WIDE_MICROSECONDS else "wide"


class CudaKernel(RowScaledKernel):
    """`halfbyte.linear.w4a16.gemv.launcher`; compiled at load with NVRTC.

    Its form of a layer: `weight` and `weight_scale`, int32, in the kernels' order, and
    `weight_row_scale`, float32, for every row the global scale of its part times 2^11.
    """

    name: ClassVar[str] = "cuda"
    product = staticmethod(nvfp4_linear_cuda)

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self._zeroed: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later; on this machine also where NVRTC can be reached."""
        return runs_on_gpu(
            compute_capability,
            _OLDEST,
            lambda: missing_module("cuda.bindings", "CUDA builds of PyTorch install it"),
            "streams repacked weights",
        )

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """W4A16 in 16 bits, of every N and of K up to 65,536."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.quantize_activations:
            return False, "multiplies 16-bit activations: a W4A4 layer's would stay unquantized"
        if config.dtype not in DTYPES:
            return False, f"takes bfloat16 and float16, not {str(config.dtype).split('.')[1]}"
        if config.k > MOST_K:
            return False, f"K up to {MOST_K}, not {config.k}"
        return True, "W4A16, batch-invariant"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the weights and compile the kernels."""
        packed = pack_weight(
            tensor_of(layer, "weight"),
            tensor_of(layer, "weight_scale"),
            tensor_of(layer, "weight_global_scale"),
            self.config.part_sizes or (self.config.n,),
            self.config.dtype,
        )
        set_tensor(layer, "weight", packed.weight)
        set_tensor(layer, "weight_scale", packed.weight_scale)
        set_tensor(layer, "weight_row_scale", packed.row_scale)
        padding = -packed.k % TILE_K
        setattr(layer, "weights_padding_cols", padding // 2)  # noqa: B010 (mypy takes it for a tensor)
        self._zeroed = packed.zeroed
        device = packed.weight.device
        compile_few(packed, self.config.batch_invariant, device.index)
        compile_unpack(packed.dtype, device.index)
        if machine_of(device.index).capability == 90 and not self.config.batch_invariant:
            compile_wide(packed.dtype, device.index)
        # The kernels read weights before the kernel in front of them has ended.
        torch.cuda.current_stream(device).synchronize()

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The same bytes in the order as loaded."""
        return unpack_weight(
            PackedWeight(
                tensor_of(layer, "weight"),
                tensor_of(layer, "weight_scale"),
                tensor_of(layer, "weight_row_scale"),
                self.config.n,
                self.config.k,
                self.config.dtype,
                self._zeroed,
            )
        )
