"""Tensors of a layer, read and replaced by kernels, and x as a matrix."""

import torch
from torch import nn


def tensor_of(layer: nn.Module, name: str) -> torch.Tensor:
    """A layer's tensor by name."""
    tensor: torch.Tensor = getattr(layer, name)
    return tensor.detach()


def set_tensor(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set a tensor of a layer as `nn.Parameter(requires_grad=False)`."""
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def matrix_of(x: torch.Tensor) -> torch.Tensor:
    """x as `[M, K]`, row-major and aligned to 16 bytes, as libraries require."""
    k = x.shape[-1]
    matrix = x.reshape(-1, k)
    # A single row counts as contiguous whatever its stride is; libraries look at the stride.
    if matrix.stride() == (k, 1) and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.new_empty((matrix.shape[0], k)).copy_(matrix)
