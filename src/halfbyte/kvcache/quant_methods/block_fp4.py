"""FP4 with power-of-two block scales: `mxfp4` (blocks of 32) and `fp4_block16`."""

from collections.abc import Callable
from typing import ClassVar

import torch

from halfbyte.kvcache.quant_methods.base import KVCacheQuantMethod
from halfbyte.numerics import block_fp4

Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Dequantize = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


class _BlockFP4KVCacheMethod(KVCacheQuantMethod):
    """Without a global scale: the block scales span float32's range by themselves."""

    _functions: ClassVar[tuple[Quantize, Dequantize]]

    def quantize(
        self, x: torch.Tensor, global_scale: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed codes and E8M0 block scales."""
        return self._functions[0](x)

    def dequantize(
        self,
        data: torch.Tensor,
        scales: torch.Tensor | None,
        global_scale: float | torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """`e2m1 * block_scale` in `dtype`."""
        assert scales is not None
        return self._functions[1](data, scales, dtype)

    def global_scale_from_amax(self, amax: float) -> float:
        """1: there is no scale."""
        return 1.0


class MXFP4KVCacheMethod(_BlockFP4KVCacheMethod):
    """`mxfp4` of `halfbyte.numerics.block_fp4` on the bytes of a cache."""

    FORMATS: ClassVar[tuple[str, ...]] = ("mxfp4",)
    SCALE_BLOCK_SIZE: ClassVar[int] = block_fp4.MXFP4_BLOCK_SIZE
    _functions = (block_fp4.quantize_mxfp4, block_fp4.dequantize_mxfp4)


class FP4Block16KVCacheMethod(_BlockFP4KVCacheMethod):
    """`fp4_block16` of `halfbyte.numerics.block_fp4` on the bytes of a cache."""

    FORMATS: ClassVar[tuple[str, ...]] = ("fp4_block16",)
    SCALE_BLOCK_SIZE: ClassVar[int] = block_fp4.FP4_BLOCK16_BLOCK_SIZE
    _functions = (block_fp4.quantize_fp4_block16, block_fp4.dequantize_fp4_block16)
