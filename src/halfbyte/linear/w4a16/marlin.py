"""Marlin's FP4 kernel through an installed vLLM: W4A16, float16 from SM75, bfloat16 from SM80.

vLLM's own functions put the weights in Marlin's order (`prepare_fp4_layer_for_marlin`) and call the
kernel (`apply_fp4_marlin_linear`), as vLLM 0.20 to 0.33 have them. Not yet run on hardware.

Marlin stores block scales in 8 bits without a sign (S0E5M3), after a power of two scaled the
largest one to near 448. The min value is then 2^-6: smaller scales become 0, and their blocks as
well. A warning names layers with such scales. With `amax6` weights they occur where a block's amax
is 28672 times smaller than the tensor's."""

import warnings
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from halfbyte.dispatch import is_installed
from halfbyte.layouts.gemm_layouts import pad_weight
from halfbyte.linear.base import NvFp4LinearLayerConfig
from halfbyte.linear.ops import linear_op
from halfbyte.linear.runs import concat_outputs, runs_of
from halfbyte.linear.tensors import matrix_of, set_tensor, tensor_of
from halfbyte.linear.w4a16.weight_only import WeightOnlyKernel

_SMALLEST_SCALE = 2.0**-6
_LARGEST_SCALE = 448.0
_TILES = ((64, 128), (128, 64))
"""(N, K) of a thread block; one of them must divide the weight's shape."""


def _functions() -> Any:
    return import_module("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")


# The locks in the workspace are zero again after every call, so `mutates_args` stays empty.
@linear_op("nvfp4_linear_marlin")
def _marlin_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    workspace: torch.Tensor | None,
    size_n: int,
    size_k: int,
    n: int,
) -> torch.Tensor:
    matrix = matrix_of(x)
    if not matrix.shape[0]:
        return x.new_empty((*x.shape[:-1], n))
    product = _functions().apply_fp4_marlin_linear(
        input=F.pad(matrix, (0, size_k - matrix.shape[1])),
        weight=weight,
        weight_scale=weight_scale,
        weight_global_scale=global_scale,
        workspace=workspace,
        size_n=size_n,
        size_k=size_k,
    )
    return product[:, :n].contiguous().view(*x.shape[:-1], n)


class MarlinKernel(WeightOnlyKernel):
    """vLLM's `apply_fp4_marlin_linear`."""

    name: ClassVar[str] = "marlin"
    library: ClassVar[str] = "Marlin, through vLLM"

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self.sizes: list[tuple[int, int]] = []
        """(N, K) of each run, padded."""

    @classmethod
    def missing(cls) -> str | None:
        """vLLM, if it is not installed."""
        return None if is_installed("vllm") else "needs vllm, which is not installed"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pad each run to Marlin's tiles and let vLLM repack it."""
        weight, scales = tensor_of(layer, "weight"), tensor_of(layer, "weight_scale")
        global_scales = tensor_of(layer, "weight_global_scale")
        self.runs = runs_of(self.config, layer)
        self.sizes = []
        for run in self.runs:
            _warn_of_lost_scales(run.of(scales), self.config)
            codes, block_scales = pad_weight(
                run.of(weight), run.of(scales), *_tile(run.rows, self.config.k)
            )
            prepared = _stand_in(
                codes, block_scales, global_scales[run.part].clone(), self.config.dtype
            )
            _functions().prepare_fp4_layer_for_marlin(prepared)
            self.sizes.append((codes.shape[0], 2 * codes.shape[1]))
            for name in ("weight", "weight_scale"):
                set_tensor(layer, run.name(name), tensor_of(prepared, name))
            set_tensor(
                layer, run.name("marlin_global_scale"), tensor_of(prepared, "weight_global_scale")
            )
        attributes: Any = layer
        attributes.weights_padding_cols = (self.sizes[0][1] - self.config.k) // 2
        # Older releases of vLLM leave the workspace to the caller.
        workspace = getattr(prepared, "workspace", None)
        if workspace is not None:
            set_tensor(layer, "workspace", workspace)

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `NvFp4LinearKernel.apply_weights`."""
        outputs = [
            _marlin_linear(
                x,
                getattr(layer, run.name("weight")),
                getattr(layer, run.name("weight_scale")),
                getattr(layer, run.name("marlin_global_scale")),
                getattr(layer, "workspace", None),
                size_n,
                size_k,
                run.rows,
            )
            for run, (size_n, size_k) in zip(self.runs, self.sizes, strict=True)
        ]
        return concat_outputs(outputs, bias)


def _tile(n: int, k: int) -> tuple[int, int]:
    """The tile that adds the least padding."""
    return min(_TILES, key=lambda tile: (n + -n % tile[0]) * (k + -k % tile[1]))


def _stand_in(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> nn.Module:
    """A module with the attributes that vLLM's function reads."""
    module = nn.Module()
    set_tensor(module, "weight", codes.contiguous())
    # A copy: vLLM may repack in place, and the tensor may be shared.
    set_tensor(module, "weight_scale", scales.clone(memory_format=torch.contiguous_format))
    set_tensor(module, "weight_global_scale", global_scale)
    attributes: Any = module
    attributes.output_size_per_partition = codes.shape[0]
    attributes.input_size_per_partition = 2 * codes.shape[1]
    attributes.params_dtype = dtype
    return module


def _warn_of_lost_scales(scales: torch.Tensor, config: NvFp4LinearLayerConfig) -> None:
    values = scales.float()
    largest = values.max()
    # vLLM scales up by a power of two; in float16 there is no headroom for it.
    factor = (_LARGEST_SCALE / largest).log2().floor().exp2() if largest > 0 else largest + 1
    if config.dtype == torch.float16:
        factor = torch.ones_like(factor)
    lost = int(((values > 0) & (values * factor < _SMALLEST_SCALE)).sum())
    if lost:
        warnings.warn(
            f"linear backend 'marlin': {lost} of {values.numel()} block scales of a "
            f"{config.n} x {config.k} layer are below its smallest and become 0",
            stacklevel=2,
        )
