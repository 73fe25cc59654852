"""Checks of a quantized layer's tensors: presence, dtypes, shapes and valid scales.

Dtypes and shapes are checked from the headers before any weight is loaded; scales when they are
loaded: a NaN, a negative number, or a global scale of 0 would silently give wrong results.
"""

import re
from collections.abc import Iterable

import torch

from halfbyte.checkpoints.dialects.base import Declaration, Scheme, TensorNames
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.numerics.e4m3 import E4M3_NAN

FLOATS = ("BF16", "F16", "F32")
PACKED = ("U8", "F8_E4M3")
QUANTIZED_WEIGHT = re.compile(
    r"\.(weight_(packed|\w*scale\w*)|input_(\w*_)?scale\w*|pre_quant_scale|qweight|qzeros|scales"
    r"|g_idx|\w+_blocks)$"
)
"""Tensors that only quantized weights have; ignoring them would give wrong weights."""
_BLOCKS = {"NVFP4": (16, "F8_E4M3"), "MXFP4": (32, "U8")}
"""Values that share a scale, and the scale's dtype in files."""
# KV cache scales, or repeating the header.
_KNOWN_EXTRAS = frozenset({"k_scale", "v_scale", "q_scale", "output_scale", "weight_shape"})
_FP8_NAMES = ("weight", "weight_scale", "input_scale")


def is_plain(index: CheckpointIndex, layer: str, n: int, k: int, names: TensorNames) -> bool:
    """Whether a layer is stored unquantized: a float weight of full shape, and no scale."""
    entry = index.tensors.get(f"{layer}.weight")
    scales = (names.weight_scale, names.weight_global_scale)
    return (
        entry is not None
        and entry.dtype in FLOATS
        and entry.shape == (n, k)
        and not any(f"{layer}.{name}" in index for name in scales)
    )


def check_unquantized_layer(
    index: CheckpointIndex, layer: str, n: int, k: int, names: TensorNames
) -> None:
    """Raise CheckpointError if a layer `[n, k]` that is declared unquantized is packed."""
    for name in sorted({names.weight, "weight"}):
        entry = index.tensors.get(f"{layer}.{name}")
        if entry is not None and entry.dtype in PACKED:
            expected = f"{'/'.join(FLOATS)} [{n}, {k}]"
            if name != "weight":
                expected = "no tensor of quantized weights in this layer"
            raise CheckpointError(
                f"{index.folder}: {layer}.{name}: expected {expected}, as the declaration leaves "
                f"the layer out, found {entry}"
            )


def check_layer(
    index: CheckpointIndex,
    declaration: Declaration,
    layer: str,
    scheme: Scheme,
    n: int,
    k: int,
    *,
    has_bias: bool,
) -> tuple[str, ...]:
    """Check the headers of a quantized linear layer's tensors.

    Args:
        index: of the files.
        declaration: of the checkpoint.
        layer: its name.
        scheme: how it is stored.
        n: output features.
        k: input features.
        has_bias: whether the layer has a bias in the model.

    Returns:
        Names of the tensors to load, without the layer's name.

    Raises:
        CheckpointError: a tensor is absent, has another dtype or shape, or is surplus.
    """
    if scheme == "fp8":
        used = _check_fp8(index, layer, n, k)
        known: tuple[str, ...] = _FP8_NAMES
    elif scheme == "mxfp4":
        used = known = _check_codes(index, declaration.names, layer, "MXFP4", n, k)
    else:
        used = _check_nvfp4(index, declaration.names, layer, scheme, n, k)
        names = declaration.names
        known = (
            names.weight,
            names.weight_scale,
            names.weight_global_scale,
            names.input_global_scale,
        )
    if has_bias:
        index.require(f"{layer}.bias", FLOATS, (n,))
        used = (*used, "bias")
    for name in sorted(index.names_of(layer) - _KNOWN_EXTRAS - set(known) - set(used)):
        raise CheckpointError(
            f"{index.folder}: {layer}.{name}: expected no such tensor beside {scheme} weights, "
            f"found {index.tensors[f'{layer}.{name}']}"
        )
    return used


def is_bad_block_scale(scales: torch.Tensor) -> torch.Tensor:
    """Mask of E4M3 block scales that are NaN or have the sign bit set (also -0.0): never valid.

    Args:
        scales: float8_e4m3fn or their bytes, of any shape.

    Returns:
        bool, of the same shape.
    """
    return scales.view(torch.uint8) >= E4M3_NAN  # NaN, and every byte with the sign bit


def check_scales(
    folder: object, layer: str, tensors: Iterable[tuple[str, torch.Tensor]], names: TensorNames
) -> None:
    """Raise CheckpointError if a scale is NaN, infinite or negative, or a global scale is 0.

    Args:
        folder: for messages.
        layer: its name.
        tensors: of the layer, by their names in the file, without the layer's.
        names: of the dialect.
    """
    for name, tensor in tensors:
        if name in (names.weight_global_scale, names.input_global_scale):
            values = tensor.float().flatten()
            bad = values[~(values.isfinite() & (values > 0))]
            expected = "a finite number above 0"
        elif name == names.weight_scale:
            scales = tensor.flatten()
            bad = scales.view(torch.uint8)[is_bad_block_scale(scales)].view(torch.float8_e4m3fn)
            expected = "finite block scales without a sign"
        else:
            continue
        if bad.numel():
            found = f"{float(bad[0])}, and {bad.numel() - 1} more" if bad.numel() > 1 else ""
            raise CheckpointError(
                f"{folder}: {layer}.{name}: expected {expected}, found {found or float(bad[0])}"
            )


def _check_nvfp4(
    index: CheckpointIndex, names: TensorNames, layer: str, scheme: Scheme, n: int, k: int
) -> tuple[str, ...]:
    used = _check_codes(index, names, layer, "NVFP4", n, k)
    index.require(f"{layer}.{names.weight_global_scale}", ("F32",), (), (1,))
    used = (*used, names.weight_global_scale)
    if scheme == "nvfp4":
        index.require(f"{layer}.{names.input_global_scale}", ("F32",), (), (1,))
        used = (*used, names.input_global_scale)
    return used


def _check_codes(
    index: CheckpointIndex, names: TensorNames, layer: str, form: str, n: int, k: int
) -> tuple[str, ...]:
    """Check codes and block scales of a format of `_BLOCKS`; returns their names."""
    block_size, scale_dtype = _BLOCKS[form]
    if k % block_size:
        raise CheckpointError(
            f"{index.folder}: {layer}: expected input features in multiples of {block_size} for "
            f"{form}, found {k}"
        )
    index.require(f"{layer}.{names.weight}", ("U8",), (n, k // 2))
    index.require(f"{layer}.{names.weight_scale}", (scale_dtype,), (n, k // block_size))
    return names.weight, names.weight_scale


def _check_fp8(index: CheckpointIndex, layer: str, n: int, k: int) -> tuple[str, ...]:
    index.require(f"{layer}.weight", ("F8_E4M3",), (n, k))
    index.require(f"{layer}.weight_scale", FLOATS, (), (1,), (1, 1), (n,), (n, 1))
    return ("weight", "weight_scale")
