"""Attention metadata of a step, CUDA graph support, and setting the scales of layers."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from halfbyte.attention import AttentionPlans
from halfbyte.attention.queries import QueryPositions
from halfbyte.kvcache import KVScales
from halfbyte.kvcache.recent_step import RecentStep
from halfbyte.plugins.vllm.checks import MAX_CAPTURED_QUERIES, check_config, queries_per_step
from halfbyte.plugins.vllm.log import log_cache
from halfbyte.plugins.vllm.options import Options
from halfbyte.plugins.vllm.recent import ring_slots, ring_tokens
from halfbyte.plugins.vllm.registry import has_page_specs
from halfbyte.plugins.vllm.ring_runners import running_rings
from halfbyte.plugins.vllm.ring_step import RingBuffers, RingStep
from halfbyte.plugins.vllm.scales import LayerPlace, place_of, scales_of_draft, scales_of_model


@dataclass
class HalfbyteMetadata:
    """Metadata of a step, shared by the layers of a KV cache group.

    Args:
        num_actual_tokens: query tokens; in a CUDA graph including padding.
        query_start_loc: int32 `[sequences + 1]`.
        seq_lens: int32 `[sequences]`, the queries included.
        block_tables: int32 `[sequences, max_pages]`.
        slot_mapping: int64 `[tokens]`, where the step's tokens are stored.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    plans: AttentionPlans = field(default_factory=AttentionPlans)
    captured_plans: AttentionPlans = field(default_factory=AttentionPlans)
    """Plans made during graph capture, so that every replay plans for its own lengths."""
    rings: RingStep | None = None
    """The step's rings; None if the run has none."""

    def queries(self) -> QueryPositions:
        """Sequence and position of each token; -1 for padding."""
        return QueryPositions.of_step(
            self.current_plans(), self.query_start_loc, self.seq_lens, self.num_actual_tokens
        )

    def recent_step(self) -> RecentStep | None:
        """Slots of the step's tokens in the rings, the same in every layer; None without rings."""
        rings = self.rings
        if rings is None:
            return None
        return self.current_plans().get("rings", lambda: rings.recent_step(self.queries()))

    def current_plans(self) -> AttentionPlans:
        """The plans of the current capture, or else of the step."""
        is_captured = self.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
        return self.captured_plans if is_captured else self.plans


class HalfbyteMetadataBuilder(AttentionMetadataBuilder[HalfbyteMetadata]):
    """Builds `HalfbyteMetadata` for one group of layers that share block tables."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        *more: Any,
        **options: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *more, **options)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        set_layer_scales(vllm_config, layer_names, device)
        self._rings: RingBuffers | None = None
        if tokens := ring_tokens(vllm_config):
            capacity = vllm_config.scheduler_config.max_num_seqs
            slots = ring_slots(vllm_config, tokens)
            self._rings = RingBuffers(capacity, tokens, slots, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Uniform batches, with as many queries per sequence as the decode kernel supports."""
        if queries_per_step(vllm_config) > MAX_CAPTURED_QUERIES:
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> HalfbyteMetadata:
        """See vLLM's `AttentionMetadataBuilder.build`."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("halfbyte: only causal attention is supported")
        rings = None
        if self._rings is not None:
            sizes = common.num_reqs, common.num_actual_tokens
            rings = self._rings.step(running_rings(), *sizes)
        return HalfbyteMetadata(
            common.num_actual_tokens,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            rings=rings,
        )


def set_layer_scales(vllm_config: Any, layer_names: list[str], device: torch.device) -> None:
    """Set the scales of a group's layers, after loading and before the first step.

    Raises:
        ValueError: a quantized layer without scales.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    options = check_config(vllm_config)
    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    _refuse_unread_caches(vllm_config, device)
    found: dict[bool, KVScales] = {}
    layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
    for name, layer in layers.items():
        # A layer that shares another layer's cache uses that layer's scales.
        source = layer.kv_sharing_target_layer_name or name
        place = place_of(source, extract_layer_index(source), num_layers)
        if layer.head_size_v != layer.head_size and not has_page_specs():
            raise ValueError(
                f"halfbyte: {name} has K of {layer.head_size} and V of {layer.head_size_v}, which "
                "this vLLM cannot express; use vLLM 0.32 or later"
            )
        if not layer.impl.needs_scales:
            continue
        if place.is_draft not in found:
            found[place.is_draft] = _scales_for(vllm_config, options, place)
        layer.impl.set_scales(found[place.is_draft], place.layer, device)
        layer.impl.check_rings(layer.head_size_v, device)
        most, limit = vllm_config.model_config.max_model_len, layer.impl.max_position
        if limit is not None and most > limit:
            raise ValueError(
                f"halfbyte: kv_recipe {options.kv_recipe}: the calibration has means of K for "
                f"{limit} tokens; use --max-model-len {limit}, or kv_recipe plain"
            )
    _log_target(vllm_config, options, found.get(False))


def _log_target(vllm_config: Any, options: Options, scales: KVScales | None) -> None:
    """Log how the target stores K and V, with the first of its groups that has scales."""
    layers = get_layers_from_vllm_config(vllm_config, Attention).values()
    impls = [layer.impl for layer in layers if hasattr(layer.impl, "needs_scales")]
    scaled = [impl for impl in impls if impl.needs_scales]
    if scales is not None or not scaled:
        source = None if scales is None else scales.source
        log_cache(vllm_config.model_config, (scaled or impls)[0], options, source)


def _refuse_unread_caches(vllm_config: Any, device: torch.device) -> None:
    """Raise ValueError for layers (a draft's) with vLLM's own attention and a quantized cache.

    On CPUs vLLM accepts an nvfp4 cache but does not quantize; elsewhere it quantizes with a scale
    of 1.0 if there is none.
    """
    for name, layer in get_layers_from_vllm_config(vllm_config, Attention).items():
        if hasattr(layer.impl, "needs_scales"):
            continue
        dtype, kind = str(layer.kv_cache_dtype), type(layer.impl).__name__
        stores = not (dtype.startswith("nvfp4") and device.type == "cpu")
        scales = [getattr(layer, f"_{side}_scale_float", 1.0) for side in "kv"]
        if dtype.startswith(("nvfp4", "fp8")) and (not stores or scales == [1.0, 1.0]):
            why = "without scales" if stores else "which does not support this dtype"
            raise ValueError(
                f"halfbyte: {name} has a cache of {dtype} and runs on {kind}, {why}; "
                'for a draft set "attention_backend": "CUSTOM" in --speculative-config'
            )


def _scales_for(vllm_config: Any, options: Options, place: LayerPlace) -> KVScales:
    if not place.is_draft:
        return scales_of_model(
            vllm_config.model_config,
            vllm_config.load_config,
            options.kv_scales,
            "kv_scales",
            options.recipe,
        )
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        raise ValueError(f"halfbyte: layer {place.layer} is beyond the model's layers")
    return scales_of_draft(vllm_config, options, place.layer)
