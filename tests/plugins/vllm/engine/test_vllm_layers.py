"""vLLM's norms, activation and rotary embedding by `halfbyte.elementwise`."""

from collections import Counter
from typing import Any

import pytest

from halfbyte.plugins.vllm import layers
from plugins.vllm.engine.engines import TEXTS, vllm_engine
from plugins.vllm.engine.test_vllm_gpu import assert_alike, scored

# As torch.compile has it: layers in PyTorch instead of vLLM's own kernels.
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "compilation_config": {"custom_ops": ["none"]}}
OPERATORS = ("add_rms_norm", "rms_norm", "rotary_embedding", "silu_and_mul")


def test_layers_use_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for name in OPERATORS:
        operator = getattr(layers, name)

        def counted(*arguments: Any, name: str = name, operator: Any = operator) -> Any:
            calls[name] += 1
            return operator(*arguments)

        monkeypatch.setattr(layers, name, counted)
    with vllm_engine(**OPTIONS) as llm:
        expected = scored(llm, TEXTS)
    assert not calls
    monkeypatch.setattr(layers, "wants_layers", lambda config: True)
    monkeypatch.setattr(layers, "_MIN_NORM", 64)
    with vllm_engine(**OPTIONS) as llm:
        found = scored(llm, TEXTS)
    assert set(calls) == set(OPERATORS), calls
    assert_alike(found, expected, 0.2)
