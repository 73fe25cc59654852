"""Global scales of K and V for a model: taken from where they are, or measured once.

Order: what the user gives, what the checkpoint's files store, `kv_scales.json` in its folder, and
else one calibration pass over a fixed text. The log says which. 1.0 is never assumed: K and V of
small models would sink into the subnormals of E4M3, and long-range retrieval would fail.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from halfbyte.assets import calibration_text
from halfbyte.checkpoints import read_kv_scales
from halfbyte.kvcache import KV_SCALES_FILE, KVScales, get_kv_cache_quant_method
from halfbyte.layouts import KVCacheDType
from halfbyte.models.attention_functions import GENERATE, register
from halfbyte.models.loading import load_tokenizer

logger = logging.getLogger("halfbyte")

HEADROOM = 2.0
"""Largest magnitude allowed for, over the largest one seen. E4M3 block scales keep their relative
precision over a range of 28672, so a factor of two costs nothing, while saturation would."""
MAX_TOKENS = 2048


def resolve_kv_scales(
    model: PreTrainedModel,
    dtypes: set[KVCacheDType],
    *,
    given: KVScales | None = None,
    tokenizer: Any = None,
) -> KVScales | None:
    """Scales for a model whose layers use the formats `dtypes`.

    Args:
        model: a loaded transformers model; its folder is looked at if it was loaded from one.
        dtypes: formats in use.
        given: scales of the user's, which win.
        tokenizer: encodes the calibration text; without one the folder's is loaded, and without a
            folder a fixed sequence of token ids is used.

    Returns:
        None if no format needs scales.

    Raises:
        ValueError: scales for a different number of layers, or broken files.
    """
    if not any(dtype.has_global_scale for dtype in dtypes):
        return None
    scales = given or _from_folder(model) or _calibrated(model, tokenizer)
    num_layers = model.config.num_hidden_layers
    if scales.num_layers != num_layers:
        raise ValueError(
            f"KV scales from {scales.source}: {scales.num_layers} layers, "
            f"the model has {num_layers}"
        )
    logger.info("KV cache scales: %s", scales.source)
    return scales


@torch.inference_mode()
def calibrate(
    model: PreTrainedModel, input_ids: torch.Tensor, source: str, headroom: float = HEADROOM
) -> KVScales:
    """Run tokens through a model once and record the largest |K| and |V| of each layer.

    Args:
        model: a transformers model; it is left as it was.
        input_ids: int64 `[1, tokens]`.
        source: for the log.
        headroom: factor over the largest magnitude seen.
    """
    recorder = _AmaxRecorder()
    training, attention = model.training, model.config._attn_implementation
    # One attention for all callers, so that a model has the same scales whoever asks first.
    register()
    model.set_attn_implementation(GENERATE)
    try:
        model.eval()(input_ids=input_ids.to(model.device), past_key_values=recorder, use_cache=True)
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
    layers = range(len(recorder.amax))
    return KVScales(
        tuple(headroom * recorder.amax[layer][0] for layer in layers),
        tuple(headroom * recorder.amax[layer][1] for layer in layers),
        source,
    )


class _AmaxRecorder(DynamicCache):
    """An ordinary cache that notes the largest magnitudes passing through it."""

    def __init__(self) -> None:
        super().__init__()
        self.amax: dict[int, tuple[float, float]] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.amax[layer_idx] = (float(key_states.abs().max()), float(value_states.abs().max()))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _from_folder(model: PreTrainedModel) -> KVScales | None:
    folder = Path(getattr(model.config, "_name_or_path", "") or ".not-a-folder")
    if not folder.is_dir():
        return None
    stored = read_kv_scales(folder)
    if stored:
        declared = KVCacheDType.from_checkpoint(model.config)
        if not declared.has_global_scale:
            declared = KVCacheDType.FP8_E4M3
            logger.warning("%s: has KV scales but declares no format; taken as FP8's", folder)
        method = get_kv_cache_quant_method(declared)
        return KVScales.from_layers(stored, method, source=f"checkpoint (for {method.name})")
    loaded = KVScales.load(folder)
    return loaded and replace(loaded, source=f"{KV_SCALES_FILE} ({loaded.source})")


def _calibrated(model: PreTrainedModel, tokenizer: Any) -> KVScales:
    if tokenizer is None:
        tokenizer = _tokenizer_of(model)
    limit = min(MAX_TOKENS, getattr(model.config, "max_position_embeddings", MAX_TOKENS))
    if tokenizer is not None:
        ids = tokenizer(calibration_text(), return_tensors="pt").input_ids[:, :limit]
        return calibrate(model, ids, f"calibration on {ids.shape[1]} tokens of the built-in text")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, min(limit, 512)), generator=generator)
    return calibrate(
        model, ids, f"calibration on {ids.shape[1]} fixed token ids (the model has no tokenizer)"
    )


def _tokenizer_of(model: PreTrainedModel) -> Any:
    folder = Path(getattr(model.config, "_name_or_path", "") or ".not-a-folder")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return load_tokenizer(folder)
