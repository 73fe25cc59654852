"""Fused parts for kernels that take one global scale per call.

Parts side by side whose global scales are equal to the bit need one call; as q, k and v of most
checkpoints do, and every layer of one part. Where they differ, each run of equal ones is a call of
its own: exact, unlike one scale for all (the largest, say) with the others folded into block scales
of 3 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from halfbyte.linear.base import NvFp4LinearLayerConfig


@dataclass(frozen=True)
class Run:
    """Neighbouring parts with the same global scale."""

    index: int
    part: int
    """The first of them: whose global scale and alpha count."""
    start: int
    """The first row."""
    rows: int

    def name(self, tensor: str) -> str:
        """Of the run's own tensor on the layer: the first run keeps the name that peers know."""
        return tensor if self.index == 0 else f"{tensor}_run{self.index}"

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run's rows."""
        return tensor[self.start : self.start + self.rows]


def runs_of(config: NvFp4LinearLayerConfig, layer: nn.Module) -> list[Run]:
    """The runs of a layer, in order; reads its global scales back to the host."""
    scales = tensor_of(layer, "weight_global_scale").tolist()
    runs: list[Run] = []
    start = 0
    for part, (rows, scale) in enumerate(
        zip(config.part_sizes or (config.n,), scales, strict=True)
    ):
        if runs and scale == scales[runs[-1].part]:
            runs[-1] = replace(runs[-1], rows=runs[-1].rows + rows)
        else:
            runs.append(Run(len(runs), part, start, rows))
        start += rows
    return runs


def side_by_side(outputs: Sequence[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """Results of the runs, `[..., rows]` each, as one `[..., N]`, plus the bias."""
    result = outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=-1)
    return result if bias is None else result + bias


def concatenate(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of a one-byte dtype, one below the other; a single whole piece is not copied."""
    if len(pieces) == 1:
        return pieces[0].contiguous()
    return torch.cat([piece.view(torch.uint8) for piece in pieces]).view(pieces[0].dtype)


def tensor_of(layer: nn.Module, name: str) -> torch.Tensor:
    """A layer's tensor by name."""
    tensor: torch.Tensor = getattr(layer, name)
    return tensor.detach()


def set_tensor(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Give a layer a tensor, as every kernel's tensors are given."""
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def matrix_of(x: torch.Tensor) -> torch.Tensor:
    """x as `[M, K]`, row-major and aligned to 16 bytes, as libraries want their operands."""
    k = x.shape[-1]
    matrix = x.reshape(-1, k)
    # A single row counts as contiguous whatever its stride is; libraries look at the stride.
    if matrix.stride() == (k, 1) and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.new_empty((matrix.shape[0], k)).copy_(matrix)
