"""Humming and vLLM's Marlin in plain PyTorch, following their sources.

Like `documented_peers`: arguments are checked, decoded and multiplied in float64. Their
internal layouts of repacked weights are plain transposes here.
Versions: vLLM 0.20.2 and 0.33.0, humming-kernels 0.1.19.
"""

import json
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from linear.documented_peers import decoded, fake_module, round_up


def install_marlin(patch: pytest.MonkeyPatch, *, with_workspace: bool) -> None:
    """vLLM's preparation of a layer for Marlin and the call; its own order is a transpose here.

    Args:
        patch: to install with.
        with_workspace: as in 0.20, where the caller hands over a workspace and shapes must fit.
    """

    def prepare_fp4_layer_for_marlin(
        layer: nn.Module, input_dtype: torch.dtype | None = None
    ) -> None:
        owner: Any = layer
        n, k = owner.output_size_per_partition, owner.input_size_per_partition
        assert (n % 64, k % 128) == (0, 0) or (n % 128, k % 64) == (0, 0)
        assert owner.weight.shape == (n, k // 2)
        assert owner.weight.dtype == torch.uint8
        assert owner.weight_scale.shape == (n, k // 16)
        assert owner.weight_scale.dtype == torch.float8_e4m3fn
        assert owner.weight_global_scale.dtype == torch.float32
        assert owner.weight_global_scale.dim() == 0
        assert not hasattr(owner, "bias")
        scales = owner.weight_scale.float()
        if owner.params_dtype == torch.bfloat16 and scales.max() > 0:
            factor = (448 / scales.max()).log2().floor().exp2()
        else:
            factor = torch.ones(())
        scales = torch.where(scales * factor < 2**-6, 0, scales)
        for name, tensor in (
            ("weight", owner.weight.view(torch.int32).t().contiguous()),
            ("weight_scale", scales.to(torch.float8_e4m3fn).t().contiguous()),
            ("weight_global_scale", owner.weight_global_scale * 2.0**100),
        ):
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
        if with_workspace:
            owner.workspace = torch.zeros(132, dtype=torch.int32)

    def apply_fp4_marlin_linear(
        input: torch.Tensor,  # noqa: A002
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        weight_global_scale: torch.Tensor | None,
        workspace: torch.Tensor | None,
        size_n: int,
        size_k: int,
        bias: torch.Tensor | None = None,
        input_dtype: torch.dtype | None = None,
        use_fp32_reduce: bool = True,
    ) -> torch.Tensor:
        assert weight_global_scale is not None
        assert (workspace is not None) == with_workspace
        assert input.shape[1] == size_k
        assert bias is None
        codes = weight.t().contiguous().view(torch.uint8)
        assert codes.shape == (size_n, size_k // 2)
        values = decoded(codes, weight_scale.t())
        exact = input.double() @ values.t() * weight_global_scale.double() * 2.0**-100
        return exact.to(input.dtype)

    fake_module(
        patch,
        "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4",
        prepare_fp4_layer_for_marlin=prepare_fp4_layer_for_marlin,
        apply_fp4_marlin_linear=apply_fp4_marlin_linear,
    )


class _WeightScaleType(Enum):
    GROUP = "group"


class _WeightScale2Type(Enum):
    TENSOR = "tensor"


def install_humming(patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Humming's transformation and matmul; returns the compute configuration of every call."""
    calls: list[dict[str, Any]] = []

    def prepare_and_transform_humming_tensors(
        tensors: dict[str, torch.Tensor],
        shape_n: int,
        shape_k: int,
        weight_schema: SimpleNamespace,
        input_schema: Any = None,
        num_experts: int | None = None,
        pad_n_to_multiple: int = 1,
        pad_k_to_multiple: int = 1,
        has_bias: bool = False,
        torch_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        assert vars(weight_schema) == {
            "b_dtype": "float4e2m1",
            "bs_dtype": "float8e4m3",
            "weight_scale_group_size": 16,
            "weight_scale_type": _WeightScaleType.GROUP,
            "weight_scale_2_type": _WeightScale2Type.TENSOR,
        }
        expected = {
            "weight": ((shape_n, shape_k // 8), torch.int32),
            "weight_scale": ((shape_n, shape_k // 16), torch.float8_e4m3fn),
            "weight_scale_2": ((1,), torch.float32),
        }
        assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()} == expected
        assert (round_up(shape_n, pad_n_to_multiple) - shape_n) % 8 == 0
        assert (round_up(shape_k, pad_k_to_multiple) - shape_k) % 8 == 0
        assert round_up(shape_n, pad_n_to_multiple) % 64 == 0
        assert round_up(shape_k, pad_k_to_multiple) % 32 == 0
        text = json.dumps({"n": shape_n, "k": shape_k, "dtype": str(torch_dtype)})
        transformed = {
            "weight": tensors["weight"].t().clone(memory_format=torch.contiguous_format),
            "weight_scale": tensors["weight_scale"]
            .t()
            .clone(memory_format=torch.contiguous_format),
            "weight_scale_2": tensors["weight_scale_2"],
        }
        return SimpleNamespace(to_str=lambda: text), transformed

    def humming_gemm(
        *,
        layer_config: str,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        weight_scale_2: torch.Tensor | None = None,
        compute_config: str | None = None,
        locks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        config = json.loads(layer_config)
        calls.append(json.loads(compute_config or "{}"))
        assert inputs.is_contiguous()
        assert inputs.shape[1] == config["k"]
        assert str(inputs.dtype) == config["dtype"]
        for tensor in (inputs, weight, weight_scale, weight_scale_2, locks):
            assert tensor is not None
            assert tensor.data_ptr() % 16 == 0
            assert tensor.is_contiguous()
        assert weight_scale_2 is not None
        assert locks is not None
        assert not locks.any()
        values = decoded(weight.t().contiguous().view(torch.uint8), weight_scale.t())
        exact = inputs.double() @ values.t() * weight_scale_2.double()
        assert exact.shape[1] == config["n"]
        return exact.to(inputs.dtype)

    def schema(**options: Any) -> SimpleNamespace:
        return SimpleNamespace(**options)

    fake_module(patch, "humming.dtypes", float4e2m1="float4e2m1", float8e4m3="float8e4m3")
    enums = {"WeightScaleType": _WeightScaleType, "WeightScale2Type": _WeightScale2Type}
    fake_module(patch, "humming.config", **enums)
    fake_module(patch, "humming.schema", HummingWeightSchema=schema)
    transform: dict[str, Callable[..., Any]] = {
        "prepare_and_transform_humming_tensors": prepare_and_transform_humming_tensors
    }
    fake_module(patch, "humming.transform", **transform)
    fake_module(patch, "humming.ops", humming_gemm=humming_gemm)
    return calls
