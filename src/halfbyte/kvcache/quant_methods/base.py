"""The interface of cache formats: K and V to bytes, and back.

Two interfaces over one pair of functions (`quantize`, `dequantize`):
- `reshape_and_cache` and the readers use a method for bytes and values, and `PageLayout` for their
  places;
- the token-slot buffers of SGLang's `KVCacheQuantMethod` (PR 21954), for engines built that way.
  A slot is a page of one token, so that its bytes, too, are self-contained.

Unlike there, no method needs a dequantization workspace: halfbyte reads packed bytes.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from halfbyte.kvcache.scales import KVScales
from halfbyte.layouts import KVCacheDType, PageLayout


class KVCacheQuantMethod(ABC):
    """Base of all cache formats; one subclass per family, one instance per format."""

    FORMATS: ClassVar[tuple[str, ...]] = ()
    """Names of the formats that the registry makes the class for, each in one class."""
    SCALE_BLOCK_SIZE: ClassVar[int] = 1
    """Values that share a block scale, as `dtype.scale_block_size`; 1 where there are none."""

    def __init__(self, dtype: KVCacheDType) -> None:
        block_size = dtype.scale_block_size or 1
        if block_size != self.SCALE_BLOCK_SIZE:
            raise ValueError(
                f"{type(self).__name__}.SCALE_BLOCK_SIZE: expected {block_size}, the block size of "
                f"{dtype}, got {self.SCALE_BLOCK_SIZE}"
            )
        self.dtype = dtype
        self.scales: KVScales | None = None

    @property
    def name(self) -> str:
        """The format's name, as `KVCacheDType` spells it."""
        return self.dtype.value

    @abstractmethod
    def quantize(
        self, x: torch.Tensor, global_scale: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode `x [..., D]`.

        Args:
            x: float tensor.
            global_scale: global scale, float or float32 scalar tensor; formats without one
                ignore it.

        Returns:
            `(data, scales)`: data of `dtype.storage_dtype` (`[..., D * bits / 8]` of uint8 for
            quantized formats, else `[..., D]`); bytes of block scales, uint8
            `[..., dtype.scale_bytes(D)]`, or None.
        """

    @abstractmethod
    def dequantize(
        self,
        data: torch.Tensor,
        scales: torch.Tensor | None,
        global_scale: float | torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Decode what `quantize` returned to `[..., D]` of `dtype`; one rounding at the end."""

    @abstractmethod
    def global_scale_from_amax(self, amax: float) -> float:
        """Global scale for tensors whose largest magnitude is `amax`; 1 without a scale."""

    def needs_global_scale(self) -> bool:
        """Whether a per-layer float32 scale takes part in dequantization."""
        return self.dtype.has_global_scale

    def needs_dequant_workspace(self) -> bool:
        """Whether a pool must keep a dequantized copy beside the cache; never here."""
        return False

    def compute_cell_size(
        self, head_num: int, head_dim: int, num_layers: int, kv_size: int = 1
    ) -> int:
        """Bytes per token over all layers, K and V, block scales included.

        Args:
            head_num: KV heads.
            head_dim: values per head.
            num_layers: layers that have a cache.
            kv_size: ignored, because the format determines it; part of SGLang's interface.
        """
        per_head = self.dtype.data_bytes(head_dim) + self.dtype.scale_bytes(head_dim)
        return 2 * head_num * per_head * num_layers

    def create_buffers(
        self,
        size: int,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device | str,
    ) -> dict[str, Any]:
        """Allocate zeroed token-slot buffers.

        Args:
            size: token slots per layer.
            head_num, head_dim, layer_num: geometry.
            device: of the buffers.

        Returns:
            A dict of per-layer lists of zero-copy views: `k_buffer`, `v_buffer`
            (`[size, head_num, bytes or values]`), `k_scale_buffer`, `v_scale_buffer`
            (uint8 `[size, head_num, scale bytes]`, or None), `pages` (the bytes
            they view: uint8 `[size, page_bytes]`), and `layout`, `store_dtype`, `dq_k_buffer` and
            `dq_v_buffer` (None: no workspace).
        """
        layout = PageLayout(self.dtype, self.dtype, head_dim, None, head_num, block_size=1)
        pages = [
            torch.zeros((size, layout.page_bytes), dtype=torch.uint8, device=device)
            for _ in range(layer_num)
        ]
        views = [layout.views(page) for page in pages]

        def per_layer(field: str) -> list[torch.Tensor] | None:
            tensors = [getattr(view, field) for view in views]
            return None if None in tensors else [tensor[:, 0] for tensor in tensors]

        return {
            "k_buffer": per_layer("k_data"),
            "v_buffer": per_layer("v_data"),
            "k_scale_buffer": per_layer("k_scale") if self.dtype.scale_block_size else None,
            "v_scale_buffer": per_layer("v_scale") if self.dtype.scale_block_size else None,
            "dq_k_buffer": None,
            "dq_v_buffer": None,
            "store_dtype": self.dtype.storage_dtype,
            "pages": pages,
            "layout": layout,
        }

    def quantize_and_store(
        self,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        k_scale_buffer: torch.Tensor | None,
        v_scale_buffer: torch.Tensor | None,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Encode `cache_k`, `cache_v` (`[tokens, heads, D]`) into slots `loc` of a layer's buffers.

        Slots below 0 are padding and are skipped.

        Raises:
            ValueError: the format needs a global scale and none was given.
        """
        keep = loc >= 0
        slots = loc[keep].long()
        # Both are encoded before either is written, so that an error leaves no partial token.
        k = self.quantize(cache_k[keep], self._require_scale(k_scale, "k_scale"))
        v = self.quantize(cache_v[keep], self._require_scale(v_scale, "v_scale"))
        for buffer, scale_buffer, (data, block_scales) in (
            (k_buffer, k_scale_buffer, k),
            (v_buffer, v_scale_buffer, v),
        ):
            buffer[slots] = data
            if scale_buffer is not None and block_scales is not None:
                scale_buffer[slots] = block_scales

    def dequantize_prev_kv(
        self,
        k: torch.Tensor,
        k_scales: torch.Tensor | None,
        v: torch.Tensor,
        v_scales: torch.Tensor | None,
        layer_id: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of rows already selected from the buffers.

        Args:
            k, k_scales, v, v_scales: rows of the four buffers.
            layer_id: whose loaded scales to use, where `k_scale` and `v_scale` are not given.
            dtype: of the result. bfloat16 by default: float8_e4m3fn is lossy for 275 of the 1016
                code x scale products, so it must be requested.

        Raises:
            ValueError: the format needs global scales, and neither were given nor loaded.
        """
        if self.needs_global_scale() and self.scales is not None and layer_id is not None:
            loaded_k, loaded_v = self.scales.amax_of_layer(layer_id)
            k_scale = self.global_scale_from_amax(loaded_k) if k_scale is None else k_scale
            v_scale = self.global_scale_from_amax(loaded_v) if v_scale is None else v_scale
        return (
            self.dequantize(k, k_scales, self._require_scale(k_scale, "k_scale"), dtype),
            self.dequantize(v, v_scales, self._require_scale(v_scale, "v_scale"), dtype),
        )

    def load_scales_from_model(self, model: nn.Module) -> KVScales | None:
        """Load the per-layer `k_scale` and `v_scale` of a model's attention modules.

        Returns:
            The scales, also kept in `self.scales`; None for a format without global scales.

        Raises:
            ValueError: the format needs scales and a layer has none (never silently 1.0).
        """
        if self.needs_global_scale():
            self.scales = KVScales.from_model(model, self)
        return self.scales

    def _require_scale(self, scale: float | torch.Tensor | None, name: str) -> float | torch.Tensor:
        if scale is not None:
            return scale
        if self.needs_global_scale():
            raise ValueError(
                f"{name}: {self.name} needs a global scale; pass one or load the model's"
            )
        return 1.0
