"""Compiled layers: the tokens of eager ones, and one compilation per kind of layer."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo import lookup_backend

from halfbyte.engine import LLM, SamplingParams, compiled
from halfbyte.engine.compiled import CompiledLayers, decoder_layers
from halfbyte.engine.graphs import DecodeGraphs
from halfbyte.kernels.runtime.inductor import OVERLAP
from halfbyte.linear import NvFp4Linear
from models.zoo import ALL_EXPERTS, ARCHITECTURES, make_model
from slow import slow

PROMPTS = [[i + 1, 2 * i + 1, 5] * (4 + i) for i in range(6)]
# Lengths differ, so that batches of all sizes decode.
PARAMS = [SamplingParams(temperature=0.0, max_tokens=3 + 2 * i, ignore_eos=True) for i in range(6)]
KINDS = {"gemma2": 2, "gemma3_text": 2, "gpt_oss": 2}
"""Kinds of layers: with a window and without."""
EXPERTS = ("gpt_oss", "qwen3_moe")
"""Models whose float32 experts may use a backend that graphs cannot capture."""


class Counting:
    """A backend of `torch.compile` that counts its compilations."""

    def __init__(self, backend: str) -> None:
        self.count, self._backend = 0, lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        self.count += 1
        function: Callable[..., Any] = self._backend(graph, inputs, **options)
        return function


def stable_model(architecture: str) -> Any:
    """Whose experts rounding does not change."""
    overrides: dict[str, Any] = ALL_EXPERTS.get(architecture, {})
    return make_model(architecture, **overrides)


def make_llm(architecture: str) -> LLM:
    return LLM(stable_model(architecture), kv_recipe="plain", max_num_seqs=6, max_model_len=64)


def generate(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("architecture", "compiler"),
    [
        ("llama", "aot_eager"),
        slow("qwen3", "eager"),
        slow("gemma2", "eager"),
        slow("gemma3_text", "aot_eager"),
        ("gpt_oss", "eager"),
    ],
)
def test_compiled_layers_give_the_tokens_of_eager_ones(architecture: str, compiler: str) -> None:
    """Prompts as well, whose numbers of tokens need no compilation of their own either."""
    llm = make_llm(architecture)
    expected = generate(llm)
    backend = Counting(compiler)
    layers = CompiledLayers(llm.model, backend)
    with layers.in_use():
        assert generate(llm) == expected
    # One for batches of 1, and one for all others.
    assert backend.count == 2 * KINDS.get(architecture, 1)
    with layers.in_use():
        assert generate(llm) == expected
    assert backend.count == 2 * KINDS.get(architecture, 1)
    assert generate(llm) == expected  # eager again


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_inductor_gives_the_tokens_of_eager_layers(architecture: str) -> None:
    llm = make_llm(architecture)
    expected = generate(llm)
    with CompiledLayers(llm.model).in_use():
        assert generate(llm) == expected


def test_layers_with_other_weights_and_rings_share_a_graph() -> None:
    """NVFP4 layers, whose scales differ, on the default recipe."""
    model = make_model("llama")
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parent, _, child = name.rpartition(".")
            layer = NvFp4Linear.from_float(module)
            layer.process_weights_after_loading()
            setattr(model.get_submodule(parent), child, layer)
    llm = LLM(model, kv_recipe="balanced", max_num_seqs=6, max_model_len=64)
    expected = generate(llm)
    backend = Counting("eager")
    with CompiledLayers(model, backend).in_use():
        assert generate(llm) == expected
    assert backend.count == 2


def test_every_model_has_graphs_of_its_own() -> None:
    """Dynamo stops compiling a function after a number of graphs; models do not share the limit."""
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            model = make_model("llama", num_hidden_layers=1)
            llm = LLM(model, kv_recipe="plain", max_num_seqs=1, max_model_len=64)
            backend = Counting("eager")
            with CompiledLayers(model, backend).in_use():
                llm.generate([[1]], params)
            assert backend.count == 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeGraphs]:
    """Of a sequence of three tokens, on the CPU, where steps run but cannot be captured."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    llm = make_llm("llama")
    tables = llm.core.tables
    found = DecodeGraphs(llm.model, tables, llm.core.runner.quantization, 4, 64)
    tables.add("a")
    tables.append("a", 3)
    found._fill([("a", [7])])
    with llm.core.runner.attached(), torch.inference_mode():
        yield found


def test_a_step_of_graphs_runs_compiled(graphs: DecodeGraphs) -> None:
    expected = graphs._forward(4)[:1]
    backend = Counting("eager")
    graphs.compiled = CompiledLayers(graphs.model, backend)
    graphs._try_compiled(4)
    torch.testing.assert_close(graphs._forward(4)[:1], expected)
    assert graphs.compiled is not None
    assert backend.count == 1
    assert graphs.num_captures == len(graphs.sizes) + 1


@pytest.mark.parametrize("reason", ["no layers", "a graph break"])
def test_a_step_of_graphs_runs_as_it_is_after_an_error(
    reason: str,
    graphs: DecodeGraphs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = graphs._forward(4)[:1]
    if reason == "no layers":
        graphs.compiled = CompiledLayers(torch.nn.Linear(2, 2), "eager")
    else:
        norm = graphs.model.model.layers[1].input_layernorm
        forward = norm.forward

        def breaks_the_graph(hidden: torch.Tensor) -> Any:
            torch._dynamo.graph_break()
            return forward(hidden)

        monkeypatch.setattr(norm, "forward", breaks_the_graph)
        graphs.compiled = CompiledLayers(graphs.model, "eager")
    for _ in range(2):
        graphs._try_compiled(4)
    assert graphs.compiled is None
    ours = "halfbyte.engine.graphs"
    (message,) = [record.getMessage() for record in caplog.records if record.name == ours]
    assert message.startswith("decoding without torch.compile: ")
    assert "\n" not in message
    torch.testing.assert_close(graphs._forward(4)[:1], expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_and_their_attention_are_found(architecture: str) -> None:
    model = make_model(architecture)
    found = decoder_layers(model)
    assert [layer for layer, _ in found] == list(model.model.layers)
    assert [attention.layer_idx for _, attention in found] == [0, 1, 2, 3]


def test_a_model_without_layers_is_an_error_and_stays_as_it_is() -> None:
    with (
        pytest.raises(ValueError, match="Sequential: found no list of layers"),
        CompiledLayers(torch.nn.Sequential(torch.nn.Linear(2, 2))).in_use(),
    ):
        pass
    model = make_model("llama")
    with pytest.raises(KeyError), CompiledLayers(model, "eager").in_use():
        raise KeyError
    assert all(layer._compiled_call_impl is None for layer, _ in decoder_layers(model))


@pytest.mark.parametrize(
    ("architecture", "capability", "expected"),
    [("llama", 90, {OVERLAP: True}), ("llama", 80, None), ("qwen3_moe", 90, None)],
)
def test_launches_of_dense_models_overlap_on_hopper(
    architecture: str, capability: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compute_capability_of", lambda device: capability)
    assert compiled._inductor_options(make_model(architecture)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3_text", *EXPERTS])
def test_compiled_graphs_give_the_tokens_of_eager_ones(architecture: str) -> None:
    torch._dynamo.utils.counters.clear()
    tokens = []
    for torch_compile in (True, False):
        model = stable_model(architecture).cuda()
        llm = LLM(
            model,
            kv_cache_dtype="float32",
            max_num_seqs=6,
            max_model_len=64,
            torch_compile=torch_compile,
        )
        graphs = llm.core.runner.graphs
        assert graphs is not None
        counts = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        tokens.append(generate(llm))
        # Captured at start-up: no request compiles.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counts
        if architecture not in EXPERTS:
            assert (graphs.compiled is not None) == torch_compile  # and there was no error
            assert graphs._graphs.keys() == set(graphs.sizes)
            assert counts == 2 * KINDS.get(architecture, 1)
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
def test_no_compilation_without_graphs_or_if_batch_invariant() -> None:
    off: list[dict[str, Any]] = [{"enforce_eager": True}, {"cuda_graphs": False}]
    for options in [*off, {"batch_invariant": True}, {"torch_compile": False}]:
        llm = LLM(make_model("llama").cuda(), max_model_len=64, max_num_seqs=2, **options)
        graphs = llm.core.runner.graphs
        assert (graphs is None) == any(x.items() <= options.items() for x in off)
        assert graphs is None or graphs.compiled is None


@pytest.mark.gpu
def test_layers_that_cannot_be_compiled_run_uncompiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model("llama").cuda()
    layer = model.model.layers[1]
    forward = layer.forward

    def breaks_the_graph(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(hidden, *args, **kwargs)

    layer.forward = breaks_the_graph
    with caplog.at_level(logging.WARNING):
        llm = LLM(model, max_num_seqs=2, max_model_len=64, torch_compile=True)
        llm.generate(PROMPTS, PARAMS)
    assert caplog.text.count("decoding without torch.compile") == 1
    assert llm.core.runner.graphs is not None
    assert llm.core.runner.graphs._graphs.keys() == {1, 2}
