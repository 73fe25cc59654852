"""The interface of NVFP4 linear kernels.

A kernel object belongs to one layer. It gets the layer's tensors once after loading, when it may
repack them, and then in every call.

A layer as loaded (`NvFp4Linear` before `process_weights_after_loading`), every tensor an
`nn.Parameter(requires_grad=False)`, N output features, K input features, P parts:

| attribute | dtype, shape | meaning |
|---|---|---|
| `weight` | uint8 `[N, K/2]` | E2M1 codes, the even k in the low nibble |
| `weight_scale` | float8_e4m3fn `[N, K/16]` | block scales in linear order, no NaN, no sign |
| `weight_global_scale` | float32 `[P]` | decode scale of each part, finite, >= 0 |
| `input_global_scale` | float32 `[]`, or None | W4A4: decode scale of the activations, > 0 |
| `input_global_scale_inv` | float32 `[]`, or None | W4A4: its inverse, the encode scale |
| `alpha` | float32 `[P]` | scale of accumulators of `e2m1 * block_scale` products: \
`weight_global_scale`, for W4A4 times `input_global_scale` |
| `bias` | `[N]`, or None | of the layer's dtype |

and three plain attributes: `part_sizes` (rows of each part, never empty, sums to N), `in_features`,
`out_features`. `weights_padding_cols` (an int, 0 as loaded) counts packed bytes of K padding, as
vLLM does; a kernel that pads says so there.

The result: W4A16 is `x @ dequantize(weight)^T`, rounded to the dtype once; where the kernel can,
the bias is added in float32 before rounding. W4A4 first quantizes x (`numerics.nvfp4.quantize` with
`input_global_scale`). Each part has its own global scale, which is applied exactly. """

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from halfbyte.dispatch import CPU, Answer

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype if layers support it, else raise ValueError."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
    return dtype


@dataclass(frozen=True)
class NvFp4LinearLayerConfig:
    """Sizes and options of a layer, by which kernels decide whether they support it.

    Raises:
        ValueError: an invalid field; the message gives its name and value.
    """

    n: int
    """Output features, any number >= 1: kernels pad and slice."""
    k: int
    """Input features, a multiple of 16."""
    dtype: torch.dtype
    """Dtype of activations, bias and result: float16, bfloat16 or float32."""
    has_bias: bool = False
    quantize_activations: bool = False
    """W4A4; else W4A16."""
    batch_invariant: bool = False
    """A token's result must be bitwise the same for any batch."""
    m_hint: int | None = None
    """Tokens per call, >= 1, if known. A hint for other backends; halfbyte's own do not use it."""
    part_sizes: tuple[int, ...] = ()
    """Rows of each fused part; () is one part of n rows."""
    device_type: str = "cpu"
    compute_capability: int = CPU
    """The target GPU's, as in `dispatch`, such as 90."""

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1 or self.k % 16:
            raise ValueError(
                f"NVFP4 linear layer: expected n >= 1 and k a positive multiple of 16, "
                f"got n={self.n}, k={self.k}"
            )
        if self.part_sizes and (min(self.part_sizes) < 1 or sum(self.part_sizes) != self.n):
            raise ValueError(
                f"part_sizes: expected positive numbers that sum to n={self.n}, "
                f"got {self.part_sizes}"
            )
        check_dtype(self.dtype)
        if self.m_hint is not None and self.m_hint < 1:
            raise ValueError(f"m_hint: expected None or a number >= 1, got {self.m_hint}")


class NvFp4LinearKernel(ABC):
    """Base of linear kernels; one object per layer."""

    name: ClassVar[str]

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether it runs on a compute capability; None for this machine and its installed
        packages.

        With a number it must work on any machine, without a GPU and without the kernel's library.
        """

    @classmethod
    @abstractmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """Whether it supports the layer, including `config.device_type`."""

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Convert the layer's tensors to the kernel's own layout, once.

        May replace, reorder, pad or delete the tensors of the table above and add others, all as
        `nn.Parameter(requires_grad=False)`. The bias must stay (a kernel that needs another order
        adds a copy under another name). Must not keep both the loaded and its own layout.
        """

    @abstractmethod
    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[..., K]` to `[..., N]` of x's dtype; x on the layer's device, of `config.dtype`.

        x may have any strides and zero tokens. `bias` is None or the layer's, `[N]`.
        """

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """`weight` and `weight_scale` as loaded, bit for bit; does not change the layer.

        Used to save, move or reload a layer whose weights are in the kernel's layout. Optional; may
        return the layer's own tensors.

        Raises:
            RuntimeError: the kernel cannot restore them.
        """
        raise RuntimeError(
            f"linear backend {self.name!r} cannot give back the weights that it repacked; "
            "save or move the layer before process_weights_after_loading"
        )
