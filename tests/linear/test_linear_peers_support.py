"""Machines and layers that backends of other libraries support."""

from typing import Any

import pytest
import torch

from halfbyte.dispatch import NoImplementationError, is_installed
from halfbyte.linear import LINEAR_BACKENDS, NvFp4LinearLayerConfig
from halfbyte.linear.w4a16 import humming
from linear.peers import ALL_DTYPES, BF16, FP16, W4A4, W4A16, dtypes_of


def config_for(name: str, capability: int, **changes: Any) -> NvFp4LinearLayerConfig:
    options: dict[str, Any] = {
        "n": 256,
        "k": 512,
        "dtype": BF16,
        "quantize_activations": name in W4A4,
        "device_type": "cuda",
        "compute_capability": capability,
    }
    return NvFp4LinearLayerConfig(**{**options, **changes})


RUNS_ON = {
    "torch_scaled_mm": (100, 103, 110, 120, 121),
    "flashinfer_cutlass": (100, 103, 110, 120, 121),
    "flashinfer_trtllm": (100, 103),
    "flashinfer_cudnn": (100, 103, 110, 120, 121),
    "cutlass": (100, 103, 110, 120, 121),
    "fbgemm": (100, 103),
    "humming": (75, 80, 86, 89, 90, 100, 103, 110, 120, 121),
    "marlin": (75, 80, 86, 89, 90, 100, 103, 110, 120, 121),
}


@pytest.mark.parametrize("name", RUNS_ON)
def test_machines(name: str) -> None:
    kernel = LINEAR_BACKENDS.get(name)
    for capability in (0, 70, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121):
        usable, reason = kernel.is_supported(capability)
        assert usable == (capability in RUNS_ON[name]), f"{capability}: {reason}"
        assert reason
    assert kernel.is_supported(0) == (False, "needs an NVIDIA GPU")


@pytest.mark.parametrize("name", RUNS_ON)
def test_what_it_takes(name: str) -> None:
    kernel = LINEAR_BACKENDS.get(name)
    for dtype in ALL_DTYPES:
        usable, reason = kernel.can_implement(config_for(name, 100, dtype=dtype))
        assert usable == (dtype in dtypes_of(name)), reason
    for changes, why in (
        ({"device_type": "cpu"}, ["not on a GPU"]),
        ({"quantize_activations": name not in W4A4}, ["W4A16 layer", "W4A4 layer"]),
        ({"batch_invariant": True}, ["batch invariance", "batch-invariant"]),
    ):
        usable, reason = kernel.can_implement(config_for(name, 100, **changes))
        assert not usable
        assert any(word in reason for word in why), reason
    for n, k in ((1, 16), (33, 48), (28672, 4096)):
        assert kernel.can_implement(config_for(name, 100, n=n, k=k))[0]


@pytest.mark.parametrize("name", W4A16)
def test_bfloat16_needs_sm80(name: str) -> None:
    kernel = LINEAR_BACKENDS.get(name)
    assert kernel.can_implement(config_for(name, 75, dtype=FP16))[0]
    assert kernel.can_implement(config_for(name, 75))[1] == "bfloat16 needs compute capability 8.0"


def test_humming_batch_invariance_only_where_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming, "BATCH_INVARIANT_CAPABILITIES", frozenset({90}))
    for capability, usable in ((90, True), (80, False)):
        config = config_for("humming", capability, batch_invariant=True)
        assert humming.HummingKernel.can_implement(config)[0] == usable


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_w4a4_layers_choose_a_native_kernel_on_blackwell_alone(capability: int) -> None:
    config = config_for("cutlass", capability)
    if capability == 90:
        verdicts = {v.name: v for v in LINEAR_BACKENDS.explain(config, capability)}
        assert not any(verdicts[name].usable for name in W4A4)
    else:
        assert LINEAR_BACKENDS.select(config, compute_capability=capability).name == W4A4[0]


@pytest.mark.parametrize(
    ("name", "module", "reason"),
    [
        ("humming", "humming", "humming-kernels 0.1.19 or later, which is not installed"),
        ("marlin", "vllm", "needs vllm, which is not installed"),
        ("cutlass", "vllm", "needs vllm, which is not installed"),
        ("fbgemm", "fbgemm_gpu", "needs fbgemm-gpu-genai, which is not installed"),
        ("flashinfer_cutlass", "flashinfer", "flashinfer-python 0.7.0 or later, which is not inst"),
        ("flashinfer_cudnn", "cudnn", "needs nvidia-cudnn-frontend, which is not installed"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, reason: str
) -> None:
    if is_installed(module):
        pytest.skip(f"{module} is installed here")
    kernel = LINEAR_BACKENDS.get(name)
    for owner in ("halfbyte.dispatch", "halfbyte.linear.w4a4.native_fp4"):
        monkeypatch.setattr(f"{owner}.current_compute_capability", lambda: 100)
    usable, why = kernel.is_supported()
    assert not usable
    assert reason in why


@pytest.mark.parametrize(
    ("version", "reason"), [("0.1.18", "this is 0.1.18"), ("0.1.19", None), ("0.2.0rc1", None)]
)
def test_humming_versions(
    monkeypatch: pytest.MonkeyPatch, version: str, reason: str | None
) -> None:
    monkeypatch.setattr("halfbyte.dispatch.current_compute_capability", lambda: 90)
    monkeypatch.setattr("halfbyte.dispatch.metadata.version", lambda name: version)
    usable, why = humming.HummingKernel.is_supported()
    assert usable == (reason is None)
    assert (reason or "Humming") in why


@pytest.mark.parametrize(
    ("cuda", "reason"), [(None, "is for None"), ("12.6", "is for 12.6"), ("13.0", None)]
)
def test_torch_must_be_for_a_cuda_that_knows_fp4(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, reason: str | None
) -> None:
    monkeypatch.setattr("halfbyte.linear.w4a4.native_fp4.current_compute_capability", lambda: 100)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    usable, why = LINEAR_BACKENDS.get("torch_scaled_mm").is_supported()
    assert usable == (reason is None)
    assert (reason or "scaled_mm") in why


def test_an_explicit_choice_that_cannot_run_says_why() -> None:
    with pytest.raises(NoImplementationError, match="'fbgemm' cannot be used here: takes bfloat16"):
        LINEAR_BACKENDS.select(config_for("fbgemm", 100, dtype=FP16), "fbgemm", 100)
    with pytest.raises(NoImplementationError, match=r"compute capability 9\.0"):
        LINEAR_BACKENDS.select(config_for("cutlass", 90), "cutlass", 90)
