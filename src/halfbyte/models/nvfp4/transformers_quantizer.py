"""transformers' quantizer for NVFP4 checkpoints, registered by `import halfbyte`.

transformers calls a quantizer three times: after reading `config.json`, when the model is on the
meta device, and when all other weights are loaded. The second call removes the quantized layers;
the third puts them back, filled by halfbyte's streaming. transformers never sees their tensors, so
its handling of dtypes, fused experts and missing keys does not affect them.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfbyte.checkpoints.dialects.base import PROVIDER, Declaration
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES, read_declaration
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.stored_kv_scales import is_kv_scale
from halfbyte.models.checkpoint_folder import Checkpoint, CheckpointKVScales
from halfbyte.models.config_fields import check_top_k
from halfbyte.models.file_names import named_as_modules
from halfbyte.models.nvfp4.experts import fused_experts
from halfbyte.models.nvfp4.layer_plan import LayerPlan, plan_layers
from halfbyte.models.nvfp4.layers import LayerOptions, log_activation_mode, replace_layers, untie
from halfbyte.models.nvfp4.weight_stream import check_plain_tensors, stream_weights

METHOD = PROVIDER
"""Name of the quantizer in transformers' registry; checkpoints keep their own `quant_method`."""

_AUTOMATIC_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


class NvFp4Config(QuantizationConfigMixin):
    """`quantization_config` of a checkpoint in either dialect, unchanged.

    Args:
        section: the object in `config.json`.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.quant_method: Any = METHOD
        self.section = dict(section)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """See `QuantizationConfigMixin.from_dict`."""
        config = cls(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """The object as in the file, including `quant_method`."""
        return copy.deepcopy(self.section)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()


class _Pending(nn.Module):
    """Placeholder of a quantized module while transformers loads the others."""


class _UnderPrefix(nn.Module):
    """A base model as a submodule, so that its modules have the names of files with a head.

    These names begin with the base model's prefix, such as `model.`. The attributes are those of
    `PreTrainedModel` that planning and streaming use.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        prefix = model.base_model_prefix
        self.add_module(prefix, model)
        self.config, self._get_dtype_plan = model.config, model._get_dtype_plan
        self.all_tied_weights_keys = {
            f"{prefix}.{name}": f"{prefix}.{other}"
            for name, other in model.all_tied_weights_keys.items()
        }
        # Ignore a head in the files, quantized or not.
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self._keys_to_ignore_on_load_unexpected = {*ignored, rf"^(?!{re.escape(prefix)}\.)"}


def _named_as_in_files(model: PreTrainedModel, index: CheckpointIndex) -> Any:
    """The model; if the files add a prefix to its names, the same modules under that prefix."""
    prefix = model.base_model_prefix
    is_base = bool(prefix) and not hasattr(model, prefix)
    has_prefix = any(name.startswith(f"{prefix}.") for name in index.tensors)
    return _UnderPrefix(model) if is_base and has_prefix else model


class NvFp4Quantizer(HfQuantizer):
    """Loads quantized layers for `from_pretrained` onto one device."""

    requires_calibration = True
    quantization_config: NvFp4Config

    def __init__(self, quantization_config: NvFp4Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._pending: dict[str, nn.Module] = {}
        self._plan = LayerPlan()
        self._declaration: Declaration | None = None
        self._index: CheckpointIndex | None = None
        self._options: LayerOptions | None = None

    def update_device_map(self, device_map: Any) -> Any:
        """One device for the whole model: for automatic maps the current GPU.

        Raises:
            ValueError: a map onto several devices.
        """
        if device_map is None:
            return None
        if isinstance(device_map, str) and device_map in _AUTOMATIC_DEVICE_MAPS:
            return {"": torch.device("cuda" if torch.cuda.is_available() else "cpu")}
        devices = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if len(devices) != 1 or "disk" in devices:
            raise ValueError(f"device_map: NVFP4 layers need one device, got {device_map}")
        return {"": devices.pop()}

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        files: Sequence[str] = kwargs.get("checkpoint_files") or ()
        if not files:
            raise CheckpointError("expected a checkpoint's files to load from, found none")
        # The files from which transformers loads the other tensors; the folder may hold more.
        index = named_as_modules(CheckpointIndex.read_chosen(files), model.config.model_type)
        folder, named = index.folder, _named_as_in_files(model, index)
        check_top_k(model.config, folder)
        section = self.quantization_config.to_dict()
        declaration = read_declaration(folder, {"quantization_config": section})
        # Broken scales are an error before weights are read; sound ones stay with the model.
        scales = CheckpointKVScales.read(folder, model.config, identify=True)
        Checkpoint(scales.folder, model.config, declaration, index, scales).attach_to(model)
        if declaration is not None:
            method = section.get("quant_method", declaration.dialect)
            section = {"quant_method": method, **(declaration.section or {})}
            self.quantization_config.section = section
        if declaration is None or not declaration.quantizes_weights:
            check_plain_tensors(named, self._plan, index, model.dtype)  # raises for packed tensors
            return
        device_map = kwargs.get("device_map") or {"": "cpu"}
        self._declaration, self._index = declaration, index
        self._options = LayerOptions(model.dtype, torch.device(device_map[""]))
        self._plan = plan_layers(named, declaration, index)
        for name in [*self._plan.experts, *self._plan.layers]:
            if not any(name.startswith(f"{block}.") for block in self._plan.experts):
                untie(named, name)
                self._pending[name] = named.get_submodule(name)
                named.set_submodule(name, _Pending())
        # Before the patterns below hide surplus tensors; missing ones would get random values.
        check_plain_tensors(named, self._plan, index, model.dtype)
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | set(self._unexpected_names())

    def _unexpected_names(self) -> Iterator[str]:
        """Patterns of tensors in the files that are not in the model at this point."""
        assert self._index is not None
        # `checkpoints.stored_kv_scales.read_stored_scales` reads them.
        yield from (f"^{re.escape(name)}$" for name in self._index.tensors if is_kv_scale(name))
        for name in {re.sub(r"\d+", "0", name) for name in self._plan.file_names()}:
            yield f"^{re.escape(name).replace('0', '[0-9]+')}$"
        for name in {re.sub(r"\d+", "0", name) for name in self._plan.experts}:
            yield f"^{re.escape(name).replace('0', '[0-9]+')}" + r"\."

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        if not self._pending:
            return model
        assert self._declaration is not None
        assert self._index is not None
        assert self._options is not None
        named = _named_as_in_files(model, self._index)
        for name, module in self._pending.items():
            named.set_submodule(name, module)
        self._pending.clear()
        replace_layers(named, self._plan, self._declaration, self._options)
        options = self._options
        stream_weights(
            named, self._plan, self._declaration, self._index, options.device, options.dtype
        )
        log_activation_mode(model, self._plan, options)
        return model

    def is_serializable(self) -> bool:
        """No: the model lacks KV scales and declaration; `halfbyte quantize` writes checkpoints."""
        return False

    @property
    def is_trainable(self) -> bool:
        """No: the kernels have no backward."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Yes: kernels are custom operators that `torch.compile` can trace."""
        return True


def refuse_packed_experts(model: PreTrainedModel, files: Sequence[str]) -> None:
    """Refuse NVFP4 experts for the quantizer of the compressed-tensors package.

    It fuses experts without their global scales (transformers 5.23), and the weights are off by a
    factor of thousands.

    Args:
        model: on the meta device.
        files: from which transformers loads it.

    Raises:
        CheckpointError: the files have experts with a global scale.
    """
    experts = [name for name, module in model.named_modules() if fused_experts(module) is not None]
    if not experts or not all(file.endswith(".safetensors") for file in files):
        return
    index = named_as_modules(CheckpointIndex.read_chosen(files), model.config.model_type)
    suffix = f".{TENSOR_NAMES['compressed-tensors'].weight_global_scale}"
    for name, entry in index.tensors.items():
        if name.endswith(suffix) and any(f"{block}." in name for block in experts):
            raise CheckpointError(
                f"{index.folder}: {name}: expected unquantized experts, because transformers loads "
                f"experts without their global scales, found {entry}; halfbyte.load_model reads "
                "this checkpoint"
            )


def mark_as_quantized(model: PreTrainedModel, section: Mapping[str, Any]) -> None:
    """Set the attributes that `from_pretrained` sets on a quantized model.

    Args:
        model: that was loaded.
        section: `quantization_config` of its checkpoint, with `quant_method`.
    """
    quantization_config = NvFp4Config(section)
    model.config.quantization_config = quantization_config
    attributes: dict[str, Any] = {
        "hf_quantizer": NvFp4Quantizer(quantization_config),
        "is_quantized": True,
        "quantization_method": METHOD,
    }
    vars(model).update(attributes)
