"""Tensors of one layer as in a checkpoint, and layers to load them into."""

import torch

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES
from halfbyte.linear import NvFp4Linear

# Neither for this x nor for 3 x is 1 / (1 / x) the same float32.
STUBBORN = 0.0303751328912064


def file_of(layer: NvFp4Linear, dialect: Dialect, *, w4a4: bool = False) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint whose scales have no exact reciprocal."""
    names = TENSOR_NAMES[dialect]
    shape = () if names.global_scale_is_decode else (1,)
    tensors = {
        names.weight: layer.weight.detach().clone(),
        names.weight_scale: layer.weight_scale.detach().clone(),
        names.weight_global_scale: torch.full(shape, STUBBORN),
    }
    if w4a4:
        tensors[names.input_global_scale] = torch.full(shape, 3 * STUBBORN)
    if layer.bias is not None:
        tensors["bias"] = layer.bias.detach().clone()
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        bits = torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype
        assert torch.equal(found[name].view(bits), tensor.view(bits)), name


def empty(dialect: Dialect = "modelopt", **options: object) -> NvFp4Linear:
    arguments: dict = {"bias": False, "dtype": torch.float32, "backend": "reference", **options}
    return NvFp4Linear(64, 32, dialect=dialect, **arguments)
