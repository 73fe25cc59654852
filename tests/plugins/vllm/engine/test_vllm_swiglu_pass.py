"""The pass that joins SwiGLU with the NVFP4 layer in front of it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from vllm.config import VllmConfig

from halfbyte.linear.w4a16 import swiglu
from halfbyte.plugins.vllm import compilation
from halfbyte.plugins.vllm.fusions import Fusions
from halfbyte.plugins.vllm.swiglu_pass import FuseSwiGLU
from plugins.vllm.engine.engines import TEXTS
from plugins.vllm.engine.gpu_engines import GPU, assert_alike, gpu_engine, scored
from plugins.vllm.engine.test_vllm_weights import quantized

LINEAR = torch.ops.halfbyte.nvfp4_linear_cuda.default
ACTIVATION = torch.ops.halfbyte.silu_and_mul.default
FUSED = torch.ops.halfbyte.nvfp4_linear_swiglu_cuda.default


def graph_of(batch_invariant: bool = False, used_twice: bool = False) -> fx.Graph:
    """A layer of 256 rows, its activation, and perhaps another use of its result."""
    graph = fx.Graph()
    tensors = [graph.placeholder(name) for name in ("x", "weight", "weight_scale", "row_scale")]
    layer = graph.call_function(LINEAR, (*tensors, None, 256, batch_invariant))
    result = graph.call_function(ACTIVATION, (layer,))
    result.meta["val"] = "what the graph knows of it"
    graph.output((result, layer) if used_twice else result)
    return graph


def targets(graph: fx.Graph) -> list[Any]:
    graph.lint()
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_layer_and_its_activation_become_one_operator() -> None:
    graph = graph_of()
    FuseSwiGLU()(graph)
    assert targets(graph) == [FUSED]
    (fused,) = graph.find_nodes(op="call_function", target=FUSED)
    assert [getattr(a, "name", a) for a in fused.args] == [
        "x",
        "weight",
        "weight_scale",
        "row_scale",
        None,
        128,
    ]
    assert fused.meta["val"] == "what the graph knows of it"
    assert fused.args[-1] == 256 // 2


def test_inductor_compiles_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Inductor's graphs nodes know the arguments that they were traced with, too."""

    def step(x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        layer = torch.ops.halfbyte.nvfp4_linear_cuda(x * 2, *weight, None, 256, False)
        result: torch.Tensor = torch.ops.halfbyte.silu_and_mul(layer) + 1
        return result

    seen: list[Any] = []

    def product(shape: torch.Size, n: int, *more: Any) -> Any:
        def call(x: torch.Tensor, *weight: Any) -> torch.Tensor:
            seen.append((x, weight))
            return x.new_full((len(x), n), 3)

        return call

    monkeypatch.setattr(swiglu, "_product", product)
    options: dict[str, Any] = {"post_grad_custom_post_pass": FuseSwiGLU()}
    weight = [torch.zeros(4, 4, dtype=torch.int32) for _ in range(2)] + [torch.ones(256)]
    torch._dynamo.reset()
    out = torch.compile(step, fullgraph=True, options=options)(torch.ones(5, 64), *weight)
    assert torch.equal(out, torch.full((5, 128), 4.0))
    ((x, given),) = seen
    assert torch.equal(x, torch.full((5, 64), 2.0))
    assert [a is not None for a in given] == [True, True, True, False]


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"used_twice": True}], ids=str)
def test_other_uses_stay(options: dict[str, bool]) -> None:
    graph = graph_of(**options)
    FuseSwiGLU()(graph)
    assert targets(graph) == [LINEAR, ACTIVATION]


def test_named_arguments_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(ACTIVATION, (), {"x": x}))
    FuseSwiGLU()(graph)
    assert targets(graph) == [ACTIVATION]


def test_an_activation_of_something_else_stays() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    double = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.output(
        (graph.call_function(ACTIVATION, (x,)), graph.call_function(ACTIVATION, (double,)))
    )
    before = targets(graph)
    FuseSwiGLU()(graph)
    assert targets(graph) == before


def test_runs_with_both_kernels_get_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ("uses_halfbyte", "wants_layers", "wants_kernels")
    key = "post_grad_custom_post_pass"
    for missing in (None, *wanted):
        for name in wanted:
            answer = name != missing
            monkeypatch.setattr(compilation, name, lambda *arguments, answer=answer: answer)
        config = VllmConfig()
        compilation.fuse_operators(config)
        options = config.compilation_config.inductor_compile_config
        found = options.get(key)
        assert isinstance(found, Fusions) == (missing is None)
        if missing is None:
            assert [type(part) for part in found.passes] == [FuseSwiGLU]
            assert pickle.loads(pickle.dumps(found)).uuid() == Fusions(True, False).uuid()
            config.compute_hash()  # vLLM's cache of graphs asks for it


def test_a_pass_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uses_halfbyte", "wants_layers", "wants_kernels"):
        monkeypatch.setattr(compilation, name, lambda *arguments: True)
    config, own = VllmConfig(), FuseSwiGLU()
    options = config.compilation_config.inductor_compile_config
    options["post_grad_custom_post_pass"] = own
    compilation.fuse_operators(config)
    assert options["post_grad_custom_post_pass"] is own


@pytest.mark.gpu
def test_vllms_graphs_have_the_operator(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("an SM90")
    folder = quantized(tmp_path, "modelopt", activations=False)
    swiglu._product.cache_clear()
    with gpu_engine(folder, dtype="bfloat16", **GPU) as llm:
        found = scored(llm, TEXTS)
    assert swiglu._product.cache_info().currsize
    swiglu._product.cache_clear()
    off = {"halfbyte": {"elementwise": "off"}}
    with gpu_engine(folder, dtype="bfloat16", additional_config=off, **GPU) as llm:
        expected = scored(llm, TEXTS)
    assert not swiglu._product.cache_info().currsize
    assert_alike(found, expected, 0.2)
