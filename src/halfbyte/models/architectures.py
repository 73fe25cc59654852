"""Supported model architectures, and the cache spec of each of their layers.

An allowlist, because support must be tested: StableLM, for example, drops the keyword arguments
that carry the cache to the attention function and would silently attend only to the current chunk.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from halfbyte.files import shortened
from halfbyte.kvcache import FullAttentionSpec, KVCacheSpec, KVRecipe, SlidingWindowSpec
from halfbyte.layouts import KVCacheDType

SUPPORTED_MODEL_TYPES = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""`model_type`s of the architectures that halfbyte is tested with."""

DTypeName = str | KVCacheDType | torch.dtype
LayerDTypes = DTypeName | Mapping[str, DTypeName] | Sequence[DTypeName]
"""One format; or one per kind of layer (`{"full_attention": …, "sliding_attention": …}`); or a
sequence with one per layer."""


class UnsupportedModelError(ValueError):
    """The architecture is not one that halfbyte is tested with."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


_USUAL_OPTIONS: dict[str, object] = {
    "add_cross_attention": False,
    "attention_chunk_size": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "use_bidirectional_attention": False,
}
"""Config fields that change masks in transformers, with their supported values."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_WITHOUT_WINDOWS = ("granite", "llama", "olmo2")
"""Architectures whose code in transformers ignores `sliding_window`."""
_MASKED_WINDOWS = ("qwen2_moe",)
"""Architectures that mask keys outside a window, but do not pass it to the attention function."""

_DRAFT_LAYERS = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers"),
    "mtp_num_layers",
)
"""Config fields of DeepSeek, GLM, Qwen, MiniMax and Megatron."""
_MAX_DRAFT_LAYERS = 64

# transformers picks their frequencies by the longest sequence of a forward pass, so results would
# depend on the rest of the batch and on how prompts are split into chunks.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_model_type(model_type: object) -> None:
    """Raise UnsupportedModelError unless a `model_type` is one that halfbyte is tested with."""
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; supported: "
            + ", ".join(SUPPORTED_MODEL_TYPES)
        )


def check_supported(config: Any) -> None:
    """Raise UnsupportedModelError unless the architecture of a transformers config is supported."""
    check_model_type(getattr(config, "model_type", None))
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"rope type {rope_type} is not supported: its positions depend on the longest "
                "sequence in the batch"
            )
        if rope_type not in _ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
            )
    for name, usual in _USUAL_OPTIONS.items():
        value = getattr(config, name, usual)
        if value is not None and value != usual:
            raise UnsupportedModelError(
                f"{name} = {value!r} is not supported: every token attends to those before it"
            )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if unknown:
        raise UnsupportedModelError(
            f"layer_types: {', '.join(map(str, unknown))} not supported; supported: "
            + ", ".join(_LAYER_TYPES)
        )
    if config.model_type in _MASKED_WINDOWS and any(sliding_windows(config)):
        raise UnsupportedModelError(
            f"sliding windows of {config.model_type} are not supported; use_sliding_window = False "
            "attends to all tokens"
        )


def _rope_types(parameters: Any) -> list[object]:
    """RoPE types of a config's parameters, which may be nested per layer type."""
    if not isinstance(parameters, Mapping):
        return []
    own = [parameters["rope_type"]] if parameters.get("rope_type") is not None else []
    return own + [one for value in parameters.values() for one in _rope_types(value)]


def num_draft_layers(config: Any) -> int:
    """Layers of a draft (multi-token prediction) that are stored after the model's; often 0.

    Args:
        config: of transformers, or the mapping of a `config.json`.
    """
    fields = config if isinstance(config, Mapping) else vars(config)
    text = fields.get("text_config") or {}
    sections = (fields, text if isinstance(text, Mapping) else vars(text))
    values = (section.get(name) for section in sections for name in _DRAFT_LAYERS)
    return next((x for x in values if type(x) is int and 0 < x <= _MAX_DRAFT_LAYERS), 0)


def sliding_windows(config: Any) -> list[int | None]:
    """Per layer, the sliding window in tokens, or None for full attention."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in _WITHOUT_WINDOWS:
        window = None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def layer_specs(
    config: Any,
    dtype: torch.dtype,
    kv_cache_dtype: LayerDTypes = "auto",
    block_size: int = 16,
    *,
    v_cache_dtype: LayerDTypes | None = None,
    keep_all: bool = False,
    recipe: KVRecipe | None = None,
) -> list[KVCacheSpec]:
    """Cache specs of every layer of a model.

    Args:
        config: transformers config of a supported model.
        dtype: the model's dtype, which `auto` stands for unless the checkpoint declares a format.
        kv_cache_dtype: format or formats, see `LayerDTypes`.
        block_size: tokens per page.
        v_cache_dtype: format or formats of V, where they differ from K's.
        keep_all: give sliding-window layers full-attention specs, so that no page is freed and
            `crop` works for any length.
        recipe: for K and V; by default `plain`.

    Raises:
        UnsupportedModelError: the architecture is not supported.
        ValueError: an unknown format, or one that cannot store the model's head size.
    """
    check_supported(config)
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    windows = sliding_windows(config)
    v_cache_dtype = kv_cache_dtype if v_cache_dtype is None else v_cache_dtype
    k_names, v_names = (_per_layer(x, windows) for x in (kv_cache_dtype, v_cache_dtype))
    declared: Sequence[tuple[KVCacheDType, KVCacheDType]] = [(KVCacheDType.AUTO,) * 2] * len(
        windows
    )
    if any(KVCacheDType.parse(x) is KVCacheDType.AUTO for x in (*k_names, *v_names)):
        stored = len(windows) + num_draft_layers(config)
        declared = KVCacheDType.layers_from_checkpoint(config, stored)[: len(windows)]
    specs: list[KVCacheSpec] = []
    layers = zip(windows, k_names, v_names, declared, strict=True)
    for window, k_name, v_name, (k_declared, v_declared) in layers:
        fields: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": config.num_key_value_heads,
            "head_size": head_size,
            "kv_cache_dtype": _resolve(k_name, k_declared, dtype, recipe),
            "v_cache_dtype": _resolve(v_name, v_declared, dtype, recipe),
            "dtype": dtype,
        }
        if window is None or keep_all:
            specs.append(FullAttentionSpec(**fields))
        else:
            specs.append(SlidingWindowSpec(**fields, sliding_window=window))
    return specs


def check_layer_dtypes(kv_cache_dtype: LayerDTypes) -> None:
    """Raise ValueError unless this names formats; needs no model."""
    if isinstance(kv_cache_dtype, str | torch.dtype):
        names: Sequence[DTypeName] = [kv_cache_dtype]
    elif isinstance(kv_cache_dtype, Mapping):
        names = list(kv_cache_dtype.values())
    elif isinstance(kv_cache_dtype, Sequence):
        names = kv_cache_dtype
    else:
        raise ValueError(f"kv_cache_dtype: expected a format or formats, got {kv_cache_dtype!r}")
    for name in names:
        KVCacheDType.parse(name)


def _resolve(
    name: DTypeName, declared: KVCacheDType, dtype: torch.dtype, recipe: KVRecipe | None = None
) -> KVCacheDType:
    parsed = KVCacheDType.parse(name)
    if parsed is KVCacheDType.AUTO:
        # An unquantized declaration is the file's dtype; the model may have been cast since then.
        parsed = declared if declared.is_quantized else KVCacheDType.parse(dtype)
    return parsed if recipe is None else recipe.format_of(parsed)


def _per_layer(kv_cache_dtype: LayerDTypes, windows: Sequence[int | None]) -> list[DTypeName]:
    check_layer_dtypes(kv_cache_dtype)
    if isinstance(kv_cache_dtype, str | torch.dtype):
        return [kv_cache_dtype] * len(windows)
    if isinstance(kv_cache_dtype, Mapping):
        kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
        unknown = set(kv_cache_dtype) - {"full_attention", "sliding_attention"}
        missing = set(kinds) - set(kv_cache_dtype)
        if unknown or missing:
            raise ValueError(
                "kv_cache_dtype: expected keys full_attention and sliding_attention as the model "
                f"has them; unknown {sorted(unknown)}, missing {sorted(missing)}"
            )
        return [kv_cache_dtype[kind] for kind in kinds]
    if len(kv_cache_dtype) != len(windows):
        raise ValueError(f"kv_cache_dtype: {len(kv_cache_dtype)} formats for {len(windows)} layers")
    return list(kv_cache_dtype)
