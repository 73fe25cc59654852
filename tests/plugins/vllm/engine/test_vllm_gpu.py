"""On a GPU: CUDA graphs, compilation, both model runners, several ranks, against eager."""

import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from checkpoints.mxfp4_folders import make_gpt_oss
from halfbyte.plugins.vllm import attention
from models.zoo import make_model, token_ids
from plugins.vllm.engine.engines import (
    BUNDLED,
    NGRAM,
    TEXTS,
    allow_float32,
    assert_our_experts,
    assert_ours,
    generate,
    halfbyte_tokens,
    metrics,
    outputs_of,
    run_apart,
    tokens_of,
    varied,
)
from plugins.vllm.engine.gpu_engines import (
    GPU,
    assert_alike,
    assert_rings,
    gpu_engine,
    graphs_alone,
    scored,
)
from plugins.vllm.engine.moe_checkpoints import make_nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache_of_a_worker", "model_runner")]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "recipe"),
    [("nvfp4", "plain"), ("nvfp4", "balanced"), ("fp8", "plain"), ("auto", "plain")],
)
def test_graphs_equal_eager_in_float32(kv_cache_dtype: str, recipe: str) -> None:
    """Batches and lengths other than at capture; prompts beside decoding sequences."""
    results = []
    for eager in (True, False):
        options = {**GPU, "enforce_eager": eager, "max_num_batched_tokens": 64}
        options["additional_config"] = {"halfbyte": {"kv_recipe": recipe}}
        with gpu_engine(kv_cache_dtype=kv_cache_dtype, **options) as llm:
            assert_rings(assert_ours(llm), recipe)
            runs = [generate(llm, TEXTS[:n]) for n in (6, 1, 3)]
            mixed = generate(llm, [text * n for n, text in enumerate(TEXTS, 1)])
        results.append([*runs, mixed])
    assert results[0] == results[1]
    assert varied(results[0][0])


@pytest.mark.parametrize(
    ("kv_cache_dtype", "recipe", "mean"),
    [
        ("nvfp4", "plain", 0.2),
        ("nvfp4", "balanced", 0.06),
        ("fp8", "plain", 0.06),
        ("auto", "plain", 0.04),
    ],
)
def test_graphs_in_bfloat16(kv_cache_dtype: str, recipe: str, mean: float) -> None:
    """The decode kernel is CUDA C++. Graphs of the same batch sizes have the bits of eager steps,
    unless compilation rounds elsewhere."""
    results = []
    for more in ({"enforce_eager": True}, graphs_alone(6, 3), {}):
        options: dict[str, Any] = {**GPU, "kv_cache_dtype": kv_cache_dtype, **more}
        with gpu_engine(dtype="bfloat16", kv_recipe=recipe, **options) as llm:
            assert_rings(assert_ours(llm), recipe)
            results.append(scored(llm, TEXTS) + scored(llm, [t * 7 for t in TEXTS[:3]]))
    eager, graphs, compiled = results
    assert graphs == eager
    assert_alike(compiled, eager, mean)


@pytest.fixture(params=[("gpt_oss", 64), ("gemma3_text", 256)], ids=lambda param: param[0])
def sinks_or_windows(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the configuration of a model, of a family and a head size, half of whose layers
    are sliding."""
    family, head_size = request.param
    sizes: dict[str, Any] = {"head_dim": head_size}
    if family == "gpt_oss":
        sizes |= {"hidden_size": 128, "intermediate_size": 128}
    model = make_model(family, **sizes)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # vLLM 0.24 wants one
        shutil.copy(Path(BUNDLED) / name, tmp_path)
    return tmp_path


PROMPTS = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60, 81)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_and_windows_in_graphs(sinks_or_windows: Path, dtype: str) -> None:
    """Triton's kernel in float32, with prompts beside decoding sequences; CUDA C++ in bfloat16,
    where only steps of as many sequences have the same bits."""
    config = AutoConfig.from_pretrained(sinks_or_windows)
    graphs: dict[str, Any] = {"max_num_batched_tokens": 64}
    if dtype == "bfloat16":
        graphs = graphs_alone(5, 3, 1)
    results = []
    for more in ({**graphs, "compilation_config": None, "enforce_eager": True}, graphs):
        options: dict[str, Any] = {**GPU, "dtype": dtype, "load_format": "dummy", **more}
        with gpu_engine(sinks_or_windows, max_model_len=200, **options) as llm:
            impls = assert_ours(llm, "nvfp4")
            assert {impl.sliding_window for impl in impls} == {None, config.sliding_window}
            is_gpt_oss = config.model_type == "gpt_oss"
            assert all((impl.sinks is not None) == is_gpt_oss for impl in impls)
            randomize(llm)
            # Random weights repeat their likeliest token.
            results.append([generate(llm, PROMPTS[:n], 24, temperature=1.0) for n in (5, 1, 3)])
    assert results[0] == results[1]
    assert varied(results[0][0])


@pytest.mark.parametrize(
    "sinks_or_windows",
    [("gpt_oss", 64), ("gemma3_text", 64)],
    ids=lambda param: param[0],
    indirect=True,
)
def test_drafts_with_sinks_and_windows(sinks_or_windows: Path) -> None:
    """1 + 3 query tokens per sequence. Greedy tokens of random weights soon repeat, so that drafts
    from the prompt are accepted: with Gemma's heads of 256 too rarely."""
    skip_without_drafts()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found, accepted = pool.submit(_tokens_of_drafts, sinks_or_windows, True).result()
        assert found == pool.submit(_tokens_of_drafts, sinks_or_windows, False).result()[0]
    assert accepted > 10
    assert len({tuple(tokens) for tokens in found}) == len(found)


def _tokens_of_drafts(folder: Path, drafts: bool) -> tuple[list[list[int]], float]:
    options: dict[str, Any] = {**GPU, "load_format": "dummy", "max_model_len": 200}
    options |= {"speculative_config": NGRAM if drafts else None, "disable_log_stats": False}
    with gpu_engine(folder, **options) as llm:
        assert_ours(llm, "nvfp4")
        randomize(llm)
        tokens = generate(llm, PROMPTS, 100)
        return tokens, metrics(llm).get("vllm:spec_decode_num_accepted_tokens", 0)


@pytest.mark.parametrize("name", ["qwen3-modelopt", "gpt-oss"])
def test_experts_in_graphs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are routed to other experts than at capture."""
    allow_float32(monkeypatch)
    folder, weight_format = make_experts(name, tmp_path)
    prompts = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60)]
    results = []
    for eager in (True, False):
        with gpu_engine(
            folder,
            kv_cache_dtype="auto",
            max_model_len=128,
            skip_tokenizer_init=True,
            additional_config={"halfbyte": {"moe": "on"}},
            **{**GPU, "enforce_eager": eager},
        ) as llm:
            assert_our_experts(llm, "triton", weight_format)
            results.append([generate(llm, prompts[:n], 16) for n in (4, 1, 3)])
    assert results[0] == results[1]
    assert varied(results[0][0])


@pytest.mark.parametrize("name", ["qwen3-modelopt", "gpt-oss"])
def test_cuda_experts_in_graphs_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Without compilation graphs have the bits of eager steps of the same batch sizes."""
    folder, weight_format = make_experts(name, tmp_path)
    prompts = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60)]
    results = []
    for more in ({"enforce_eager": True}, graphs_alone(4, 2, 1)):
        options: dict[str, Any] = {**GPU, "dtype": "bfloat16", "kv_cache_dtype": "auto", **more}
        options |= {"max_model_len": 128, "skip_tokenizer_init": True}
        options["additional_config"] = {"halfbyte": {"moe": "on"}}
        with gpu_engine(folder, **options) as llm:
            assert_our_experts(llm, "cuda", weight_format)
            results.append([generate(llm, prompts[:n], 16) for n in (4, 2, 1)])
    assert results[0] == results[1]
    assert varied(results[0][0])


def make_experts(name: str, folder: Path) -> tuple[Path, str]:
    """A checkpoint with 4-bit experts, and their format."""
    if name == "gpt-oss":
        return make_gpt_oss(folder), "mxfp4"
    return make_nvfp4(folder, "qwen3_moe", "modelopt", "nvfp4-a16"), "nvfp4"


def randomize(llm: Any) -> None:
    """Replace dummy weights by random ones, the same in every engine."""
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.model
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_floating_point() and (parameter.dim() >= 2 or name.endswith("sinks")):
            generator = torch.Generator("cuda").manual_seed(len(name) * 1000 + sum(name.encode()))
            # Experts would outweigh attention, so that all prompts gave the same tokens.
            std = 1.5 if name.endswith("sinks") else 0.02 if ".mlp." in name else 0.15
            parameter.data.normal_(std=std, generator=generator)
        elif parameter.is_floating_point() and "norm" in name:
            parameter.data.fill_(1.0)  # dummy ones are near 0, and so would all logits be


@pytest.mark.parametrize("recipe", ["plain", "balanced"])
def test_drafts_from_the_prompt_in_graphs(recipe: str) -> None:
    """1 + 3 query tokens per sequence."""
    skip_without_drafts()
    with gpu_engine(**GPU, kv_recipe=recipe) as llm:
        assert_rings(assert_ours(llm), recipe)
        expected = generate(llm, TEXTS)
    found, counted = run_apart(TEXTS, **GPU, kv_recipe=recipe, speculative_config=NGRAM)
    assert found == expected
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 10


def skip_without_drafts() -> None:
    is_v2 = os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    if is_v2 and find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is None:
        pytest.skip("this vLLM's model runner V2 takes no drafts from the prompt")


def test_rings_are_filled_before_a_whole_graph() -> None:
    """The prefix cache has all tokens of the prompts but one: a step of single tokens."""
    prompts = [token_ids(n, seed=n).tolist() for n in (81, 17, 145, 33)]
    results = []
    for eager in (True, False):
        options = {**GPU, "enforce_eager": eager, "kv_recipe": "balanced", "block_size": 16}
        with gpu_engine(**options, enable_prefix_caching=True) as llm:
            assert_rings(assert_ours(llm), "balanced")
            first = generate(llm, prompts, 24)
            again = outputs_of(llm, prompts, 24)
            assert [output.num_cached_tokens for output in again] == [80, 16, 144, 32]
            results.append([first, tokens_of(again)])
    assert results[0] == results[1]
    assert varied(results[0][0])


@pytest.mark.parametrize("recipe", ["plain", "balanced"])
def test_equals_halfbyte_s_engine_on_the_same_gpu(recipe: str) -> None:
    expected = halfbyte_tokens(BUNDLED, TEXTS, device="cuda", kv_recipe=recipe)
    with gpu_engine(**GPU, additional_config={"halfbyte": {"kv_recipe": recipe}}) as llm:
        assert_rings(assert_ours(llm), recipe)
        found = generate(llm, TEXTS)
    differ = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    assert len(differ) <= 1


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["plain", "balanced"])
def test_batch_invariance(recipe: str, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's log-probabilities, bit for bit, alone and beside others.

    Without compilation also for any chunks. Engines with other chunk sizes compile other kernels,
    which may round differently.
    """
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # vLLM replaces operators
        engines = pool.submit(_scores_of_batches, recipe, eager).result()
    for together, alone in engines:
        assert together == alone
        # Tokens may repeat, log-probabilities do not.
        assert varied([[next(iter(step.items())) for step in steps] for steps in together])
    if eager:
        assert engines[0] == engines[1]


def _scores_of_batches(recipe: str, eager: bool) -> list[tuple[Any, Any]]:
    """Scores of prompts together and one by one, in engines with large and small chunks."""
    prompts = [token_ids(n, seed=n).tolist() for n in (81, 300, 17, 145, 33)]
    options = {**GPU, "dtype": "bfloat16", "enable_prefix_caching": False, "kv_recipe": recipe}
    results = []
    for budget in (2048, 64):
        options |= {"max_num_batched_tokens": budget, "enforce_eager": eager}
        with gpu_engine(**options) as llm:
            assert_rings(assert_ours(llm), recipe)
            assert attention.batch_invariant()
            together = scored(llm, prompts, 24)
            results.append((together, [scored(llm, [p], 24)[0] for p in prompts]))
    return results


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["TP", "PP"]
)
@pytest.mark.parametrize("recipe", ["plain", "balanced"])
def test_two_gpus_give_the_same_tokens(parallel: dict[str, Any], recipe: str) -> None:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with gpu_engine(**GPU, kv_recipe=recipe) as llm:
        expected = generate(llm, TEXTS)
    found, _ = run_apart(TEXTS, **GPU, **parallel, kv_recipe=recipe, in_process=False)
    assert found == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["TP", "EP"])
@pytest.mark.parametrize("name", ["qwen3-modelopt", "gpt-oss"])
def test_two_gpus_share_experts(
    name: str, expert_parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range of every expert's features on each GPU, or half of the experts."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    allow_float32(monkeypatch)
    folder, weight_format = make_experts(name, tmp_path)
    prompts = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60)]
    options: dict[str, Any] = {
        **GPU,
        "kv_cache_dtype": "auto",
        "max_model_len": 128,
        "skip_tokenizer_init": True,
        "additional_config": {"halfbyte": {"moe": "on"}},
    }
    with gpu_engine(folder, **options) as llm:
        assert_our_experts(llm, "triton", weight_format)
        expected = generate(llm, prompts, 16)
    options |= {"tensor_parallel_size": 2, "enable_expert_parallel": expert_parallel}
    found, _ = run_apart(
        prompts, in_process=False, max_tokens=16, experts=True, model=str(folder), **options
    )
    assert found == expected
    assert varied(expected)
