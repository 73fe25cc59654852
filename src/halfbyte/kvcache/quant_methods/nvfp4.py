"""NVFP4: `nvfp4` (block scales by `amax6`) and `nvfp4_4over6` (by `four_over_six`).

The same bits, so one reader.
"""

from typing import ClassVar

import torch

from halfbyte.kvcache.quant_methods.base import KVCacheQuantMethod
from halfbyte.layouts import KVCacheDType
from halfbyte.numerics import nvfp4


class NVFP4KVCacheMethod(KVCacheQuantMethod):
    """`halfbyte.numerics.nvfp4` on the bytes of a cache."""

    FORMATS: ClassVar[tuple[str, ...]] = KVCacheDType.where(lambda row: row.nvfp4_recipe)
    SCALE_BLOCK_SIZE: ClassVar[int] = nvfp4.BLOCK_SIZE

    def __init__(self, dtype: KVCacheDType) -> None:
        super().__init__(dtype)
        assert dtype.kv_format.nvfp4_recipe is not None
        self._recipe = dtype.kv_format.nvfp4_recipe

    def quantize(
        self, x: torch.Tensor, global_scale: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed codes and E4M3 block scales (as uint8)."""
        data, scales = nvfp4.quantize(x, global_scale, self._recipe)
        return data, scales.view(torch.uint8)

    def dequantize(
        self,
        data: torch.Tensor,
        scales: torch.Tensor | None,
        global_scale: float | torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """`(e2m1 * block_scale) * global_scale` in `dtype`."""
        assert scales is not None
        return nvfp4.dequantize(data, scales, global_scale, dtype)

    def global_scale_from_amax(self, amax: float) -> float:
        """`amax / 2688` (amax6) or `amax / 1536` (four_over_six)."""
        return float(nvfp4.global_scale_from_amax(amax, self._recipe))
