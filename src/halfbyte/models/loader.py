"""`load_model`: loads a checkpoint as a transformers model.

Steps: read the folder's metadata (`checkpoint_folder`), build the model on the meta device
(`meta_model`), compare it with the headers (`nvfp4.layer_plan`), insert quantized layers
(`nvfp4.layers`), and stream the shards (`nvfp4.weight_stream`). Other quantization methods are left
to transformers (`foreign_quantization`).
"""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from halfbyte.checkpoints.dialects.base import Declaration
from halfbyte.checkpoints.errors import CheckpointError, read_json
from halfbyte.linear import NvFp4Linear
from halfbyte.models.attention_functions import register
from halfbyte.models.checkpoint_folder import Checkpoint
from halfbyte.models.config_fields import check_fields
from halfbyte.models.foreign_quantization import (
    leave_weights_to_transformers,
    load_by_transformers,
    warn_of_dequantized_experts,
)
from halfbyte.models.local_files import ModelLoadError, or_load_error
from halfbyte.models.meta_model import (
    check_bytes,
    empty_model,
    make_buffers,
    named_as_model,
    resolve_dtype,
)
from halfbyte.models.nvfp4.layer_plan import LayerPlan, plan_layers
from halfbyte.models.nvfp4.layers import LayerOptions, log_activation_mode, replace_layers
from halfbyte.models.nvfp4.mxfp4_experts import (
    check_surplus_of_experts,
    holds_mxfp4_experts,
    put_mxfp4_experts_in_place,
)
from halfbyte.models.nvfp4.transformers_quantizer import mark_as_quantized
from halfbyte.models.nvfp4.weight_stream import stream_into, weight_sinks
from halfbyte.moe import ExpertsLayer, MxFp4Experts

logger = logging.getLogger("halfbyte")

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str | None = None,
    linear_backend: str | None = None,
    quantize_activations: bool | None = None,
    batch_invariant: bool = False,
    moe_backend: str | None = None,
) -> PreTrainedModel:
    """Load a causal language model for inference.

    NVFP4 checkpoints (ModelOpt, compressed-tensors) are streamed from their shards to the device;
    their headers are compared with the model first.

    Args:
        path: folder of a checkpoint in Hugging Face's layout, or a hub id.
        dtype: `auto` for the checkpoint's, or a torch dtype or its name.
        device: device of the model; by default a GPU if there is one, else the CPU.
        linear_backend: name of a backend of `halfbyte.linear` for NVFP4 layers; by default that of
            the environment variable `HALFBYTE_NVFP4_GEMM_BACKEND`, else the best for each layer.
        quantize_activations: whether layers stored as W4A4 quantize their activations (emulated on
            machines without FP4 arithmetic). By default only if a backend has native FP4 x FP4
            products; else they run as W4A16, with a log message.
        batch_invariant: results of NVFP4 layers are bitwise independent of the batch.
        moe_backend: name of a backend of `halfbyte.moe` for NVFP4 experts; by default that of the
            environment variable `HALFBYTE_MOE_BACKEND`, else the best for each layer.

    Returns:
        A transformers model in evaluation mode, ready for `halfbyte.Cache` and `halfbyte.LLM`.

    Raises:
        ModelLoadError: no such model, or missing, truncated or mismatched files.
        CheckpointError: a quantized checkpoint with an unsupported scheme, or with a tensor that is
            absent or does not fit; one line.
        UnsupportedModelError: an architecture that halfbyte is not tested with.
        NoImplementationError: no backend, or not the requested one, can be used.
        ValueError: `linear_backend`, `moe_backend` or `quantize_activations` for a checkpoint that
            has no layers they apply to; the device "meta", which holds no weights.
    """
    device = device_or_default(device)
    if device.type == "meta":
        raise ValueError("device: expected one that holds weights, got 'meta'")
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    checkpoint = or_load_error(path, Checkpoint.read, path)
    try:
        model = _load(
            checkpoint,
            dtype,
            device,
            linear_backend,
            quantize_activations,
            batch_invariant,
            moe_backend,
        )
    except CheckpointError as error:
        raise ModelLoadError(str(error)) from error
    checkpoint.attach_to(model)
    register()
    return model


def _load(
    checkpoint: Checkpoint,
    dtype: str | torch.dtype,
    device: torch.device,
    linear_backend: str | None,
    quantize_activations: bool | None,
    batch_invariant: bool,
    moe_backend: str | None,
) -> PreTrainedModel:
    folder, config, declaration = checkpoint.folder, checkpoint.config, checkpoint.declaration
    options = LayerOptions(
        dtype=resolve_dtype(dtype, config, checkpoint.index),
        device=device,
        linear_backend=linear_backend,
        quantize_activations=quantize_activations,
        batch_invariant=batch_invariant,
        moe_backend=moe_backend,
    )
    if checkpoint.weight_declaration is not None:
        return _load_streamed(checkpoint, options)
    for name, value in [
        ("linear_backend", linear_backend),
        ("moe_backend", moe_backend),
        ("quantize_activations", quantize_activations),
    ]:
        takes_it = name == "moe_backend" and holds_mxfp4_experts(config)
        if value is not None and not takes_it:
            raise ValueError(f"{name}: got {value!r}, but {folder} has no NVFP4 layers")
    if holds_mxfp4_experts(config):
        return _load_streamed(checkpoint, options)
    if declaration is not None:
        _keep_cache_declaration(config, declaration)
    else:
        leave_weights_to_transformers(folder, config)
    if getattr(config, "quantization_config", None) is None:
        return _load_streamed(checkpoint, options)
    empty = empty_model(folder, config, options.dtype)
    check_bytes(empty, checkpoint.index)
    warn_of_dequantized_experts(empty, checkpoint.index, config)
    model: Any = load_by_transformers(folder, config, dtype)
    return model.to(device).eval()


def _keep_cache_declaration(config: Any, declaration: Declaration) -> None:
    """For a checkpoint with only its cache quantized, which needs no package to unpack weights."""
    config.quantization = dict(declaration.section or {})
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config


def _load_streamed(checkpoint: Checkpoint, options: LayerOptions) -> PreTrainedModel:
    """Stream a model, quantized or not, from the shards to the device."""
    declaration, plan = checkpoint.weight_declaration, LayerPlan()
    model = empty_model(checkpoint.folder, checkpoint.config, options.dtype)
    index = named_as_model(checkpoint.index, model)
    if declaration is not None:
        plan = plan_layers(model, declaration, index)
        replace_layers(model, plan, declaration, options)
    mxfp4 = holds_mxfp4_experts(checkpoint.config)
    if mxfp4:
        put_mxfp4_experts_in_place(model, options)
    sinks, absent = weight_sinks(model, plan, declaration, index, options.dtype)
    check_surplus_of_experts(model, index)
    make_buffers(model, options.device)  # sizes have been compared with the files
    stream_into(sinks, index, options.device)
    for module in model.modules():
        if isinstance(module, MxFp4Experts):
            module.process_weights_after_loading()
    model.tie_weights(missing_keys=absent, recompute_mapping=False)
    _finish(model, checkpoint)
    if declaration is not None:
        section = {"quant_method": declaration.dialect, **(declaration.section or {})}
        mark_as_quantized(model, section)
        log_activation_mode(model, plan, options)
        _log_backends(model, plan, declaration, checkpoint.folder)
    elif mxfp4:
        mark_as_quantized(model, checkpoint.config.quantization_config)
        logger.info(
            "%s: experts in MXFP4, MoE backends: %s",
            checkpoint.folder,
            _backends(model, MxFp4Experts),
        )
    return model


def _log_backends(
    model: PreTrainedModel, plan: LayerPlan, declaration: Declaration, folder: Path
) -> None:
    logger.info(
        "%s: %d quantized layers (%s), linear backends: %s, MoE backends: %s",
        folder,
        len(plan.layers),
        declaration.dialect,
        _backends(model, NvFp4Linear),
        _backends(model, ExpertsLayer),
    )


def _backends(model: PreTrainedModel, kind: type[NvFp4Linear] | type[ExpertsLayer]) -> str:
    layers = [module for module in model.modules() if isinstance(module, kind)]
    kernels = Counter(layer.kernel.name for layer in layers if layer.kernel)
    return ", ".join(f"{name} for {count}" for name, count in kernels.items()) or "none"


def _finish(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """The steps of `from_pretrained` other than loading weights."""
    folder = checkpoint.folder
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
    model.eval()


def device_or_default(device: torch.device | str | None) -> torch.device:
    """The requested device, else a GPU if there is one, else the CPU.

    Raises:
        ValueError: not a device's name, or a GPU on a machine without one.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: {str(error).splitlines()[0]}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one of this machine, which has no GPU, got '{found}'")
    return found
