"""Schemes in `config_groups` of both dialects: quantization of weights and activations."""

from collections.abc import Mapping
from typing import Any

from halfbyte.layouts.quantization_args import Values, described, first_misfit

NVFP4_EXPECTED = "NVFP4 (float, num_bits 4, group_size 16, symmetric, not dynamic)"
FP8_EXPECTED = "FP8 per tensor or row"
MXFP4_EXPECTED = "MXFP4 (group_size 32, scale_dtype uint8)"

_ORDERS = (None, False, "static", "weight")
"""GPTQ activation orders that do not permute the tensor's columns. Other orders need a
`weight_g_idx`."""

_NVFP4: Values = {
    "type": ("float",),
    "num_bits": (4,),
    "symmetric": (True,),
    "strategy": (None, "tensor_group"),
    "group_size": (16,),
    "dynamic": (None, False),
    "actorder": _ORDERS,
    "scale_dtype": (None, "float8_e4m3fn"),
}
_FP8: Values = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True,),
    "strategy": (None, "tensor", "channel"),
    "group_size": (None, -1),
    "dynamic": (None, False),
    "actorder": _ORDERS,
    "scale_dtype": (None, "float32", "bfloat16", "float16"),
}
_MXFP4: Values = {
    **_NVFP4,
    "strategy": (None, "group"),
    "group_size": (32,),
    "scale_dtype": (None, "uint8"),
}
_MXFP4_INPUTS: Values = {**_MXFP4, "dynamic": (True,), "actorder": (None, False)}
_NVFP4_INPUTS: Values = {**_NVFP4, "dynamic": (None, False, "local"), "actorder": (None, False)}
_FP8_INPUTS: Values = {
    **_FP8,
    "strategy": (None, "tensor", "token"),
    "dynamic": (None, False, True),
}


def is_nvfp4_weight(args: Any) -> bool:
    """Whether these are the arguments of NVFP4 weights."""
    return _fits(args, _NVFP4)


def is_nvfp4_input(args: Any) -> bool:
    """Whether these are the arguments of NVFP4 activations with a stored global scale."""
    return _fits(args, _NVFP4_INPUTS)


def is_mxfp4_weight(args: Any) -> bool:
    """Whether these are the arguments of MXFP4 weights."""
    return _fits(args, _MXFP4)


def is_mxfp4_input(args: Any) -> bool:
    """Whether these are the arguments of MXFP4 activations, which halfbyte does not quantize."""
    return _fits(args, _MXFP4_INPUTS)


def is_fp8_weight(args: Any) -> bool:
    """Whether these are the arguments of FP8 weights with a scale per tensor or row."""
    return _fits(args, _FP8)


def is_fp8_input(args: Any) -> bool:
    """Whether these are the arguments of FP8 activations, which halfbyte does not quantize."""
    return _fits(args, _FP8_INPUTS)


def describe(args: Any) -> str:
    """The arguments that are set, for messages."""
    if not isinstance(args, Mapping):
        return repr(args)
    fields = described(args)
    keys = sorted(fields, key=lambda key: [*_NVFP4, key].index(key))
    return ", ".join(f"{key} {fields[key]}" for key in keys)


def _fits(args: Any, expected: Values) -> bool:
    return isinstance(args, Mapping) and first_misfit(args, expected) is None
