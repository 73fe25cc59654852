"""Fields of compressed-tensors' `QuantizationArgs`, which ModelOpt writes in part as well.

They describe weights, activations and KV caches. Unsupported values of fields that affect results
are refused; so are unknown fields that are set.
"""

from collections.abc import Mapping

Values = Mapping[str, tuple[object, ...]]
"""Supported values by field; they include None if the field may be absent or null."""

_DEFAULTS = {"type": "int", "num_bits": 8, "symmetric": True}
_OF_CALIBRATION = frozenset({"observer", "observer_kwargs", "zp_dtype"})
"""Fields that do not affect values: how scales were found, and the dtype of zero points, which no
supported scheme has."""


def first_misfit(args: Mapping[str, object], expected: Values) -> str | None:
    """The first field with an unsupported value; None if all are supported.

    Args:
        args: fields as a file has them; absent ones have the package's defaults.
        expected: for one scheme; fields that it leaves out must be absent or null.
    """
    fields = {**dict.fromkeys(expected), **_DEFAULTS, **args}
    for key, value in fields.items():
        plain = _plain(value)
        # Booleans and numbers are equal in Python, and no field has both.
        fits = any(
            plain == one and isinstance(plain, bool) is isinstance(one, bool)
            for one in expected.get(key, (None,))
        )
        if not fits and key not in _OF_CALIBRATION:
            return key
    return None


def described(args: Mapping[str, object]) -> dict[str, object]:
    """The fields that affect values, for messages."""
    return {k: v for k, v in args.items() if k not in _OF_CALIBRATION and v is not None}


def is_set(value: object) -> bool:
    """Whether a field has a value that can change results: not null, false or empty."""
    return value is not None and value is not False and value not in ("", [], {})


def _plain(value: object) -> object:
    """Names in lower case, and dtypes without `torch.`."""
    return value.lower().removeprefix("torch.") if isinstance(value, str) else value
