"""Checks of a layer's tensors, on indexes without files."""

from pathlib import Path

import pytest
import torch

from halfbyte.checkpoints import (
    TENSOR_NAMES,
    CheckpointError,
    CheckpointIndex,
    Declaration,
    Dialect,
)
from halfbyte.checkpoints.dialects.base import Scheme
from halfbyte.checkpoints.dialects.modelopt import ModelOpt
from halfbyte.checkpoints.index import TensorEntry
from halfbyte.checkpoints.validate import check_layer, check_scales, is_bad_block_scale, is_plain

N, K = 4, 32


def index(**tensors: tuple[str, tuple[int, ...]]) -> CheckpointIndex:
    folder = Path("/folder")
    entries = {
        f"a.{name}": TensorEntry(dtype, shape, folder / "model.safetensors")
        for name, (dtype, shape) in tensors.items()
    }
    return CheckpointIndex(folder, entries)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_plain_layer_has_a_whole_float_weight_and_no_scale(dialect: Dialect) -> None:
    names = TENSOR_NAMES[dialect]
    for dtype in ("BF16", "F16", "F32"):
        assert is_plain(index(weight=(dtype, (N, K))), "a", N, K, names)
    assert not is_plain(index(bias=("F32", (N,))), "a", N, K, names)
    assert not is_plain(index(weight=("U8", (N, K))), "a", N, K, names)
    assert not is_plain(index(weight=("F32", (N, K // 2))), "a", N, K, names)
    for scale in (names.weight_scale, names.weight_global_scale):
        tensors = {"weight": ("F32", (N, K)), scale: ("F32", (1,))}
        assert not is_plain(index(**tensors), "a", N, K, names)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (N,), (N, 1)])
def test_fp8_scales_per_tensor_or_row(shape: tuple[int, ...]) -> None:
    tensors = index(weight=("F8_E4M3", (N, K)), weight_scale=("F32", shape))
    used = check_layer(tensors, Declaration(ModelOpt()), "a", "fp8", N, K, has_bias=False)
    assert used == ("weight", "weight_scale")


@pytest.mark.parametrize("shape", [(2,), (1, N), (N, 2), (1, 1, 1), (1, 2)])
def test_fp8_scales_of_other_shapes(shape: tuple[int, ...]) -> None:
    tensors = index(weight=("F8_E4M3", (N, K)), weight_scale=("F32", shape))
    with pytest.raises(CheckpointError, match=r"a.weight_scale: expected .*, found F32 \["):
        check_layer(tensors, Declaration(ModelOpt()), "a", "fp8", N, K, has_bias=False)


def nvfp4_layer(shape: tuple[int, ...]) -> CheckpointIndex:
    return index(
        weight=("U8", (N, K // 2)),
        weight_scale=("F8_E4M3", (N, K // 16)),
        weight_scale_2=("F32", shape),
        input_scale=("F32", shape),
    )


@pytest.mark.parametrize("shape", [(), (1,)])
def test_nvfp4_global_scales_of_one_element(shape: tuple[int, ...]) -> None:
    names = ("weight", "weight_scale", "weight_scale_2")
    of_schemes: dict[Scheme, tuple[str, ...]] = {
        "nvfp4-a16": names,
        "nvfp4": (*names, "input_scale"),
    }
    for scheme, used in of_schemes.items():
        found = check_layer(
            nvfp4_layer(shape), Declaration(ModelOpt()), "a", scheme, N, K, has_bias=False
        )
        assert found == used
    with pytest.raises(CheckpointError, match=r"a.weight_scale_2: expected .*, found F32"):
        check_layer(nvfp4_layer((2,)), Declaration(ModelOpt()), "a", "nvfp4", N, K, has_bias=False)


def test_block_scales_are_finite_and_without_a_sign() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = (codes >= 128) | (codes == 0x7F)
    assert torch.equal(is_bad_block_scale(codes), expected)
    assert torch.equal(is_bad_block_scale(codes.view(torch.float8_e4m3fn)), expected)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("role", ["weight_scale_2", "input_scale"])
def test_global_scales_are_finite_and_above_0(role: str, value: float) -> None:
    names = TENSOR_NAMES["modelopt"]
    smallest = torch.tensor([torch.finfo(torch.float32).smallest_normal])
    check_scales("/folder", "a", [(role, smallest)], names)
    with pytest.raises(CheckpointError, match=f"/folder: a.{role}: expected a finite number"):
        check_scales("/folder", "a", [(role, torch.tensor(value))], names)
