"""A model without weights, built from its configuration on the meta device.

transformers' `from_pretrained` would pass the whole model through host memory, keep every shard
mapped, and initialize missing tensors randomly. A model on the meta device takes no memory; all
headers are compared with it before the shards are streamed.
"""

import copy
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from halfbyte.checkpoints.errors import CheckpointError, one_line
from halfbyte.checkpoints.index import CheckpointIndex

_NAMES = ("float32", "bfloat16", "float16")
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def named_as_model(index: CheckpointIndex, model: PreTrainedModel) -> CheckpointIndex:
    """The index with the model's names: files of headless models may lack the prefix."""
    prefix, base = f"{model.base_model_prefix}.", model.base_model
    if base is model or any(name.startswith(prefix) for name in index.tensors):
        return index
    # Not by the names of weights, which quantized layers store under others.
    of_base = {name for name, _ in base.named_children()}
    of_base -= {name for name, _ in model.named_children()}
    names = [name for name in index.tensors if name.partition(".")[0] in of_base]
    return index.renamed({name: prefix + name for name in names})


def check_bytes(model: PreTrainedModel, index: CheckpointIndex) -> None:
    """Raise CheckpointError for a model that is too large for its files.

    Args:
        model: on the meta device.
        index: of files that store at least 2 bits per parameter.
    """
    needed = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(file.stat().st_size for file in {e.file for e in index.tensors.values()})
    if needed > 4 * stored:
        raise CheckpointError(
            f"{index.folder}: config.json: expected a model that the files can hold ({stored} "
            f"bytes), found one of {needed} parameters"
        )


def resolve_dtype(
    dtype: str | torch.dtype, config: PreTrainedConfig, index: CheckpointIndex
) -> torch.dtype:
    """The requested dtype; for `auto` the config's, else that of most unquantized weights."""
    if isinstance(dtype, torch.dtype):
        return dtype
    resolved = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if resolved is None:  # the dtype with the most values, usually that of the embeddings
        sizes: Counter[str] = Counter()
        for name, entry in index.tensors.items():
            if name.endswith(".weight") and entry.dtype in _TORCH_DTYPES:
                sizes[entry.dtype] += torch.Size(entry.shape).numel()
        resolved = _TORCH_DTYPES[sizes.most_common(1)[0][0]] if sizes else torch.bfloat16
    if not isinstance(resolved, torch.dtype) or resolved not in _TORCH_DTYPES.values():
        raise CheckpointError(
            f"{index.folder}: config.json: dtype: expected one of {', '.join(_NAMES)}, "
            f"found {resolved!r}"
        )
    return resolved


def empty_model(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights, on the meta device.

    Raises:
        CheckpointError: no model can be built from the config.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # constructors raise errors of any type for odd sizes
        raise CheckpointError(
            f"{folder}: config.json: cannot build a model from it: {one_line(error)}"
        ) from error
    return model


def make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute buffers that files do not hold (rotary frequencies, embedding scales).

    transformers does so in `_init_weights`, which skips parameters marked as initialized. On the
    CPU, as in `from_pretrained`: `pow` on a GPU differs in the last bit.
    """
    buffers = dict(model.named_non_persistent_buffers())
    for name, buffer in buffers.items():
        _set_buffer(model, name, torch.empty_like(buffer, device="cpu"))
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = tensor.is_meta  # type: ignore[attr-defined]
    model.initialize_weights()
    for name in buffers:
        _set_buffer(model, name, model.get_buffer(name).to(device))


def _set_buffer(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, _, own_name = name.rpartition(".")
    model.get_submodule(module)._buffers[own_name] = tensor
