"""Models whose checkpoint is quantized, straight from its shards to the device.

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

from halfbyte.checkpoints.dialects import CheckpointError, Declaration, one_line
from halfbyte.checkpoints.kv_scales import read_kv_scales
from halfbyte.checkpoints.safetensors_index import CheckpointIndex
from halfbyte.linear import NvFp4Linear
from halfbyte.models.quantized import LayerOptions, plan_layers, put_in_place, say_activations
from halfbyte.models.quantizer import METHOD, NvFp4Config, NvFp4Quantizer
from halfbyte.models.streaming import stream_weights

logger = logging.getLogger("halfbyte")

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_quantized(
    folder: Path,
    config: PreTrainedConfig,
    declaration: Declaration,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    linear_backend: str | None,
    quantize_activations: bool | None,
    batch_invariant: bool,
) -> PreTrainedModel:
    """Load a model with quantized layers. See `load_model`."""
    index = CheckpointIndex.read(folder)
    read_kv_scales(folder)  # broken ones show before weights are read
    options = LayerOptions(
        dtype=resolve_dtype(dtype, config, index),
        device=device,
        backend=linear_backend,
        quantize_activations=quantize_activations,
        batch_invariant=batch_invariant,
    )
    model = empty_model(folder, config, options.dtype)
    plan = plan_layers(model, declaration, index)
    put_in_place(model, plan, declaration, options)
    make_buffers(model, device)
    absent = stream_weights(model, plan, declaration, index, device, options.dtype)
    model.tie_weights(missing_keys=absent, recompute_mapping=False)
    _finish(model, folder, config, declaration)
    say_activations(model, plan, options)
    layers = [module for module in model.modules() if isinstance(module, NvFp4Linear)]
    kernels = Counter(layer.kernel.name for layer in layers if layer.kernel)
    logger.info(
        "%s: %d quantized layers (%s), linear backends: %s",
        folder,
        len(plan.layers),
        declaration.dialect,
        ", ".join(f"{name} for {count}" for name, count in kernels.items()) or "none",
    )
    return model


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
    assert isinstance(resolved, torch.dtype)
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
            f"{folder}: config.json: no model can be made of it: {one_line(error)[:300]}"
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


def _finish(
    model: PreTrainedModel, folder: Path, config: PreTrainedConfig, declaration: Declaration
) -> None:
    """What `from_pretrained` does beside loading weights."""
    leftover = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if leftover:
        raise CheckpointError(f"{folder}: {leftover[0]}: expected to be loaded, found no tensor")
    model.config.name_or_path = config.name_or_path
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
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
