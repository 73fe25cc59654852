"""Streams weights from a checkpoint's shards into a model on the meta device.

All tensors still on the meta device are looked up in the files and compared with the headers first.
Then shards are opened one by one; each tensor goes to the target device immediately, and a
quantized layer is repacked for its kernel once it is complete, so that host and device hold little
more than the model and one shard.
"""

import re
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from halfbyte.checkpoints.dialects.base import Declaration
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.validate import FLOATS, QUANTIZED_WEIGHT
from halfbyte.models.nvfp4.experts import PROJECTIONS, has_concatenated_experts
from halfbyte.models.nvfp4.layer_plan import LayerPlan
from halfbyte.models.nvfp4.layer_sink import LayerSink, Sink, assign, target_of
from halfbyte.moe.separate_experts import SeparateExperts


def stream_weights(
    model: PreTrainedModel,
    plan: LayerPlan,
    declaration: Declaration,
    index: CheckpointIndex,
    device: torch.device,
    dtype: torch.dtype,
) -> set[str]:
    """Load every tensor of a model that is on the meta device.

    Args:
        model: with its quantized layers in place.
        plan: of the quantized layers.
        declaration: of the checkpoint.
        index: of its files.
        device: target device.
        dtype: of unquantized tensors.

    Returns:
        Names of parameters that are not in the files and must still be tied to loaded ones.

    Raises:
        CheckpointError: a tensor is absent, does not fit, or is not supported; a scale is NaN,
            infinite or negative, or a global scale is 0; one line with the tensor, what was
            expected and what was found.
    """
    sinks, absent = weight_sinks(model, plan, declaration, index, dtype)
    stream_into(sinks, index, device)
    return absent


def stream_into(sinks: dict[str, Sink], index: CheckpointIndex, device: torch.device) -> None:
    """Pass every tensor to its sink, shard by shard."""
    progress = transformers_logging.tqdm(total=len(sinks), desc="Loading weights")
    with progress:
        for name, tensor in index.stream(sinks, device):
            sinks[name](tensor)
            progress.update()


def weight_sinks(
    model: PreTrainedModel,
    plan: LayerPlan,
    declaration: Declaration | None,
    index: CheckpointIndex,
    dtype: torch.dtype,
) -> tuple[dict[str, Sink], set[str]]:
    """Sinks for all tensors of the files that a model on the meta device needs.

    The caller must pass all tensors of a quantized layer, in any order and each once, before the
    layer is used. Nothing is loaded here.

    Args:
        model, plan, index, dtype: as for `stream_weights`.
        declaration: of the checkpoint; None for an empty plan.

    Returns:
        The sinks by tensor name in the files, and the names of parameters that are not in the files
        and must still be tied to loaded ones.

    Raises:
        CheckpointError: a tensor is absent, does not fit, or is not supported.
    """
    sinks: dict[str, Sink] = {}
    for name, layer in plan.layers.items():
        assert declaration is not None
        target = target_of(model, plan, name)
        layer_sink = LayerSink(name, target, plan, declaration, index, dtype)
        sinks |= {f"{name}.{tensor}": layer_sink.of(tensor) for tensor in layer.tensors}
    absent: set[str] = set()
    sinks |= dict(_plain_sinks(model, plan, index, dtype, absent))
    _check_all_read(model, plan, index, sinks)
    return sinks, absent


def check_plain_tensors(
    model: PreTrainedModel, plan: LayerPlan, index: CheckpointIndex, dtype: torch.dtype
) -> None:
    """Compare the headers with all unquantized tensors, before anything is loaded.

    Args:
        model: on the meta device, without the quantized modules.
        plan: of the quantized modules.
        index: of the files.
        dtype: of unquantized tensors.

    Raises:
        CheckpointError: as `stream_weights`.
    """
    _check_all_read(model, plan, index, dict(_plain_sinks(model, plan, index, dtype, set())))


def _plain_sinks(
    model: PreTrainedModel,
    plan: LayerPlan,
    index: CheckpointIndex,
    dtype: torch.dtype,
    absent: set[str],
) -> Iterator[tuple[str, Sink]]:
    """(name in the files, sink) of all unquantized tensors.

    Names that are not in the files, but tied to names that are, are added to `absent`.
    """
    kept_dtypes = model._get_dtype_plan(dtype)
    tied = _tied_to(model)
    for module_name, module in model.named_modules():
        if module_name in plan.layers or isinstance(module, SeparateExperts):
            continue
        prefix = f"{module_name}." if module_name else ""
        if has_concatenated_experts(module) and f"{prefix}gate_up_proj" not in index:
            yield from _fused_experts(prefix, module, index, dtype)
            continue
        buffers = set(module._buffers) - module._non_persistent_buffers_set
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            is_needed = name in module._parameters or name in buffers
            full_name = prefix + name
            if tensor is None or not tensor.is_meta or not is_needed:
                continue
            if full_name not in index and any(other in index for other in tied.get(full_name, ())):
                absent.add(full_name)
                continue
            is_packed = tensor.dtype == torch.uint8  # experts in MXFP4
            index.require(full_name, ("U8",) if is_packed else FLOATS, tuple(tensor.shape))
            target = next((d for p, d in kept_dtypes.items() if re.search(p, full_name)), dtype)
            target = tensor.dtype if is_packed else target
            yield full_name, _assigner(module, name, target)


def _tied_to(model: PreTrainedModel) -> dict[str, set[str]]:
    """Parameters that share a tensor, in both directions."""
    tied: dict[str, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        tied.setdefault(target, set()).add(source)
        tied.setdefault(source, set()).add(target)
    return tied


def _assigner(module: nn.Module, name: str, dtype: torch.dtype) -> Sink:
    return lambda tensor: assign(module, name, tensor.to(dtype))


def _fused_experts(
    prefix: str, module: nn.Module, index: CheckpointIndex, dtype: torch.dtype
) -> Iterator[tuple[str, Sink]]:
    """Sinks of unquantized experts, which are separate in the files and fused in the model."""
    num_experts, both, hidden_size = module.get_parameter("gate_up_proj").shape
    size = both // 2
    places = {
        "gate_proj": ("gate_up_proj", slice(0, size), (size, hidden_size)),
        "up_proj": ("gate_up_proj", slice(size, both), (size, hidden_size)),
        "down_proj": ("down_proj", slice(None), (hidden_size, size)),
    }

    def place(expert: int, parameter: str, rows: slice) -> Sink:
        def copy(tensor: torch.Tensor) -> None:
            fused = module.get_parameter(parameter)
            if fused.is_meta:
                empty = torch.empty(fused.shape, dtype=dtype, device=tensor.device)
                assign(module, parameter, empty)
                fused = module.get_parameter(parameter)
            fused.data[expert, rows] = tensor.to(dtype)

        return copy

    for i in range(num_experts):
        for projection in PROJECTIONS:
            parameter, rows, shape = places[projection]
            name = f"{prefix}{i}.{projection}.weight"
            index.require(name, FLOATS, shape)
            yield name, place(i, parameter, rows)


def _check_all_read(
    model: PreTrainedModel, plan: LayerPlan, index: CheckpointIndex, sinks: dict[str, Sink]
) -> None:
    """Raise CheckpointError if the files hold quantized weights without a sink."""
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    for name, entry in index.tensors.items():
        if name in sinks or not QUANTIZED_WEIGHT.search(name):
            continue
        if name.rpartition(".")[0] in plan.layers:
            continue  # checked with its layer already
        if not any(pattern.search(name) for pattern in ignored):
            raise CheckpointError(
                f"{index.folder}: {name}: expected no tensor of quantized weights in this layer, "
                f"found {entry}"
            )
