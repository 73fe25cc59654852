"""The model and the tokenizer of an `LLM`."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.engine.options import check_batch_invariant
from halfbyte.engine.threads import warn_shared_cores
from halfbyte.models import load_model, load_tokenizer


def model_and_tokenizer(
    model: str | Path | PreTrainedModel,
    tokenizer: Any,
    *,
    dtype: str | torch.dtype,
    device: torch.device | str | None,
    linear_backend: str | None,
    moe_backend: str | None,
    quantize_activations: bool | None,
    batch_invariant: bool,
) -> tuple[PreTrainedModel, Any]:
    """Load the model and tokenizer that are given as a folder or hub id; arguments as of `LLM`.

    Warns if PyTorch's threads and other programs need more cores than there are.

    Raises:
        ModelLoadError, UnsupportedModelError: the model cannot be loaded or is not supported.
        ValueError: options of `load_model` that a loaded model cannot follow.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    if isinstance(model, str | Path):
        tokenizer = tokenizer or load_tokenizer(model)
        model = load_model(
            model,
            dtype=dtype,
            device=device,
            linear_backend=linear_backend,
            moe_backend=moe_backend,
            quantize_activations=quantize_activations,
            batch_invariant=batch_invariant,
        )
    elif any(value is not None for value in (linear_backend, moe_backend, quantize_activations)):
        raise ValueError(
            "linear_backend, moe_backend, quantize_activations: have no effect on a loaded model; "
            "pass them to load_model"
        )
    if batch_invariant:
        check_batch_invariant(model)
    warn_shared_cores(model.device)
    return model.eval(), tokenizer


def context_length(model: PreTrainedModel, max_model_len: int | None) -> int:
    """Max tokens of a sequence: `max_model_len` if it is given, else the model's.

    Raises:
        ValueError: `max_model_len` exceeds the model's.
    """
    context: int = getattr(model.config, "max_position_embeddings", 2**31)
    if max_model_len is not None and max_model_len > context:
        raise ValueError(f"max_model_len: expected 1 .. {context}, got {max_model_len}")
    return max_model_len or context


def eos_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end of text; empty without one."""
    eos_id = getattr(tokenizer, "eos_token_id", None)
    return () if eos_id is None else (eos_id,)
