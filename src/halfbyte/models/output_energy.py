"""Column energies of an output projection, for any weight format."""

from collections.abc import Callable

import torch

_INPUTS_AT_ONCE = 512


@torch.inference_mode()
def output_energy(
    projection: Callable[[torch.Tensor], torch.Tensor],
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Squares of a linear layer's weights, summed over its outputs.

    Applies the layer to an identity matrix, so that it works for any kind of quantized layer.

    Args:
        projection: the layer.
        size: input features.
        dtype, device: of its inputs.

    Returns:
        float64 `[size]`, on the CPU.
    """
    bias = projection(torch.zeros(1, size, dtype=dtype, device=device)).double()
    parts = []
    for begin in range(0, size, _INPUTS_AT_ONCE):
        rows = torch.zeros(min(_INPUTS_AT_ONCE, size - begin), size, dtype=dtype, device=device)
        rows.diagonal(begin).fill_(1)
        parts.append((projection(rows).double() - bias).square().sum(-1))
    return torch.cat(parts).cpu()
