"""vLLM's norms, activation and rotary embedding by `halfbyte.elementwise`."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.platforms import current_platform

from halfbyte.plugins.vllm import layers, register
from plugins.vllm.engine.engines import TEXTS, vllm_engine
from plugins.vllm.engine.gpu_engines import assert_alike, scored

# As torch.compile has it: layers in PyTorch instead of vLLM's own kernels.
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "compilation_config": {"custom_ops": ["none"]}}
OPERATORS = ("add_rms_norm", "rms_norm", "rotary_embedding", "silu_and_mul")
Calls = Counter[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Counts of the operators that layers have called; all runs want them."""
    register()
    counts: Calls = Counter()
    for name in OPERATORS:
        operator = getattr(layers, name)

        def counted(*arguments: Any, name: str = name, operator: Any = operator) -> Any:
            counts[name] += 1
            return operator(*arguments)

        monkeypatch.setattr(layers, name, counted)
    monkeypatch.setattr(layers, "wants_layers", lambda config: True)
    return counts


@pytest.fixture
def config() -> Iterator[Any]:
    """vLLM's configuration, in whose context layers are created."""
    vllm_config = VllmConfig()
    vllm_config.compilation_config.custom_ops = ["none"]
    with set_current_vllm_config(vllm_config):
        yield vllm_config


def test_layers_use_the_operators(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(layers, "wants_layers", lambda config: False)
        with vllm_engine(**OPTIONS) as llm:
            expected = scored(llm, TEXTS)
    assert not calls
    monkeypatch.setattr(layers, "_MIN_NORM", 1)
    with vllm_engine(**OPTIONS) as llm:
        found = scored(llm, TEXTS)
    assert set(calls) == set(OPERATORS), calls
    assert_alike(found, expected, 0.2)


def test_models_with_norms_of_heads_keep_their_rotary_embedding(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_MIN_NORM", 65)  # the bundled model's heads have 64 channels
    with vllm_engine(**OPTIONS) as llm:
        scored(llm, TEXTS[:1])
    assert set(calls) == {"add_rms_norm", "rms_norm", "silu_and_mul"}, calls


def test_runs_without_the_kernels_keep_vllms_custom_ops() -> None:
    options = {"custom_ops": ["none", "+rms_norm", "+rotary_embedding"]}
    own: dict[str, Any] = {"attention_backend": None, "kv_cache_dtype": "auto", "kv_recipe": None}
    with vllm_engine(**own, compilation_config=options) as llm:
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        model = executor.driver_worker.worker.model_runner.model
        methods = {
            type(x).__name__: x._forward_method.__name__
            for x in model.modules()
            if isinstance(x, (RMSNorm, RotaryEmbedding, SiluAndMul))
        }
    assert methods.pop("SiluAndMul") == "forward_native"
    assert len(methods) == 2
    assert set(methods.values()) == {"forward_cpu"}


def test_layers_that_the_kernels_do_not_support(calls: Calls, config: Any) -> None:
    x = torch.randn(5, 2048).bfloat16()
    for options in ({"has_weight": False}, {"var_hidden_size": 1024}):
        norm = RMSNorm(2048, dtype=torch.bfloat16, **options)
        assert torch.equal(norm(x), RMSNorm.forward_native(norm, x))
    assert torch.equal(SiluAndMul()(x.float()), SiluAndMul.forward_native(x.float()))
    rotary = RotaryEmbedding(64, 64, 100, 10000.0, True, torch.bfloat16)
    positions = torch.arange(5)
    query, key = torch.randn(5, 256).bfloat16(), torch.randn(5, 128).bfloat16()
    for arguments in (
        (positions, query, None),
        (positions.int(), query, key),
        (positions, query.view(5, 4, 64), key.view(5, 2, 64)),
        (positions, query, key.view(5, 2, 64)),
        (positions[None], query, key),
    ):
        given = [None if a is None else a.clone() for a in arguments]
        expected = RotaryEmbedding.forward_native(rotary, *given)
        for found, wanted in zip(rotary(*arguments), expected, strict=True):
            assert found is wanted is None or torch.equal(found, wanted)
    assert not calls
    rotary(positions, query, key)
    RMSNorm(2048, dtype=torch.bfloat16)(x)
    SiluAndMul()(x)
    assert calls == {"rotary_embedding": 1, "rms_norm": 1, "silu_and_mul": 1}


def wanted_config(option: str = "auto", gpus: int = 1, lora: object = None, **model: Any) -> Any:
    """The parts of vLLM's configuration that `wants_layers` reads; dense, NVFP4."""
    fields = {"quantization": "modelopt_fp4", "is_moe": False, "is_hybrid": False, **model}
    kinds = "modelopt_fp4", "modelopt_mixed"
    fields["is_nvfp4_quantized"] = lambda: fields["quantization"] in kinds
    return SimpleNamespace(
        additional_config={"halfbyte": {"elementwise": option}},
        model_config=SimpleNamespace(**fields),
        parallel_config=SimpleNamespace(world_size_across_dp=gpus),
        lora_config=lora,
    )


def test_which_runs_want_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = SimpleNamespace(to_int=lambda: 90)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(layers, "uses_halfbyte", lambda config: True)
    monkeypatch.setattr(layers, "wants_kernels", lambda config, option: True)
    assert layers.wants_layers(wanted_config())
    assert layers.wants_layers(wanted_config(quantization=None))
    assert layers.wants_layers(wanted_config(is_moe=True))
    others = (
        {"gpus": 2},
        {"quantization": "modelopt_mixed"},
        {"is_moe": True, "lora": object()},
        {"is_moe": True, "quantization": None},
        {"is_moe": True, "quantization": "mxfp4"},
        {"is_hybrid": True},
        {"quantization": "fp8"},
    )
    for fields in others:
        assert not layers.wants_layers(wanted_config(**fields))
        assert layers.wants_layers(wanted_config("on", **fields))
    assert not layers.wants_layers(wanted_config("off"))
    assert not layers.wants_layers(VllmConfig(device_config=DeviceConfig("cpu")))
    monkeypatch.setattr(layers, "wants_kernels", lambda config, option: False)
    assert not layers.wants_layers(wanted_config())
    assert not layers.wants_layers(wanted_config(is_moe=True))
    monkeypatch.setattr(layers, "uses_halfbyte", lambda config: False)
    assert not layers.wants_layers(wanted_config("on"))
