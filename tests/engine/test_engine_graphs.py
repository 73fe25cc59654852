"""Decode steps as CUDA graphs: the same tokens as without."""

import logging
from typing import Any

import pytest
import torch

from halfbyte.assets import bundled_model_path
from halfbyte.engine import LLM, SamplingParams
from halfbyte.engine.graphs import graph_sizes
from models.zoo import make_model


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_graph_sizes_end_at_the_largest_batch(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


PROMPTS = ["import os\n", "class A:\n    def __init__(self", "def main():", "x = 1", "for i in"]


def texts(cuda_graphs: bool, **options: Any) -> tuple[list[str], LLM]:
    llm = LLM(
        bundled_model_path(),
        device="cuda",
        cuda_graphs=cuda_graphs,
        torch_compile=False,  # rounds differently
        **options,
    )
    # Lengths differ, so that the batch shrinks as requests end.
    params = [
        SamplingParams(temperature=0.0, max_tokens=20 + 30 * i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    return [output.text for output in llm.generate(PROMPTS, params)], llm


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("kv_cache_dtype", "kv_recipe"),
    [("nvfp4", "plain"), ("nvfp4", "balanced"), ("bfloat16", "plain")],
)
def test_graphs_give_the_tokens_of_eager_steps(
    kv_cache_dtype: str, kv_recipe: str, batch_invariant: bool
) -> None:
    options: dict[str, Any] = {
        "kv_cache_dtype": kv_cache_dtype,
        "kv_recipe": kv_recipe,
        "batch_invariant": batch_invariant,
        "max_num_seqs": 8,
    }
    with_graphs, llm = texts(True, **options)
    without, _ = texts(False, **options)
    assert llm.core.runner.graphs is not None
    assert llm.core.runner.graphs._graphs.keys() == {1, 2, 4, 8}
    # Other batch sizes round differently, so texts may diverge late; they must begin alike.
    for a, b in zip(with_graphs, without, strict=True):
        assert a[:40] == b[:40]


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "qwen3"])
def test_graphs_on_hybrid_models_with_a_pool_that_preempts(architecture: str) -> None:
    prompts = [[i + 1, 2 * i + 1, 5] * (4 + i) for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    outputs = []
    for cuda_graphs in (True, False):
        model = make_model(architecture).cuda()
        llm = LLM(
            model,
            kv_cache_dtype="bfloat16",
            cuda_graphs=cuda_graphs,
            torch_compile=False,
            max_num_seqs=6,
            num_pages=30,
            max_model_len=128,
        )
        outputs.append([output.token_ids for output in llm.generate(prompts, params)])
        if cuda_graphs:
            assert llm.core.runner.graphs is not None
            assert llm.core.runner.graphs._graphs
    assert [tokens[:20] for tokens in outputs[0]] == [tokens[:20] for tokens in outputs[1]]


@pytest.mark.gpu
def test_a_model_that_cannot_be_captured_runs_without_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model("llama").cuda()
    layer = model.model.layers[0]
    forward = layer.forward

    def asks_the_gpu(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert not bool(hidden.isnan().any())
        return forward(hidden, *args, **kwargs)

    layer.forward = asks_the_gpu
    llm = LLM(model, kv_cache_dtype="nvfp4")
    with caplog.at_level(logging.WARNING):
        outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [6, 6]
    assert caplog.text.count("decoding without CUDA graphs") == 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(3, device="cuda").unique().numel() == 3  # random numbers still come
