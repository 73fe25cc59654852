"""Models straight from a checkpoint's shards to the device, quantized or not.

transformers' `from_pretrained` would put all of a model through the host's memory, keep every
shard mapped, and fill what is missing with random numbers. Here the model is made on the meta
device, all headers are compared with it, and then the shards are streamed.
"""

import copy
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from halfbyte.checkpoints.errors import CheckpointError, one_line, read_json
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.linear import NvFp4Linear
from halfbyte.models.checkpoint_folder import Checkpoint
from halfbyte.models.config_fields import check_fields
from halfbyte.models.local_files import or_load_error
from halfbyte.models.nvfp4.layers import (
    LayerOptions,
    LayerPlan,
    plan_layers,
    put_in_place,
    say_activations,
)
from halfbyte.models.nvfp4.transformers_quantizer import METHOD, NvFp4Config, NvFp4Quantizer
from halfbyte.models.nvfp4.weight_stream import stream_into, weight_sinks

logger = logging.getLogger("halfbyte")

_NAMES = ("float32", "bfloat16", "float16")
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_streamed(checkpoint: Checkpoint, options: LayerOptions) -> PreTrainedModel:
    """Load a model, with quantized layers or without. See `load_model`."""
    folder, config, declaration = checkpoint.folder, checkpoint.config, checkpoint.declaration
    model = empty_model(folder, config, options.dtype)
    index = named_as_model(checkpoint.index, model)
    plan = LayerPlan()
    is_quantized = declaration is not None and bool(declaration.groups)
    if is_quantized:
        assert declaration is not None
        plan = plan_layers(model, declaration, index)
        put_in_place(model, plan, declaration, options)
    sinks, absent = weight_sinks(model, plan, declaration, index, options.dtype)
    make_buffers(model, options.device)  # of sizes that the files agree with
    stream_into(sinks, index, options.device)
    model.tie_weights(missing_keys=absent, recompute_mapping=False)
    _finish(model, checkpoint)
    if is_quantized:
        _log_layers(model, plan, options, checkpoint)
    return model


def _log_layers(
    model: PreTrainedModel, plan: LayerPlan, options: LayerOptions, checkpoint: Checkpoint
) -> None:
    say_activations(model, plan, options)
    layers = [module for module in model.modules() if isinstance(module, NvFp4Linear)]
    kernels = Counter(layer.kernel.name for layer in layers if layer.kernel)
    assert checkpoint.declaration is not None
    logger.info(
        "%s: %d quantized layers (%s), linear backends: %s",
        checkpoint.folder,
        len(plan.layers),
        checkpoint.declaration.dialect,
        ", ".join(f"{name} for {count}" for name, count in kernels.items()) or "none",
    )


def named_as_model(index: CheckpointIndex, model: PreTrainedModel) -> CheckpointIndex:
    """The index, with names as in the model where files of a model without a head lack a prefix."""
    prefix = f"{model.base_model_prefix}."
    if prefix == "." or any(name.startswith(prefix) for name in index.tensors):
        return index
    wanted = model.state_dict().keys()
    names = (name for name in index.tensors if name not in wanted)
    return index.renamed({name: prefix + name for name in names if prefix + name in wanted})


def check_bytes(model: PreTrainedModel, index: CheckpointIndex) -> None:
    """Raise CheckpointError for a model on the meta device that no such files can hold.

    Args:
        model: of the config.
        index: of files in which a parameter takes 2 bits or more.
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
    """The dtype asked for; for `auto` the config's, else that of most unquantized weights."""
    if isinstance(dtype, torch.dtype):
        return dtype
    resolved = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if resolved is None:  # of what is not quantized, most of all the embeddings
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
        CheckpointError: a config of which no model can be made.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # whatever a model's constructor makes of odd sizes
        raise CheckpointError(
            f"{folder}: config.json: no model can be made of it: {one_line(error)}"
        ) from error
    return model


def make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give buffers that no file holds (rotary frequencies, embedding scales) their values.

    transformers computes them in `_init_weights`, which leaves parameters alone that are marked as
    initialized. On the host, as `from_pretrained` does: a GPU's powers differ in the last bit.
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


def _finish(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """What `from_pretrained` does beside loading weights."""
    folder, declaration = checkpoint.folder, checkpoint.declaration
    leftover = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if leftover:
        raise CheckpointError(f"{folder}: {leftover[0]}: expected to be loaded, found no tensor")
    model.config.name_or_path = checkpoint.config.name_or_path
    file = folder / "generation_config.json"
    if file.is_file():
        check_fields(file, read_json(file))
        model.generation_config = or_load_error(
            file, GenerationConfig.from_pretrained, folder, local_files_only=True
        )
    if declaration is not None and declaration.groups:
        section = {"quant_method": declaration.dialect, **(declaration.section or {})}
        quantization_config = NvFp4Config(section)
        model.config.quantization_config = quantization_config
        attributes: dict[str, Any] = {
            "hf_quantizer": NvFp4Quantizer(quantization_config),
            "is_quantized": True,
            "quantization_method": METHOD,
        }
        vars(model).update(attributes)
    model.eval()
