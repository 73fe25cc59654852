"""Fields of `config_groups`: how weights and activations are quantized, of both dialects.

compressed-tensors calls them `QuantizationArgs`; ModelOpt writes some of them into its copy in
`config.json`. A field that changes numbers has a value that is read here, or the scheme is refused;
so is a field that is not known here and says anything.
"""

from collections.abc import Mapping
from typing import Any

NVFP4_EXPECTED = "NVFP4 (float, num_bits 4, group_size 16, symmetric, not dynamic)"
FP8_EXPECTED = "FP8 per tensor or row"

_Values = tuple[object, ...]
_ABSENT: _Values = (None,)
_ORDERS: _Values = (None, False, "static", "weight")
"""Of columns by how much they matter, that leave the tensors' as it was: nothing but GPTQ's own
order of work. Others come with a `weight_g_idx`."""
_DEFAULTS = {"type": "int", "num_bits": 8, "symmetric": True}
_OF_CALIBRATION = frozenset({"observer", "observer_kwargs", "zp_dtype"})
"""How scales were found; and the dtype of zero points, of which there are none."""

_NVFP4: dict[str, _Values] = {
    "type": ("float",),
    "num_bits": (4,),
    "symmetric": (True,),
    "strategy": (None, "tensor_group"),
    "group_size": (16,),
    "dynamic": (None, False),
    "actorder": _ORDERS,
    "scale_dtype": (None, "float8_e4m3fn"),
}
_FP8: dict[str, _Values] = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True,),
    "strategy": (None, "tensor", "channel"),
    "group_size": (None, -1),
    "dynamic": (None, False),
    "actorder": _ORDERS,
    "scale_dtype": (None, "float32", "bfloat16", "float16"),
}
_NVFP4_INPUTS = {**_NVFP4, "dynamic": (None, False, "local"), "actorder": (None, False)}
_FP8_INPUTS = {**_FP8, "strategy": (None, "tensor", "token"), "dynamic": (None, False, True)}


def is_nvfp4_weight(args: Any) -> bool:
    """Whether these are the arguments of NVFP4 weights."""
    return _fits(args, _NVFP4)


def is_nvfp4_input(args: Any) -> bool:
    """Whether these are the arguments of NVFP4 activations with a stored global scale."""
    return _fits(args, _NVFP4_INPUTS)


def is_fp8_weight(args: Any) -> bool:
    """Whether these are the arguments of FP8 weights with a scale per tensor or row."""
    return _fits(args, _FP8)


def is_fp8_input(args: Any) -> bool:
    """Whether these are the arguments of FP8 activations, which are left unquantized here."""
    return _fits(args, _FP8_INPUTS)


def describe(args: Any) -> str:
    """The fields of some arguments that say anything, for messages."""
    if not isinstance(args, Mapping):
        return repr(args)
    keys = sorted(args, key=lambda key: [*_NVFP4, key].index(key))
    said = [key for key in keys if key not in _OF_CALIBRATION and args[key] is not None]
    return ", ".join(f"{key} {args[key]}" for key in said)


def _fits(args: Any, expected: Mapping[str, _Values]) -> bool:
    if not isinstance(args, Mapping):
        return False
    fields = {**dict.fromkeys(expected), **_DEFAULTS, **args}
    return all(
        any(
            _plain(value) == one and isinstance(value, bool) is isinstance(one, bool)
            for one in valid
        )
        for key, value in fields.items()
        if key not in _OF_CALIBRATION
        for valid in [expected.get(key, _ABSENT)]
    )


def _plain(value: object) -> object:
    """Names as the tables have them: in small letters, dtypes without their module's."""
    return value.lower().removeprefix("torch.") if isinstance(value, str) else value
