"""Fused parts for kernels that take one global scale per call.

Adjacent parts with bitwise equal global scales form a run and need one call: usually the whole
layer, as q, k and v of most checkpoints. Each run with another scale is a call of its own. This is
exact, unlike one common scale with the ratios folded into block scales of 3 mantissa bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from halfbyte.linear.base import NvFp4LinearLayerConfig
from halfbyte.linear.tensors import tensor_of


@dataclass(frozen=True)
class Run:
    """Adjacent parts with the same global scale."""

    index: int
    part: int
    """Index of the first part, whose global scale and alpha are used."""
    start: int
    """The first row."""
    rows: int

    def name(self, tensor: str) -> str:
        """Attribute name of the run's own tensor; the first run keeps the plain name."""
        return tensor if self.index == 0 else f"{tensor}_run{self.index}"

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run's rows."""
        return tensor[self.start : self.start + self.rows]


def runs_of(config: NvFp4LinearLayerConfig, layer: nn.Module) -> list[Run]:
    """The runs of a layer, in order; copies its global scales to the host."""
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


def concat_outputs(outputs: Sequence[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """Concatenate the results of the runs, `[..., rows]` each, to `[..., N]`, and add the bias."""
    result = outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=-1)
    return result if bias is None else result + bias


def concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows of a one-byte dtype; a single tensor is not copied."""
    if len(tensors) == 1:
        return tensors[0].contiguous()
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
