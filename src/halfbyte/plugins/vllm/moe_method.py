"""halfbyte's W4A16 experts behind vLLM's interface for MoE layers.

vLLM routes, loads the weights of this rank (a range of the intermediate size, or some of the
experts), runs shared experts and sums over ranks. The method converts the loaded parameters
(`moe_weights`) for a kernel. Gate and up may have different global scales, where vLLM takes those
of gate for both.
"""

import logging
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from halfbyte.moe import MoeConfig, MoeKernel, init_moe_kernel
from halfbyte.moe.experts import WeightFormat
from halfbyte.plugins.vllm.attention import batch_invariant
from halfbyte.plugins.vllm.log import follow_vllm
from halfbyte.plugins.vllm.moe_weights import (
    GPT_OSS_METHOD,
    format_of,
    intermediate_size_of,
    moe_config_of,
    packed_experts,
    parameters_of,
)
from halfbyte.plugins.vllm.scales import has_no_weights
from halfbyte.plugins.vllm.stored_experts import StoredExperts, check_top_k
from halfbyte.plugins.vllm.unloaded import (
    check_experts,
    check_gpt_oss,
    mark_gpt_oss,
    mark_unloaded,
)

logger = logging.getLogger("halfbyte")

_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "ModelOptNvFp4FusedMoE": {"use_global_sf": False},
    GPT_OSS_METHOD: {"weight_dtype": "gpt_oss_mxfp4"},
    "CompressedTensorsW4A4Nvfp4MoEMethod": {"group_size": 16, "use_global_sf": False},
    "CompressedTensorsW4A4Mxfp4MoEMethod": {"group_size": 32},
}
"""Attributes that vLLM's constructors set, and that its creation and loading of parameters read."""


@cache
def halfbyte_method(method: type) -> type:
    """halfbyte's subclass of vLLM's method class.

    It has the same name, by which vLLM's loaders of expert weights tell formats and dialects.
    """
    return type(method.__name__, (HalfbyteMoeMethod, method), {"vllm_class": method})


class HalfbyteMoeMethod(FusedMoEMethodBase):
    """W4A16 experts; a mixin before vLLM's class, which creates and loads the parameters."""

    vllm_class: type
    supports_eplb = False
    supports_pre_processed_weights = False
    skip_forward_padding = False
    has_unpadded_output = False
    is_monolithic = False
    """Whether vLLM calls `apply_monolithic`, which routes, instead of `apply`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = signature(self.vllm_class.__init__).bind(self, *args, **kwargs).arguments  # type: ignore[misc]
        # Not vLLM's own constructor, which would choose one of vLLM's kernels.
        FusedMoEMethodBase.__init__(self, moe_config_of(given))
        for name, value in _ATTRIBUTES[self.vllm_class.__name__].items():
            setattr(self, name, value)
        if "quant_config" in given:
            self.quant_config = given["quant_config"]
        # Read here: the configuration is not available when weights are processed.
        vllm_config = get_current_vllm_config()
        self._is_dummy = has_no_weights(vllm_config.load_config)
        self._stored = StoredExperts.of(vllm_config)
        self.kernel: MoeKernel | None = None
        self._names: tuple[str, ...] = ()
        self.is_monolithic = _routes()  # computed once: on CPUs Dynamo traces its readers
        _log_choice(format_of(self.vllm_class), _quantizes_activations(given))

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Sizes of the parameters; see `intermediate_size_of`."""
        size = intermediate_size_of(self.vllm_class, intermediate_size_per_partition)
        return hidden_size, size

    def maybe_make_prepare_finalize(self, *args: Any, **kwargs: Any) -> None:
        """None: vLLM 0.24 asks for it if tokens are sent to other ranks' experts."""

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: it describes weights for vLLM's kernels."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Create vLLM's parameters, filled with marks by which those never loaded are found.

        Raises:
            ValueError: the checkpoint's experts have other shapes or numbers, or a token more
                experts than there are; the message names the layer.
        """
        check_top_k(layer.layer_name, self.moe)
        super().create_weights(layer, *args, **kwargs)
        if self._is_dummy:
            return
        if self._stored is not None:
            self._stored.check(layer.layer_name, self.moe, format_of(self.vllm_class))
        if self.vllm_class.__name__ == GPT_OSS_METHOD:
            mark_gpt_oss(layer)
        else:
            mark_unloaded(layer, format_of(self.vllm_class))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the layer's parameters by those of a kernel of halfbyte's.

        Raises:
            ValueError: weights are missing, a scale or bias is invalid, or the kernel cannot
                represent the weights exactly; the message names the layer.
        """
        if self._is_dummy:
            pass
        elif self.vllm_class.__name__ == GPT_OSS_METHOD:
            check_gpt_oss(layer, self.moe.moe_parallel_config.tp_rank)
        else:
            check_experts(layer, format_of(self.vllm_class))
        experts = packed_experts(self.vllm_class, self.moe, layer, self._is_dummy)
        config = MoeConfig.of(experts, self.moe.in_dtype, batch_invariant())
        self.kernel = init_moe_kernel(config)
        try:
            tensors = self.kernel.prepare(experts)
        except ValueError as error:
            raise ValueError(f"{layer.layer_name}: {error}") from None
        for name in parameters_of(layer):
            delattr(layer, name)
        for name, tensor in tensors.items():
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._names = tuple(tensors)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *shared_experts: Any,
        **more: Any,
    ) -> torch.Tensor:
        """The weighted sum of this rank's experts.

        Args:
            layer: vLLM's `RoutedExperts`.
            x: `[M, H]`.
            topk_weights: `[M, top_k]`.
            topk_ids: `[M, top_k]`, of all ranks' experts.
            shared_experts, more: what vLLM's own kernels need for shared experts, which vLLM runs
                itself here.

        Returns:
            `[M, H]` of x's dtype.
        """
        assert self.kernel is not None
        if layer.apply_router_weight_on_input:  # Llama 4
            x, topk_weights = weigh_input(x, topk_weights)
        ids = local_ids(topk_ids, layer.expert_map)
        tensors = {name: getattr(layer, name) for name in self._names}
        return self.kernel.apply(tensors, x, ids, topk_weights)

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, *rest: Any, **more: Any
    ) -> torch.Tensor:
        """`apply` after vLLM's routing for CPUs.

        Args:
            layer: vLLM's `RoutedExperts`.
            x: `[M, H]`.
            router_logits: `[M, experts of all ranks]`.
            rest, more: what other vLLM versions add.
        """
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        weights, ids = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        return self.apply(layer, x, weights, ids)


@cache
def _routes() -> bool:
    """Whether methods route: on CPUs of vLLM 0.24, whose routers need a GPU."""
    from vllm.platforms import current_platform

    routers = "vllm.model_executor.layers.fused_moe.router"
    return current_platform.is_cpu() and find_spec(f"{routers}.cpu_router") is None


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Ids of this rank's experts; -1 for those of other ranks and for padding.

    Args:
        topk_ids: `[M, top_k]`, of all ranks' experts; negative ones are padding.
        expert_map: int32 `[experts of all ranks]`, this rank's number or -1; None if it has all.
    """
    if expert_map is None:
        return topk_ids
    return torch.where(topk_ids < 0, -1, expert_map[topk_ids.clamp(min=0).long()])


def weigh_input(x: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the router's weight to the experts' input instead of their results.

    Args:
        x: `[M, H]`.
        topk_weights: `[M, 1]`.

    Raises:
        ValueError: several experts per token, whose inputs would differ.
    """
    if topk_weights.shape[1] != 1:
        raise ValueError(
            f"apply_router_weight_on_input: expected one expert per token, got "
            f"{topk_weights.shape[1]}"
        )
    return x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)


def _quantizes_activations(arguments: Mapping[str, Any]) -> bool:
    """Whether a checkpoint asks for NVFP4 activations (W4A4)."""
    quantization = arguments.get("quant_config")
    if quantization is not None:
        return bool(quantization.quant_method == "NVFP4")
    return not arguments.get("use_a16", True)


@cache
def _log_choice(weight_format: WeightFormat, quantizes_activations: bool) -> None:
    follow_vllm()
    name = weight_format.upper()
    if quantizes_activations:
        logger.warning(
            "%s experts run on halfbyte's kernels as W4A16: activations stay in 16 bits, which "
            "the checkpoint would quantize (W4A4)",
            name,
        )
    else:
        logger.info("%s experts run on halfbyte's kernels", name)
