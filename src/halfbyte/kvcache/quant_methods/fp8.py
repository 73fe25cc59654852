"""FP8 with one scale per tensor: `fp8_e4m3` and `fp8_e5m2`."""

from typing import ClassVar

import torch

from halfbyte.kvcache.quant_methods.base import KVCacheQuantMethod
from halfbyte.layouts import KVCacheDType
from halfbyte.numerics import fp8


class Fp8KVCacheMethod(KVCacheQuantMethod):
    """`halfbyte.numerics.fp8` on the bytes of a cache."""

    FORMATS: ClassVar[tuple[str, ...]] = KVCacheDType.where(lambda row: row.fp8)

    def __init__(self, dtype: KVCacheDType) -> None:
        super().__init__(dtype)
        assert dtype.kv_format.fp8 is not None
        self._format = dtype.kv_format.fp8

    def quantize(
        self, x: torch.Tensor, global_scale: float | torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """FP8 bytes of `x / global_scale`, and no block scales."""
        return fp8.quantize(x, global_scale, self._format), None

    def dequantize(
        self,
        data: torch.Tensor,
        scales: torch.Tensor | None,
        global_scale: float | torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """`fp8 * global_scale` in `dtype`."""
        return fp8.dequantize(data, global_scale, self._format, dtype)

    def global_scale_from_amax(self, amax: float) -> float:
        """`amax / 448` (E4M3) or `amax / 57344` (E5M2)."""
        return float(fp8.scale_from_amax(amax, self._format))
