"""Norms, SwiGLU and rotary embedding of vLLM's models by `halfbyte.elementwise`.

An instance of vLLM's layer gets another `forward_native` when it is created in a run that uses the
kernels. vLLM's classes, their names and registries stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch

from halfbyte.after_import import after_import
from halfbyte.elementwise import add_rms_norm, rms_norm, rotary_embedding, silu_and_mul
from halfbyte.elementwise.operands import KERNEL_DTYPES
from halfbyte.kernels.runtime.inductor import can_overlap
from halfbyte.plugins.vllm.options import LastModel, Options
from halfbyte.plugins.vllm.registry import uses_halfbyte, wants_kernels

_LAYERS = "vllm.model_executor.layers."
_MIN_NORM = 1024
"""Min size of a norm. Smaller ones are of single heads; Inductor joins them with the rotary
embedding after them, so models that have such norms keep both, unless a pass joins them."""
_NORMS_BEFORE_ROTATION = ("qwen3", "qwen3_moe")
"""Types of models that normalize the heads of q and k right before they rotate them."""
FUSIONS = "post_grad_custom_post_pass"
"""Where vLLM looks for a pass of the user's, which it runs after its own."""


def install() -> None:
    """Extend the layers once vLLM imports them."""
    after_import(f"{_LAYERS}layernorm", lambda module: _extend(module.RMSNorm, _norm, _is_wanted))
    after_import(f"{_LAYERS}activation", lambda module: _extend(module.SiluAndMul, _gate))
    after_import(
        f"{_LAYERS}rotary_embedding", lambda module: _extend(module.RotaryEmbedding, _rotate)
    )


@dataclass
class _Model:
    """What its layers share."""

    joins_head_norms: bool
    """Whether a pass joins norms of heads with the rotary embedding after them."""
    has_head_norms: bool = False
    """Whether it has norms of heads that nothing joins."""


def wants_layers(vllm_config: Any) -> bool:
    """Whether a run's layers use the kernels: on Hopper, with halfbyte's attention.

    `auto` is for what was timed on one GPU: dense models with weights in 16 bits, and models with
    all weights on halfbyte's NVFP4 kernels. Elsewhere vLLM may fuse norms and activations with an
    all-reduce or with the quantization of activations, which it finds by their operators.
    """
    from vllm.platforms import current_platform

    if not uses_halfbyte(vllm_config):
        return False
    choice = Options.parse(vllm_config.additional_config).elementwise
    capability = current_platform.get_device_capability()
    if choice == "off" or capability is None:
        return False
    if not can_overlap(capability.to_int()) or _batch_invariant():
        return False
    return choice == "on" or _was_timed(vllm_config)


def joins_head_norms(vllm_config: Any) -> bool:
    """Whether `FuseHeadNorms` is for a run's graphs: of models with norms of heads, on the kernels.

    Not where vLLM runs no passes, has its own rotary embedding, or joins the norms itself.

    Args:
        vllm_config: vLLM's.
    """
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    text_config = getattr(vllm_config.model_config, "hf_text_config", None)
    return (
        getattr(text_config, "model_type", None) in _NORMS_BEFORE_ROTATION
        and compilation.mode == CompilationMode.VLLM_COMPILE
        and compilation.backend in ("", "inductor")
        and not {"all", "+rotary_embedding", "+rms_norm"} & set(compilation.custom_ops)
        and not getattr(compilation.pass_config, "enable_qk_norm_rope_fusion", False)
        and wants_layers(vllm_config)
    )


def _was_timed(vllm_config: Any) -> bool:
    if not is_timed(vllm_config) or not _is_on_one_gpu(vllm_config):
        return False
    model = vllm_config.model_config
    if model.quantization is None:
        return True
    return _has_nvfp4_weights(model) and wants_kernels(vllm_config, "linear")


def is_timed(vllm_config: Any) -> bool:
    """Whether early launches and the small kernels were timed with models like a run's: dense ones,
    and on one GPU NVFP4 experts on halfbyte's kernels.

    Args:
        vllm_config: vLLM's.
    """
    model = vllm_config.model_config
    if model is None or getattr(model, "is_hybrid", False):
        return False
    if not getattr(model, "is_moe", False):
        return True
    # With LoRA vLLM runs the experts itself.
    has_lora = getattr(vllm_config, "lora_config", None) is not None
    on_ours = wants_kernels(vllm_config, "moe") and not has_lora
    return on_ours and _is_on_one_gpu(vllm_config) and _has_nvfp4_weights(model)


def _is_on_one_gpu(vllm_config: Any) -> bool:
    """Whether a run is neither parallel in itself nor one of several data-parallel ones."""
    return int(vllm_config.parallel_config.world_size_across_dp) == 1


def _has_nvfp4_weights(model: Any) -> bool:
    """Whether all quantized weights of a checkpoint are NVFP4."""
    # ModelOpt's mixed checkpoints have FP8 layers, too.
    return model.quantization != "modelopt_mixed" and bool(model.is_nvfp4_quantized())


def _batch_invariant() -> bool:
    import vllm.envs as envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def _extend(
    layer: Any,
    forward: Callable[..., Any],
    suits: Callable[[Any, _Model], bool] = lambda layer, model: True,
) -> None:
    """Let new instances of a layer, and of subclasses with its `forward_native`, use `forward`.

    Args:
        layer: a `CustomOp` of vLLM's.
        forward: in place of `forward_native`, which it calls for what it does not support.
        suits: whether an instance of a model may use it.
    """
    create = layer.__init__

    @wraps(create)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        create(self, *args, **kwargs)
        if type(self).forward_native is not layer.forward_native:
            return
        config = get_current_vllm_config()
        if not wants_layers(config) or not suits(self, _model_of(config)):
            return
        self.halfbyte_model = _model_of(config)
        self.forward_native = MethodType(forward, self)
        if not (self._enforce_enable or self.enabled()):
            self._forward_method = self.forward_native

    layer.__init__ = begin


def _model_of(vllm_config: Any) -> _Model:
    """The object of the model that is being created."""
    if LastModel.of_layers is None or LastModel.of_layers[0] is not vllm_config:
        options = vllm_config.compilation_config.inductor_compile_config
        joins = getattr(options.get(FUSIONS), "joins_head_norms", False)
        LastModel.of_layers = vllm_config, _Model(joins)
    model: _Model = LastModel.of_layers[1]
    return model


def _is_wanted(norm: Any, model: _Model) -> bool:
    """Whether a norm is wider than a head, or joined; if not, that is noted in `model`."""
    suits = bool(norm.hidden_size >= _MIN_NORM) or model.joins_head_norms
    model.has_head_norms |= not suits
    return suits


def _norm(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """`RMSNorm` with a weight for every channel."""
    has_weight = layer.pass_weight if residual is None else layer.pass_weight_add
    plain = has_weight and layer.variance_size_override is None
    if not plain or not _suits(x, layer.weight):
        return type(layer).forward_native(layer, x, residual)
    if residual is None:
        return rms_norm(x, layer.weight.data, layer.variance_epsilon)
    return add_rms_norm(x, residual, layer.weight.data, layer.variance_epsilon)


def _gate(layer: Any, x: torch.Tensor) -> Any:
    """`SiluAndMul`."""
    if not _suits(x) or x.shape[-1] % 16:
        return type(layer).forward_native(x)
    return silu_and_mul(x)


def _rotate(
    layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> Any:
    """`RotaryEmbedding`, and others that differ in their angles only."""
    table, size = layer.cos_sin_cache, layer.head_size
    fits = size % 8 == 0 and table.shape[1] % 8 == 0 and table.device == query.device
    if (
        not (fits and key is not None and _suits(query, key, table))
        or (positions.dim(), query.dim(), key.dim()) != (1, 2, 2)
        or positions.dtype != torch.int64
        or layer.halfbyte_model.has_head_norms
    ):
        return type(layer).forward_native(layer, positions, query, key)
    return rotary_embedding(positions, query, key, table, size, not layer.is_neox_style)


def _suits(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a kernel takes tensors of these dtypes."""
    return x.dtype in KERNEL_DTYPES and all(other.dtype == x.dtype for other in others)
