"""Selection of linear kernels: by machine, layer, argument and environment variable."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from halfbyte.dispatch import Answer, LayerRegistry, NoImplementationError
from halfbyte.linear import (
    LINEAR_BACKENDS,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    init_nvfp4_linear_kernel,
    select_nvfp4_linear_kernel,
)
from halfbyte.linear.reference import ReferenceKernel

VARIABLE = "HALFBYTE_NVFP4_GEMM_BACKEND"
CONFIG = NvFp4LinearLayerConfig(n=32, k=64, dtype=torch.bfloat16)
W4A4 = replace(CONFIG, quantize_activations=True)


class BlackwellKernel(ReferenceKernel):
    """A kernel for W4A4 on SM100, of a library that is not installed here."""

    name: ClassVar[str] = "blackwell"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        if compute_capability is None:
            return False, "needs a library"
        return compute_capability >= 100, "native FP4"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        return config.quantize_activations, "W4A4"


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry whose best kernel is for Blackwell only."""
    monkeypatch.delenv(VARIABLE, raising=False)
    registry: LayerRegistry[NvFp4LinearKernel] = LayerRegistry(
        "linear backend",
        {
            "blackwell": f"{__name__}:BlackwellKernel",
            "missing": "halfbyte.linear.no_such_module:NoKernel",
            "reference": "halfbyte.linear.reference:ReferenceKernel",
        },
        VARIABLE,
    )
    registry._loaded["blackwell"] = BlackwellKernel
    monkeypatch.setattr("halfbyte.linear.registry.LINEAR_BACKENDS", registry)


def gpu(config: NvFp4LinearLayerConfig, capability: int) -> NvFp4LinearLayerConfig:
    return replace(config, device_type="cuda", compute_capability=capability)


@pytest.mark.usefixtures("two_kernels")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, "reference"),
        (W4A4, "reference"),
        (gpu(CONFIG, 90), "reference"),
        (gpu(W4A4, 90), "reference"),
        (gpu(CONFIG, 100), "reference"),
        (gpu(W4A4, 100), "blackwell"),
        (gpu(W4A4, 120), "blackwell"),
    ],
    ids=["cpu", "cpu-w4a4", "sm90", "sm90-w4a4", "sm100", "sm100-w4a4", "sm120-w4a4"],
)
def test_best_kernel_for_any_machine(config: NvFp4LinearLayerConfig, expected: str) -> None:
    assert select_nvfp4_linear_kernel(config).name == expected


@pytest.mark.usefixtures("two_kernels")
def test_choice_that_cannot_run_names_reason_and_alternatives() -> None:
    with pytest.raises(NoImplementationError) as error:
        init_nvfp4_linear_kernel(CONFIG, "blackwell")
    assert str(error.value) == (
        "linear backend 'blackwell' cannot be used here: needs a library; usable: reference"
    )
    with pytest.raises(NoImplementationError, match=r"'missing'.*cannot be imported"):
        init_nvfp4_linear_kernel(CONFIG, "missing")
    with pytest.raises(NoImplementationError, match="unknown 'nonsense'; expected one of"):
        init_nvfp4_linear_kernel(CONFIG, "nonsense")


@pytest.mark.usefixtures("two_kernels")
def test_argument_wins_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "blackwell")
    assert init_nvfp4_linear_kernel(CONFIG, "reference").name == "reference"
    with pytest.raises(NoImplementationError, match=f"{VARIABLE}: .*needs a library"):
        init_nvfp4_linear_kernel(CONFIG)
    monkeypatch.setenv(VARIABLE, "reference")
    assert select_nvfp4_linear_kernel(gpu(W4A4, 100)).name == "reference"
    monkeypatch.setenv(VARIABLE, "")
    assert select_nvfp4_linear_kernel(gpu(W4A4, 100)).name == "blackwell"


def test_registered_names_and_order() -> None:
    assert LINEAR_BACKENDS.names() == [
        "torch_scaled_mm",
        "flashinfer_cutlass",
        "flashinfer_trtllm",
        "flashinfer_cudnn",
        "cutlass",
        "fbgemm",
        "cuda",
        "humming",
        "marlin",
        "triton",
        "cpu",
        "reference",
    ], "a new backend? name it here, and in a row of docs/linear.md"


@pytest.mark.parametrize("capability", [None, 0, 75, 80, 90, 100, 120])
def test_every_backend_answers_for_every_machine(capability: int | None) -> None:
    verdicts = LINEAR_BACKENDS.explain(gpu(W4A4, capability or 0), capability)
    assert [v.name for v in verdicts] == LINEAR_BACKENDS.names()
    assert all(v.reason for v in verdicts)
    assert next(v for v in verdicts if v.name == "reference").usable


def test_kernel_knows_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    kernel = init_nvfp4_linear_kernel(CONFIG, "reference")
    assert isinstance(kernel, ReferenceKernel)
    assert kernel.config == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 24}, "multiple of 16, got n=32, k=24"),
        ({"n": 0}, "n >= 1"),
        ({"part_sizes": (16, 8)}, r"sum to n=32, got \(16, 8\)"),
        ({"part_sizes": (33, -1)}, "positive numbers"),
        ({"dtype": torch.float64}, "float16, bfloat16 or float32, got torch.float64"),
        ({"dtype": torch.int8}, "float16, bfloat16 or float32, got torch.int8"),
        ({"m_hint": 0}, "m_hint: expected None or a number >= 1, got 0"),
    ],
    ids=["k", "n", "sum", "negative", "float64", "int8", "m-hint"],
)
def test_impossible_layers_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_kernel_without_restore_says_so() -> None:
    class Irreversible(ReferenceKernel):
        name: ClassVar[str] = "irreversible"
        restore_weights = NvFp4LinearKernel.restore_weights

    with pytest.raises(RuntimeError, match="linear backend 'irreversible' cannot give back"):
        Irreversible(CONFIG).restore_weights(nn.Module())
