"""Checks of sizes and ids in `config.json` before transformers uses them.

A configuration of a few hundred bytes can describe a model of any size: transformers would list a
billion layers one by one. So sizes are bounded first; then they are compared with the headers of
the weight files, whose size bounds the model.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex

_MAX_LAYERS = 10_000
_MAX_LABELS = 2**16
"""Max labels of a classifier; transformers makes a name for each."""
_MAX_SIZE = 2**31
_SIZES = {
    "num_hidden_layers": _MAX_LAYERS,
    "num_labels": _MAX_LABELS,
    **dict.fromkeys(
        (
            *("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"),
            *("num_attention_heads", "num_key_value_heads", "head_dim"),
            *("num_experts", "num_local_experts", "num_experts_per_tok"),
            *("max_position_embeddings", "decoder_sparse_step"),
        ),
        _MAX_SIZE,
    ),
}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_POSITIVE = (
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("swiglu_limit", "rope_theta", "rope_local_base_freq"),
)
_POSITIVE_OF_ROPE = ("rope_theta", "factor")
_MAX_NUMBER = 1e30
"""Max magnitude of a number: products must not overflow float32."""
_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.(?:(?:\w+\.)*experts\.(\d+)\.)?")


def check_fields(where: object, fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a size, number or token id that is out of range or of another kind.

    Args:
        where: the file, for messages.
        fields: of a `config.json` or `generation_config.json`.
    """
    for name, largest in _SIZES.items():
        value = fields.get(name)
        if value is not None and not (_is_int(value) and 1 <= value <= largest):
            raise CheckpointError(f"{where}: {name}: expected 1 .. {largest}, found {value!r}")
    for name, value in _positive_fields(fields):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value <= _MAX_NUMBER):
            raise CheckpointError(
                f"{where}: {name}: expected a number above 0, up to {_MAX_NUMBER:g}, "
                f"found {value!r}"
            )
    for name in _IDS:
        value = fields.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_int(one) and -1 <= one < _MAX_SIZE for one in ids):
            raise CheckpointError(
                f"{where}: {name}: expected a token id or a list of them, found {value!r}"
            )


def _positive_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of fields that must be above 0, those of RoPE at any depth."""
    for name in _POSITIVE:
        yield name, fields.get(name)
    parts = [fields.get(name) for name in ("rope_parameters", "rope_scaling")]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.values()
            for name in _POSITIVE_OF_ROPE:
                yield name, part.get(name)


def check_sizes(config: Any, index: CheckpointIndex) -> None:
    """Compare numbers of layers and experts and the vocabulary with the files' headers.

    Needs no model; all shapes are compared later, with a model on the meta device.

    Args:
        config: transformers config of a supported model.
        index: of the checkpoint's files.

    Raises:
        CheckpointError: layers, experts or a vocabulary that the files do not have; one line.
    """
    layers, experts = set(), set()
    fused_experts = 0
    for name, entry in index.tensors.items():
        match = _LAYER.match(name)
        if match:
            layers.add(int(match[1]))
            experts |= {int(match[2])} if match[2] else set()
            if ".experts." in name and len(entry.shape) >= 3:
                fused_experts = max(fused_experts, entry.shape[0])
    count = config.num_hidden_layers
    missing = next((i for i in range(count) if i not in layers), None)
    if missing is not None:
        raise CheckpointError(
            f"{index.folder}: layers.{missing}: expected {count} layers, as num_hidden_layers of "
            "config.json says, found that one missing in the files"
        )
    stored = max(len(experts), fused_experts)
    declared = _number_of_experts(config)
    if stored and declared is not None and declared > stored:
        raise CheckpointError(
            f"{index.folder}: experts: expected {declared}, as config.json says, found {stored} in "
            "the files"
        )
    check_top_k(config, index.folder)
    embeddings = index.tensors.get("model.embed_tokens.weight") or index.tensors.get(
        "embed_tokens.weight"
    )
    shape = (config.vocab_size, config.hidden_size)
    if embeddings is not None and embeddings.shape != shape:
        raise CheckpointError(
            f"{index.folder}: embed_tokens.weight: expected vocab_size and hidden_size of "
            f"config.json, {list(shape)}, found {embeddings}"
        )


def check_top_k(config: Any, folder: Path) -> None:
    """Raise CheckpointError for a config with more experts per token than it has experts."""
    declared, chosen = _number_of_experts(config), getattr(config, "num_experts_per_tok", None)
    if chosen is not None and declared is not None and chosen > declared:
        raise CheckpointError(
            f"{folder}: num_experts_per_tok: expected 1 .. {declared}, found {chosen}"
        )


def _number_of_experts(config: Any) -> int | None:
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
