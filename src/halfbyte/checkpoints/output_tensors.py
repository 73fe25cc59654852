"""What a quantized layer and a quantized checkpoint look like in each dialect.

Global scales. The file's value comes first: the decode multiplier that the weight is quantized with
is the one that a reader computes from it. Readers multiply in different orders (`(q * s) * g` here,
`q * (s * g)` in ModelOpt, `q * (s / e)` in compressed-tensors), which can differ in the last bit of
float32 and then, for one scale in some ten thousand, in the last bit of bfloat16. Such a scale is
moved up by single float32 steps until all orders round to the same bfloat16.

KV scales are decode multipliers of amax / 448 for both dialects, as ModelOpt writes them: kernels
that turn NVFP4 into FP8 on the way (TensorRT-LLM's) would overflow with amax / 2688, and a factor
of six costs E4M3 block scales nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.checkpoints.dialects.base import PROVIDER, PROVIDER_KEY, TENSOR_NAMES, Dialect
from halfbyte.numerics import nvfp4

KV_CACHE_DTYPES = {"nvfp4": "NVFP4", "fp8_e4m3": "FP8"}
"""Formats of the KV cache that a checkpoint can declare here, and ModelOpt's names for them."""
_KV_SCALE_MAX = 448.0
# Readers of the dialect (vLLM, TensorRT-LLM) refuse another name; the provider says who wrote it.
_MODELOPT_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
_CT_FORMAT = "nvfp4-pack-quantized"


@dataclass(frozen=True)
class OutputFormat:
    """How a checkpoint is to be written.

    Args:
        dialect: names, directions and declarations.
        quantize_activations: W4A4, which needs the activations' amax; else W4A16.
        recipe: how block scales are chosen.
        kv_cache_dtype: format that the checkpoint declares for the KV cache, a key of
            `KV_CACHE_DTYPES`, or None.
    """

    dialect: Dialect
    quantize_activations: bool
    recipe: nvfp4.Recipe = "amax6"
    kv_cache_dtype: str | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether anything is written that only a run of the model can tell."""
        return self.quantize_activations or self.kv_cache_dtype is not None


@dataclass(frozen=True)
class GlobalScale:
    """A global scale as the file has it, and what readers multiply codes by.

    Args:
        stored: float32, `[]` for ModelOpt and `[1]` for compressed-tensors.
        decode: float32 `[]`.
    """

    stored: torch.Tensor
    decode: torch.Tensor


def global_scale(amax: float, dialect: Dialect, recipe: nvfp4.Recipe = "amax6") -> GlobalScale:
    """The global scale of a tensor whose largest magnitude is `amax`.

    Raises:
        ValueError: `amax` is negative or not finite.
    """
    is_decode = TENSOR_NAMES[dialect].global_scale_is_decode
    stored = nvfp4.global_scale_from_amax(amax, recipe)
    if not is_decode:
        stored = (1 / nvfp4.global_scale_from_amax(amax, recipe).double()).float()
        stored = torch.where(stored.isfinite(), stored, torch.ones_like(stored))
    infinity = torch.full_like(stored, torch.inf)
    while True:
        decode = stored if is_decode else 1 / stored
        if nvfp4.readers_agree(stored, decode, is_decode=is_decode):
            break
        stored = torch.nextafter(stored, infinity)
    return GlobalScale(stored if is_decode else stored.reshape(1), decode)


def weight_tensors(
    output: OutputFormat,
    module: str,
    data: torch.Tensor,
    scales: torch.Tensor,
    scale: GlobalScale,
    input_amax: float | None,
) -> dict[str, torch.Tensor]:
    """The tensors of one quantized layer, by name.

    Args:
        module: name of the layer.
        data: uint8 `[N, K/2]`.
        scales: float8_e4m3fn `[N, K/16]`.
        scale: of the weight.
        input_amax: largest magnitude of the layer's input; None for W4A16.
    """
    names = TENSOR_NAMES[output.dialect]
    tensors = {
        names.weight: data,
        names.weight_scale: scales,
        # A copy: layers of a group share the scale, files must not share storage.
        names.weight_global_scale: scale.stored.clone(),
    }
    if input_amax is not None:
        tensors[names.input_global_scale] = global_scale(input_amax, output.dialect).stored
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def kv_scale_tensors(
    output: OutputFormat, attention: str, k_amax: float, v_amax: float
) -> dict[str, torch.Tensor]:
    """The KV scales of one layer, by name.

    Args:
        attention: name of the attention module.
        k_amax, v_amax: largest magnitudes of K and V.

    Raises:
        ValueError: one that is not above 0; readers refuse a scale of 0.
    """
    tensors: dict[str, torch.Tensor] = {}
    for side, amax in (("k", k_amax), ("v", v_amax)):
        if not amax > 0:
            raise ValueError(f"{attention}: {side}_amax: expected a number above 0, got {amax}")
        scale = torch.tensor(amax / _KV_SCALE_MAX, dtype=torch.float32, device="cpu")
        if output.dialect == "modelopt":
            tensors[f"{attention}.{side}_proj.{side}_scale"] = scale
        else:
            tensors[f"{attention}.{side}_scale"] = scale[None]
    return tensors


def quantization_config(output: OutputFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json.

    Args:
        ignore: names of the linear layers that are not quantized.
    """
    if output.dialect == "modelopt":
        return _modelopt_config(output, ignore)
    return _compressed_tensors_config(output, ignore)


def modelopt_file(output: OutputFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """The contents of ModelOpt's `hf_quant_config.json`."""
    return {
        "producer": _MODELOPT_PRODUCER,
        PROVIDER_KEY: PROVIDER,
        "quantization": {
            "quant_algo": _quant_algo(output),
            "kv_cache_quant_algo": _kv_cache_algo(output),
            "group_size": nvfp4.BLOCK_SIZE,
            "exclude_modules": list(ignore),
        },
    }


def _quant_algo(output: OutputFormat) -> str:
    return "NVFP4" if output.quantize_activations else "W4A16_NVFP4"


def _kv_cache_algo(output: OutputFormat) -> str | None:
    return output.kv_cache_dtype and KV_CACHE_DTYPES[output.kv_cache_dtype]


def _modelopt_config(output: OutputFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """As ModelOpt's `convert_hf_quant_config_format` makes it of `hf_quant_config.json`."""
    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK_SIZE}
    group: dict[str, Any] = {"input_activations": dict(args)} if output.quantize_activations else {}
    group.update(weights=args, targets=["Linear"])
    config: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "quant_algo": _quant_algo(output),
    }
    if output.kv_cache_dtype:
        algo = _kv_cache_algo(output)
        fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
        config["kv_cache_scheme"] = fp8 if algo == "FP8" else algo
        config["kv_cache_quant_algo"] = algo
    config.update(producer=_MODELOPT_PRODUCER, quant_method="modelopt")
    config[PROVIDER_KEY] = PROVIDER
    return config


def _compressed_tensors_config(output: OutputFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """As `QuantizationConfig` of compressed-tensors prints its presets NVFP4 and NVFP4A16."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": nvfp4.BLOCK_SIZE,
        "strategy": "tensor_group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    # "local": block scales are computed as the layer runs, the global scale is in the file.
    activations = {**weights, "dynamic": "local", "observer": "static_minmax"}
    fp8 = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
        "observer": "static_minmax",
    }
    # vLLM refuses a `kv_cache_scheme` of 4 bits, and the package itself cannot store such a cache.
    # ModelOpt's name for the format stands in its place, which both pass over.
    is_nvfp4 = output.kv_cache_dtype == "nvfp4"
    return {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations if output.quantize_activations else None,
                "output_activations": None,
                "format": _CT_FORMAT,
            }
        },
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": fp8 if output.kv_cache_dtype == "fp8_e4m3" else None,
        **({"kv_cache_quant_algo": "NVFP4"} if is_nvfp4 else {}),
        "format": _CT_FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        PROVIDER_KEY: PROVIDER,
    }
