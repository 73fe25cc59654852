"""The tensors of a quantized layer and of its KV cache in a dialect's format.

Global scales: the stored value is computed first, and the weight is quantized with the decode scale
that a reader computes from it. Readers multiply in different orders (`(q * s) * g` here,
`q * (s * g)` in ModelOpt, `q * (s / e)` in compressed-tensors), which can differ in the last bit of
float32 and then, for one scale in some ten thousand, in the last bit of bfloat16. Such a scale is
increased by single float32 steps until all orders round to the same bfloat16.

KV scales are decode scales of amax / 448 in both dialects, as in ModelOpt: kernels that convert
NVFP4 to FP8 (TensorRT-LLM's) would overflow with amax / 2688, and a factor of six does not affect
the precision of E4M3 block scales.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from halfbyte.checkpoints.dialects.base import Dialect, OutputFormat
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES, get_dialect
from halfbyte.numerics import nvfp4

_KV_SCALE_MAX = 448.0


@dataclass(frozen=True)
class OutputGlobalScale:
    """A global scale as it is written, and the factor that readers apply to codes.

    Args:
        stored: float32, `[]` for ModelOpt and `[1]` for compressed-tensors.
        decode: float32 `[]`.
    """

    stored: torch.Tensor
    decode: torch.Tensor


def global_scale(
    amax: float, dialect: Dialect, recipe: nvfp4.Recipe = "amax6"
) -> OutputGlobalScale:
    """The global scale of a tensor whose largest magnitude is `amax`.

    Raises:
        ValueError: `amax` is negative or not finite.
    """
    names = TENSOR_NAMES[dialect]
    is_decode = names.global_scale_is_decode
    stored = nvfp4.global_scale_from_amax(amax, recipe)
    if not is_decode:
        stored = (1 / nvfp4.global_scale_from_amax(amax, recipe).double()).float()
        stored = torch.where(stored.isfinite(), stored, torch.ones_like(stored))
    infinity = torch.full_like(stored, torch.inf)
    decode = stored if is_decode else 1 / stored
    while not nvfp4.readers_agree(stored, decode, is_decode=is_decode):
        stored = torch.nextafter(stored, infinity)
        decode = stored if is_decode else 1 / stored
    return OutputGlobalScale(stored.reshape(names.scale_shape), decode)


def weight_tensors(
    output: OutputFormat,
    module: str,
    data: torch.Tensor,
    scales: torch.Tensor,
    scale: OutputGlobalScale,
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
        # Clone: layers of a group share the scale, but saved tensors must not share storage.
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
        ValueError: not above 0; readers reject a scale of 0.
    """
    dialect = get_dialect(output.dialect)
    sides: list[tuple[Literal["k", "v"], float]] = [("k", k_amax), ("v", v_amax)]
    tensors: dict[str, torch.Tensor] = {}
    for side, amax in sides:
        if not amax > 0:
            raise ValueError(f"{attention}: {side}_amax: expected a number above 0, got {amax}")
        scale = torch.tensor(amax / _KV_SCALE_MAX, dtype=torch.float32, device="cpu")
        name = dialect.kv_scale_name(attention, side)
        tensors[name] = scale.reshape(dialect.tensor_names.scale_shape)
    return tensors
