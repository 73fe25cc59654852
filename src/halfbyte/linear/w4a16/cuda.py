"""CUDA C++ on NVIDIA GPUs from SM80, W4A16: weights are repacked once, at load.

The number of tokens M selects the variant (`choose_variant`). Small M: GEMV, bound by memory
bandwidth (`gemv.cu`). Larger M on SM90: GEMM, which unpacks the weights inside a `wgmma` matmul
(`gemm.cu`). Larger M on other GPUs: weights are dequantized to 16 bits and cuBLAS multiplies
(`dequant.cu`). A batch-invariant layer uses the GEMV for every M, because its order of summation
does not depend on M."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from halfbyte.dispatch import Answer, missing_module, runs_on_gpu
from halfbyte.kernels.runtime.tensor_maps import SHAPES
from halfbyte.linear.base import NvFp4LinearLayerConfig
from halfbyte.linear.ops import linear_op
from halfbyte.linear.tensors import matrix_of, set_tensor, tensor_of
from halfbyte.linear.w4a16.dequant.launcher import compile_unpack, linear_unpacked
from halfbyte.linear.w4a16.gemm_sm90.launcher import compile_gemm, gemm_product
from halfbyte.linear.w4a16.gemm_sm90.plan import make_plan as make_gemm_plan
from halfbyte.linear.w4a16.gemv.launcher import compile_gemv, gemv_product
from halfbyte.linear.w4a16.gemv.plan import MAX_K, Gpu
from halfbyte.linear.w4a16.gemv.plan import make_plan as make_gemv_plan
from halfbyte.linear.w4a16.gpu import gpu_of
from halfbyte.linear.w4a16.packed_weight import TILE_K, PackedWeight, pack_weight, unpack_weight
from halfbyte.linear.w4a16.packed_words import DTYPES
from halfbyte.linear.w4a16.row_scaled import RowScaledKernel

_OLDEST = 80

Product = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]
"""(x, the weight's three tensors, bias) -> the result, for one shape of x."""


_MAX_GEMV_TOKENS = 192
"""Max M for the GEMV without `wgmma`; beyond it, dequantizing for cuBLAS is faster."""
_GEMM_MICROSECONDS = 3.5
"""Fixed cost of the GEMM that its plan does not count, in a CUDA graph on an H200."""


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
    """x `[..., K]` times the tensors of a `PackedWeight`, to `[..., n]`."""
    product = _product(x.shape, n, x.dtype, x.get_device(), batch_invariant)
    return call_product(product, x, (weight, weight_scale, row_scale), bias, n)


def call_product(
    product: Product,
    x: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    """Call a product of x's shape with contiguous rows.

    Args:
        product: cached for `x.shape`.
        x: `[..., K]`, any strides.
        weight: the tensors of a `PackedWeight`.
        n: columns of the result.

    Returns:
        `[..., n]`.
    """
    rows = x if x.is_contiguous() else matrix_of(x)
    out = product(rows, *weight, None if bias is None else bias.contiguous())
    return out if rows is x else out.view(*x.shape[:-1], n)


@lru_cache(maxsize=SHAPES)
def _product(
    shape: torch.Size, n: int, dtype: torch.dtype, device: int, batch_invariant: bool
) -> Product:
    k = shape[-1]
    m = shape.numel() // k
    if not m:
        return partial(_of_no_tokens, n)
    variant = "gemv" if batch_invariant else choose_variant(m, n, k, gpu_of(device))
    if variant == "gemv":
        return gemv_product(shape, n, dtype, device, batch_invariant, None)
    if variant == "gemm":
        return gemm_product(shape, n, dtype, device, None)
    return partial(linear_unpacked, n=n)


def _of_no_tokens(n: int, x: torch.Tensor, *weights: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n))


def choose_variant(m: int, n: int, k: int, gpu: Gpu) -> Literal["gemv", "gemm", "dequant"]:
    """The variant with the lowest estimated time for m tokens."""
    if gpu.compute_capability != 90:
        return "gemv" if m <= _MAX_GEMV_TOKENS else "dequant"
    gemv = make_gemv_plan(n, k, m, gpu).microseconds(n, k, m, gpu)
    gemm = make_gemm_plan(n, k, m, gpu.num_sms).microseconds(k, m)
    return "gemv" if gemv < gemm + _GEMM_MICROSECONDS else "gemm"


class CudaKernel(RowScaledKernel):
    """Three kernels, one of which `choose_variant` chooses by M; NVRTC compiles them at load.

    They are a GEMV, a GEMM on SM90, and one that dequantizes for cuBLAS.
    `process_weights_after_loading` repacks a layer's tensors (`packed_weight.py`) to `weight` and
    `weight_scale`, int32, and `weight_row_scale`, float32: 2^11 times the global scale of the
    row's part.
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
        if config.k > MAX_K:
            return False, f"K up to {MAX_K}, not {config.k}"
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
        compile_gemv(packed, self.config.batch_invariant, device.index)
        compile_unpack(packed.dtype, device.index)
        if gpu_of(device.index).compute_capability == 90 and not self.config.batch_invariant:
            compile_gemm(packed.dtype, device.index)
        # The kernels read weights before the previous kernel has ended (dependent launch).
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
