"""The attention backend: its capabilities, and its pages for both vLLM interfaces.

Up to vLLM 0.24 or so a backend returns the shape of the whole cache (`get_kv_cache_shape`), from
0.32 or so on the bytes per token and head (`customize_spec`). Each version calls the method that it
knows.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from halfbyte.kvcache import nvfp4_kv_cache_full_dim
from halfbyte.plugins.vllm.formats import CARRIER, LayerFormat
from halfbyte.plugins.vllm.options import ALL_CACHE_DTYPES, LastModel

_OLDEST_GPU = 80
_INSTEAD = {
    "head_size": "16 values share a scale, so it must be a multiple of 16",
    "dtype": "use --dtype bfloat16, float16 or float32",
    "kv_cache_dtype": f"use --kv-cache-dtype {CARRIER}, fp8, bfloat16 or auto",
    "block_size": "use --block-size 16 or a multiple of it",
    "compute capability": f"use a GPU from SM{_OLDEST_GPU}",
}
"""Advice for vLLM's rejection reasons, by their prefix."""
_OWN_BACKEND = "use vLLM's own backend: leave out --attention-backend"


class HalfbyteAttentionBackend(AttentionBackend):
    """`--attention-backend CUSTOM`."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*ALL_CACHE_DTYPES]

    @staticmethod
    def get_name() -> str:
        """Name in `AttentionBackendEnum`, where vLLM looks it up."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        """The attention implementation class."""
        from halfbyte.plugins.vllm.attention import HalfbyteAttentionImpl

        return HalfbyteAttentionImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """The metadata builder class."""
        from halfbyte.plugins.vllm.metadata import HalfbyteMetadataBuilder

        return HalfbyteMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any multiple of 16, so that vLLM never splits a block (pages cannot be split)."""
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A layer's spec with the bytes of its format (vLLM from 0.32)."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_nvfp4:
            return spec
        layer_format = LayerFormat.of(CARRIER, LastModel.dtype, LastModel.options)
        cell = layer_format.cell_bytes(spec.head_size, spec.head_size_v)
        return replace(spec, state_content_bytes=cell)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Layouts with contiguous pages (vLLM from 0.32)."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Shape of a layer's cache (vLLM 0.24); a page holds K, then V."""
        is_nvfp4 = cache_dtype_str.startswith("nvfp4")
        content = nvfp4_kv_cache_full_dim(head_size) if is_nvfp4 else head_size
        return (num_blocks, 2, num_kv_heads, block_size, content)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Order of these dimensions in memory; with a layer dimension, block-major."""
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """HND: heads before tokens."""
        return "HND"

    @classmethod
    def validate_configuration(cls, *arguments: Any, **named: Any) -> list[str]:
        """vLLM's rejection reasons, with advice added."""
        reasons = super().validate_configuration(*arguments, **named)
        return [f"{reason} ({_instead_of(reason)})" for reason in reasons]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Any multiple of the 16 values that share a scale."""
        return head_size > 0 and head_size % 16 == 0

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes, with `VLLM_BATCH_INVARIANT=1`."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """CPUs (no capability), and SM80 or later."""
        return capability is None or capability.to_int() >= _OLDEST_GPU


def _instead_of(reason: str) -> str:
    return next((text for name, text in _INSTEAD.items() if reason.startswith(name)), _OWN_BACKEND)
