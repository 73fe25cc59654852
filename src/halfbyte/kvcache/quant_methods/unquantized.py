"""Unquantized formats: float32, float16, bfloat16."""

from typing import ClassVar

import torch

from halfbyte.kvcache.quant_methods.base import KVCacheQuantMethod
from halfbyte.layouts import KVCacheDType


class UnquantizedKVCacheMethod(KVCacheQuantMethod):
    """A cast to the cache's dtype; no scales. Narrowing to float16 saturates, as elsewhere."""

    FORMATS: ClassVar[tuple[str, ...]] = KVCacheDType.where(lambda row: not row.is_quantized)

    def quantize(
        self, x: torch.Tensor, global_scale: float | torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The values of `x` in the cache's dtype, and no scales."""
        target = self.dtype.storage_dtype
        if target == torch.float16 and x.dtype != torch.float16:
            limit = self.dtype.kv_format.max_value
            x = x.float().clamp(-limit, limit)  # bfloat16 would round the limit up
        return x.to(target), None

    def dequantize(
        self,
        data: torch.Tensor,
        scales: torch.Tensor | None,
        global_scale: float | torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The stored values in `dtype`."""
        return data.to(dtype)

    def global_scale_from_amax(self, amax: float) -> float:
        """1: there is no scale."""
        return 1.0
