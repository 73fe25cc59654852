"""What every NVFP4 linear kernel is given, and what it must answer.

A kernel object belongs to one layer. It sees the layer's tensors twice: once after loading, when it
may repack them for itself, and then in every call.

A layer as loaded (`NvFp4Linear` before `process_weights_after_loading`), every tensor an
`nn.Parameter(requires_grad=False)`, N output features, K input features, P parts:

| attribute | dtype, shape | meaning |
|---|---|---|
| `weight` | uint8 `[N, K/2]` | E2M1 codes, the even k in the low nibble |
| `weight_scale` | float8_e4m3fn `[N, K/16]` | block scales in linear order, no NaN, no sign |
| `weight_global_scale` | float32 `[P]` | decode multiplier of each part, finite, >= 0 |
| `input_global_scale` | float32 `[]`, or None | W4A4: decode multiplier of the activations, > 0 |
| `input_global_scale_inv` | float32 `[]`, or None | W4A4: the encode multiplier |
| `alpha` | float32 `[P]` | what an accumulator of `e2m1 * block_scale` products is worth: \
`weight_global_scale`, for W4A4 times `input_global_scale` |
| `bias` | `[N]`, or None | of the layer's dtype |

and three plain attributes: `part_sizes` (rows of each part, never empty, sums to N), `in_features`,
`out_features`. `weights_padding_cols` (an int, 0 as loaded) counts packed bytes of K padding, as
vLLM does; a kernel that pads says so there.

The result: W4A16 is `x @ dequantize(weight)^T`, rounded to the dtype once, bias added in float32
before where the kernel can. W4A4 first quantizes each row of x (`numerics.nvfp4.quantize` with
`input_global_scale`). The global scales of parts differ, and each is exact for its own rows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from halfbyte.dispatch import CPU, Answer

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype, if a layer can have it; else ValueError."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
    return dtype


@dataclass(frozen=True)
class NvFp4LinearLayerConfig:
    """The work, without its data: what decides whether a kernel can do it.

    Raises:
        ValueError: work that no layer can have; the message names the field and its value.
    """

    n: int
    """Output features, any number >= 1: kernels pad and slice."""
    k: int
    """Input features, a multiple of 16."""
    dtype: torch.dtype
    """Of activations, bias and result: float16, bfloat16 or float32."""
    has_bias: bool = False
    quantize_activations: bool = False
    """W4A4; else W4A16."""
    batch_invariant: bool = False
    """A row's result must be bitwise the same whatever else is in the batch."""
    m_hint: int | None = None
    """Tokens per call, >= 1, where known; for backends that ask for it, which none of ours does."""
    part_sizes: tuple[int, ...] = ()
    """Rows of each fused part; () is one part of n rows."""
    device_type: str = "cpu"
    compute_capability: int = CPU
    """Of the machine that the work is for, as `dispatch` counts."""

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
    """A way to multiply by NVFP4 weights; one object per layer."""

    name: ClassVar[str]

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether it runs on a machine; None means this one, with what is installed on it.

        A number must be answerable anywhere, without a GPU and without the library that would run.
        """

    @classmethod
    @abstractmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """Whether it can do the work, `config.device_type` included."""

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Bring the layer's tensors into the kernel's own form, once.

        May replace, reorder, pad or delete the tensors of the table above and add others, all as
        `nn.Parameter(requires_grad=False)`; the bias stays as it is (a kernel that wants another
        order keeps its own copy under another name). Must not keep the loaded form beside its own.
        """

    @abstractmethod
    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[..., K]` to `[..., N]` of x's dtype; x on the layer's device, of `config.dtype`.

        x may have any strides and zero rows. `bias` is None or the layer's, `[N]`.
        """

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """`weight` and `weight_scale` as loaded, bit for bit; the layer stays as it is.

        What saving, `layer.to(device)` and loading anew need once the weights are in the kernel's
        form. Optional; the tensors returned may be the layer's own.

        Raises:
            RuntimeError: the kernel has no way back.
        """
        raise RuntimeError(
            f"linear backend {self.name!r} cannot give back the weights that it repacked; "
            "save or move the layer before process_weights_after_loading"
        )
