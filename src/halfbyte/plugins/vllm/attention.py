"""Attention of a layer: quantizes K and V into pages, attends to the packed pages."""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from halfbyte.attention import paged_attention
from halfbyte.attention.recent.rings import attend_with_rings
from halfbyte.kvcache import KVScales, NewTokens
from halfbyte.kvcache.layer import LayerQuantization
from halfbyte.kvcache.recent_step import LayerPages
from halfbyte.kvcache.recipe import RECIPES
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout
from halfbyte.plugins.vllm.checks import check_config
from halfbyte.plugins.vllm.formats import LayerFormat, block_size_of, pages_of
from halfbyte.plugins.vllm.kv_scale_loader_fix import accept_shard_ids
from halfbyte.plugins.vllm.metadata import HalfbyteMetadata
from halfbyte.plugins.vllm.options import LastModel
from halfbyte.plugins.vllm.recent import ring_slots, ring_tokens
from halfbyte.plugins.vllm.scales import check_scales, heads_of_rank

Rings = tuple[torch.Tensor, torch.Tensor]


class LayerKind(NamedTuple):
    """What decides which kernels a layer runs."""

    head_size: int
    head_size_v: int
    num_heads: int
    """Of this rank, as `num_kv_heads`."""
    num_kv_heads: int
    sliding_window: int | None
    softcap: float | None
    has_sinks: bool
    format: LayerFormat
    has_transform: bool
    has_rings: bool


class HalfbyteAttentionImpl(AttentionImpl[HalfbyteMetadata]):
    """See vLLM's `AttentionImpl` for the arguments.

    Raises:
        NotImplementedError: ALiBi, encoders, or an unknown option.
        ValueError: see `check_config`.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **more: Any,
    ) -> None:
        refused = [name for name, value in more.items() if value]
        if alibi_slopes is not None:
            refused.append("alibi_slopes")
        if attn_type != AttentionType.DECODER:
            refused.append(f"attention type {attn_type}")
        if refused:
            raise NotImplementedError(
                f"halfbyte: {', '.join(refused)} is not supported; use vLLM's own backend: leave "
                "out --attention-backend"
            )
        config = get_current_vllm_config()
        options = check_config(config)
        LastModel.options, LastModel.dtype = options, torch.get_default_dtype()
        accept_shard_ids()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.softcap, self.sinks = sliding_window, logits_soft_cap, sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.format = LayerFormat.of(kv_cache_dtype, torch.get_default_dtype(), options)
        self.k_scale: float | torch.Tensor = 1.0
        self.v_scale: float | torch.Tensor = 1.0
        self._has_scales = not self.needs_scales
        self.recipe = options.recipe if self.format.k.is_nvfp4 else RECIPES["plain"]
        if self.needs_scales and LastModel.with_scales is not config.model_config:
            # Check before loading the weights, which takes minutes.
            check_scales(config, options, self.recipe)
            LastModel.with_scales = config.model_config
        self.transform: KVTransform | None = None
        self._layout: PageLayout | None = None
        # Allocate now, so that vLLM's memory profiling counts the rings.
        has_rings = self.format.k.is_nvfp4 and kv_sharing_target_layer_name is None
        self.recent_tokens = ring_tokens(config) if has_rings else 0
        slots = ring_slots(config, self.recent_tokens)
        # One more for padding (`PADDING_ENTRY`).
        self._ring_shape = config.scheduler_config.max_num_seqs + 1, self.num_kv_heads, slots
        self.dtype = torch.get_default_dtype()
        self.rings: Rings | None = None
        if self.recent_tokens:
            self.rings = self._make_rings(head_size)

    @property
    def needs_scales(self) -> bool:
        """Whether K or V is stored in a format with a global scale."""
        return self.format.k.has_global_scale or self.format.v.has_global_scale

    def set_scales(self, scales: KVScales, layer: int, device: torch.device) -> None:
        """Set the scales of a layer; on a GPU as tensors, which kernels read there.

        Raises:
            ValueError: the calibration is another model's.
        """
        heads = slice(None)
        if self.recipe.changes_k:
            total = scales.calibration_for(self.recipe).layers[layer].mean.shape[0]
            rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            scales.check_heads(layer, self.num_kv_heads, self.head_size, ranks)
            heads = heads_of_rank(total, self.num_kv_heads, rank, ranks)
        quantization = LayerQuantization.of(
            scales, layer, self.format.k, self.format.v, self.recipe, device, heads
        )
        self.transform = quantization.transform
        pair: Any = (quantization.k_scale, quantization.v_scale)
        if device.type != "cpu":
            pair = torch.tensor(pair, dtype=torch.float32, device=device)
        self.k_scale, self.v_scale = pair
        self._has_scales = True

    def check_rings(self, head_size_v: int, device: torch.device) -> None:
        """Reallocate the rings if the layer's device or head size differs."""
        if self.rings is None:
            return
        value = self.rings[1]
        if value.device.type != device.type or value.shape[3] != head_size_v:
            self.rings = self._make_rings(head_size_v, device)

    def _make_rings(self, head_size_v: int, device: torch.device | None = None) -> Rings:
        key, value = (
            torch.zeros(
                (*self._ring_shape, size),
                dtype=self.dtype,
                device=torch.get_default_device() if device is None else device,
            )
            for size in (self.head_size, head_size_v)
        )
        return key, value

    def kind(self, head_size_v: int) -> LayerKind:
        """What decides which kernels the layer runs."""
        return LayerKind(
            head_size=self.head_size,
            head_size_v=head_size_v,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            has_sinks=self.sinks is not None,
            format=self.format,
            has_transform=self.transform is not None,
            has_rings=self.rings is not None,
        )

    @property
    def max_position(self) -> int | None:
        """Max tokens for which the recipe has means of K; None for no limit."""
        return None if self.transform is None else self.transform.max_position

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store tokens without attention, as DFlash drafts do; `forward` stores those of its step.

        Raises:
            NotImplementedError: a recipe, for which the tokens' positions are missing.
        """
        if kv_cache.numel() == 0:  # while vLLM measures its memory
            return
        if self.transform is not None:
            raise NotImplementedError(
                "halfbyte: storing tokens without attention needs kv_recipe plain"
            )
        pages, layout = self._pages(layer, kv_cache)
        NewTokens(key, value, slot_mapping).store(pages, layout, self.k_scale, self.v_scale)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HalfbyteMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's tokens, and attend to the cache with them.

        Args:
            query: `[tokens, heads, head_size]`, possibly padded.
            key, value: `[tokens, kv_heads, head_size]` and `[tokens, kv_heads, head_size_v]`; not
                stored by a layer that shares another one's cache.
            kv_cache: the layer's pages.
            attn_metadata: None during memory profiling; the output is then zeros.
            output: `[tokens, heads, head_size_v]`, written.
        """
        if attn_metadata is None:
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("halfbyte: quantized attention output is not supported")
        tokens = attn_metadata.num_actual_tokens
        pages, layout = self._pages(layer, kv_cache)
        new = self._new_tokens(key, value, attn_metadata)
        attend = partial(
            paged_attention,
            query[:tokens],
            pages,
            layout=layout,
            query_start_loc=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            block_tables=attn_metadata.block_tables,
            scale=self.scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            sliding_window=self.sliding_window,
            sinks=self.sinks,
            softcap=self.softcap,
            batch_invariant=batch_invariant(),
            out=output[:tokens],
            plans=attn_metadata.current_plans(),
            transform=self.transform,
        )
        step = None if self.rings is None else attn_metadata.recent_step()
        if self.rings is None or step is None or new is None:
            attend(new=new)
            return output
        packed = LayerPages(
            *(pages, layout, attn_metadata.block_tables),
            *(self.k_scale, self.v_scale, self.transform),
        )
        attend_with_rings(
            attend, step, self.rings, self.recent_tokens, packed, new, self.sliding_window
        )
        return output

    def _new_tokens(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: HalfbyteMetadata,
    ) -> NewTokens | None:
        """The step's tokens with their slots; None if another layer's cache is shared."""
        if self.kv_sharing_target_layer_name is not None:
            return None
        slot_mapping = metadata.slot_mapping
        if self.transform is None:
            return NewTokens(key, value, slot_mapping)
        # Padding slots have no position.
        positions = metadata.queries().positions
        return NewTokens(key, value, slot_mapping[: positions.shape[0]], positions)

    def _pages(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, PageLayout]:
        if not self._has_scales:
            raise RuntimeError("halfbyte: the layer was given no KV cache scales")
        block_size = block_size_of(kv_cache)
        if self._layout is None or self._layout.block_size != block_size:
            self._layout = self.format.layout(
                self.head_size, layer.head_size_v, self.num_kv_heads, block_size
            )
        return pages_of(kv_cache, self._layout), self._layout


@cache
def batch_invariant() -> bool:
    """Whether results must be independent of the batch."""
    import vllm.envs as envs

    return bool(envs.VLLM_BATCH_INVARIANT)
