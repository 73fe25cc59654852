"""The pass that joins norms of heads with the rotary embedding behind them."""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from vllm.config import CompilationMode, VllmConfig

from halfbyte.elementwise import qk_norm_rotary_embedding, rms_norm, rotary, rotary_embedding
from halfbyte.plugins.vllm import compilation, layers
from halfbyte.plugins.vllm.fusions import Fusions
from halfbyte.plugins.vllm.head_norm_pass import FuseHeadNorms
from plugins.vllm.engine.engines import TEXTS
from plugins.vllm.engine.gpu_engines import GPU, assert_alike, gpu_engine, scored

OPERATORS = torch.ops.halfbyte
NORM = OPERATORS.rms_norm.default
ROTARY = OPERATORS.rotary_embedding.default
FUSED = OPERATORS.qk_norm_rotary_embedding.default
HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 16, 5
Function = Callable[..., Any]


class Recording(FuseHeadNorms):
    """Notes the operators of halfbyte's in the graphs that it has changed."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def uuid(self) -> str:
        return str(id(self))

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        graph.lint()
        ours = (NORM, ROTARY, FUSED)
        self.found += [node.target for node in graph.nodes if node.target in ours]


def tensors() -> tuple[torch.Tensor, ...]:
    """Positions, q, k and v as a layer has them, weights of both norms, and the table."""
    torch.manual_seed(0)
    angles = torch.rand(20, SIZE // 2) * 10
    return (
        torch.arange(TOKENS) + 3,
        torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE),
        *torch.randn(2, SIZE),
        torch.cat([angles.cos(), angles.sin()], dim=1),
    )


def split(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return qkv.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1)


def by_head(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """As vLLM's Qwen3 does it."""
    heads = x.view(*x.shape[:-1], x.shape[-1] // SIZE, SIZE)
    result: torch.Tensor = rms_norm(heads, weight, epsilon)
    return result.view(x.shape)


def attention(positions: Any, qkv: Any, q_weight: Any, k_weight: Any, table: Any) -> Any:
    q, k, v = split(qkv * 2)
    q, k = by_head(q, q_weight), by_head(k, k_weight)
    return *rotary_embedding(positions, q, k, table, SIZE, False), v


def used_twice(positions: Any, qkv: Any, q_weight: Any, k_weight: Any, table: Any) -> Any:
    q, k, _ = split(qkv * 2)
    q, k = by_head(q, q_weight), by_head(k, k_weight)
    return *rotary_embedding(positions, q, k, table, SIZE, False), k + 1


def two_epsilons(positions: Any, qkv: Any, q_weight: Any, k_weight: Any, table: Any) -> Any:
    q, k, _ = split(qkv * 2)
    q, k = by_head(q, q_weight), by_head(k, k_weight, 1e-5)
    return rotary_embedding(positions, q, k, table, SIZE, False)


def query_only(positions: Any, qkv: Any, q_weight: Any, k_weight: Any, table: Any) -> Any:
    q, k, _ = split(qkv * 2)
    return rotary_embedding(positions, by_head(q, q_weight), k, table, SIZE, False)


def whole_rows(positions: Any, qkv: Any, q_weight: Any, k_weight: Any, table: Any) -> Any:
    q, k, _ = split(qkv * 2)
    q = rms_norm(q, q_weight.repeat(HEADS), 1e-6)
    k = rms_norm(k, k_weight.repeat(KV_HEADS), 1e-6)
    return rotary_embedding(positions, q, k, table, SIZE, False)


def other_shape(positions: Any, qkv: Any, q_weight: Any, k_weight: Any, table: Any) -> Any:
    """Heads become tokens behind the norm."""
    q, k, _ = split(qkv * 2)
    heads = (
        rms_norm(x.view(TOKENS, -1, SIZE), weight, 1e-6).reshape(TOKENS * KV_HEADS, -1)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return rotary_embedding(positions.repeat(KV_HEADS), *heads, table, SIZE, False)


def changed_weight(positions: Any, qkv: Any, q_weight: Any, k_weight: Any, table: Any) -> Any:
    """The kernel reads weights before the previous one has ended, which may have written them."""
    return attention(positions, qkv, q_weight + 1, k_weight, table)[:2]


def changed_table(positions: Any, qkv: Any, q_weight: Any, k_weight: Any, table: Any) -> Any:
    return attention(positions, qkv, q_weight, k_weight, table * 2)[:2]


def compiled(function: Function, dynamic: bool) -> tuple[list[Any], Any]:
    """What a graph calls, and its results."""
    torch._dynamo.reset()
    recording = Recording()
    options: dict[str, Any] = {"post_grad_custom_post_pass": recording}
    call = torch.compile(function, fullgraph=True, dynamic=dynamic, options=options)
    return recording.found, call(*tensors())


@pytest.mark.parametrize("dynamic", [False, True])
def test_norms_and_rotary_embedding_become_one_operator(dynamic: bool) -> None:
    targets, results = compiled(attention, dynamic)
    assert targets == [FUSED]
    for found, expected in zip(results, attention(*tensors()), strict=True):
        assert torch.equal(found, expected)


class Layer(torch.nn.Module):
    """As vLLM's layers have their tensors."""

    def __init__(self) -> None:
        super().__init__()
        _, _, q_weight, k_weight, table = tensors()
        self.q_norm = torch.nn.Parameter(q_weight, requires_grad=False)
        self.k_norm = torch.nn.Parameter(k_weight, requires_grad=False)
        self.register_buffer("table", table)

    def forward(self, positions: torch.Tensor, qkv: torch.Tensor) -> Any:
        return attention(positions, qkv, self.q_norm.data, self.k_norm.data, self.table)


@torch.no_grad()
def test_parameters_and_buffers_are_inputs_of_a_graph() -> None:
    torch._dynamo.reset()
    recording = Recording()
    options: dict[str, Any] = {"post_grad_custom_post_pass": recording}
    results = torch.compile(Layer(), fullgraph=True, options=options)(*tensors()[:2])
    assert recording.found == [FUSED]
    for found, expected in zip(results, attention(*tensors()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("function", "norms"),
    [
        (used_twice, 2),
        (two_epsilons, 2),
        (query_only, 1),
        (whole_rows, 2),
        (other_shape, 2),
        (changed_weight, 2),
        (changed_table, 2),
    ],
)
def test_other_graphs_stay(function: Function, norms: int) -> None:
    targets, results = compiled(function, False)
    assert targets == [*[NORM] * norms, ROTARY]
    for found, expected in zip(results, function(*tensors()), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_operator_takes_parts_of_rows() -> None:
    positions, qkv, q_weight, k_weight, table = tensors()
    q, k, _ = split(qkv * 2)
    found = qk_norm_rotary_embedding(positions, q, k, q_weight, k_weight, 1e-6, table, SIZE, False)
    for out, expected in zip(found, attention(*tensors())[:2], strict=True):
        assert torch.equal(out, expected)


def config_of(model_type: str, **options: Any) -> Any:
    """vLLM's configuration of a model without weights, compiled by vLLM."""
    config = VllmConfig()
    text_config = SimpleNamespace(model_type=model_type)
    config.model_config = SimpleNamespace(hf_text_config=text_config)
    fields = {"mode": CompilationMode.VLLM_COMPILE, "backend": "inductor", "custom_ops": ["none"]}
    for name, value in {**fields, **options}.items():
        setattr(config.compilation_config, name, value)
    return config


def found_pass(config: Any) -> Any:
    compilation.fuse_operators(config)
    return config.compilation_config.inductor_compile_config.get(layers.FUSIONS)


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs want the kernels, but not those of linear layers."""
    monkeypatch.setattr(compilation, "uses_halfbyte", lambda config: True)
    monkeypatch.setattr(compilation, "wants_kernels", lambda config, option: False)
    for module in (layers, compilation):
        monkeypatch.setattr(module, "wants_layers", lambda config: True)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "llama"])
def test_models_that_get_the_pass(model_type: str, wanted: None) -> None:
    config = config_of(model_type)
    found = found_pass(config)
    joins = model_type != "llama"
    assert isinstance(found, Fusions) == joins
    if joins:
        assert [type(part) for part in found.passes] == [FuseHeadNorms]
        assert pickle.loads(pickle.dumps(found)).uuid() == Fusions(False, True).uuid()
        assert found.uuid() != Fusions(True, True).uuid() != Fusions(True, False).uuid()
    assert layers._model_of(config).joins_head_norms == joins


@pytest.mark.parametrize(
    "options",
    [
        {"mode": CompilationMode.NONE},
        {"mode": CompilationMode.STOCK_TORCH_COMPILE},
        {"backend": "eager"},
        {"custom_ops": ["all"]},
        {"custom_ops": ["none", "+rotary_embedding"]},
        {"custom_ops": ["none", "+rms_norm"]},
        {"pass_config": SimpleNamespace(enable_qk_norm_rope_fusion=True)},
    ],
    ids=str,
)
def test_runs_that_vllm_does_not_compile_so(options: dict[str, Any], wanted: None) -> None:
    config = config_of("qwen3", **options)
    assert found_pass(config) is None
    assert not layers._model_of(config).joins_head_norms


@pytest.mark.gpu
def test_vllms_graphs_have_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model is a Qwen3."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("an SM90")
    normalized: list[bool] = []
    rotate = rotary.rotate

    def noted(*arguments: Any) -> Any:
        normalized.append(len(arguments) > 6)
        return rotate(*arguments)

    monkeypatch.setattr(rotary, "rotate", noted)
    with gpu_engine(dtype="bfloat16", **GPU) as llm:
        found = scored(llm, TEXTS)
    assert normalized
    assert all(normalized)
    normalized.clear()
    off = {"halfbyte": {"elementwise": "off"}}
    with gpu_engine(dtype="bfloat16", additional_config=off, **GPU) as llm:
        expected = scored(llm, TEXTS)
    assert not normalized
    assert_alike(found, expected, 0.2)
