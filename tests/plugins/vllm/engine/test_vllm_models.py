"""Small random models (hybrid, sinks, soft-caps), against `halfbyte.LLM` and vLLM's attention."""

from pathlib import Path
from typing import Any

import pytest

import halfbyte
from halfbyte.layouts import KVCacheDType
from models.zoo import make_model, token_ids
from plugins.vllm.engine.engines import (
    BUNDLED,
    CACHE_BYTES,
    NGRAM,
    TEXTS,
    assert_ours,
    assert_same_tokens,
    generate,
    halfbyte_tokens,
    layers_of,
    needs_page_specs,
    run_apart,
    varied,
    vllm_engine,
)

# Some prompts are longer than every window.
PROMPTS = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60, 81)]
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True},
    # vLLM's CPU kernels take hidden and expert sizes in multiples of 32.
    "gpt_oss": {"head_dim": 64, "intermediate_size": 128, "hidden_size": 128},
}


@pytest.fixture(
    scope="module",
    params=[
        "gemma3_text",
        "gemma2",
        # 0.24 does not load unquantized experts of GPT-OSS.
        pytest.param("gpt_oss", marks=needs_page_specs),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a random model whose greedy tokens vary."""
    folder = tmp_path_factory.mktemp(request.param)
    save_varied(make_model(request.param, **OVERRIDES.get(request.param, {})), folder)
    return folder


def save_varied(model: Any, folder: Path) -> None:
    """Save a random model."""
    if model.config.tie_word_embeddings:  # small ones, or every token would follow itself
        model.get_input_embeddings().weight.data.mul_(0.03)
    model.save_pretrained(folder)


SMALL: dict[str, Any] = {"max_model_len": 200, "block_size": 16, "skip_tokenizer_init": True}


def engine(folder: Path, **options: Any) -> Any:
    return vllm_engine(folder, **{**SMALL, **options})


def calibrate(folder: Path) -> None:
    from typer.testing import CliRunner

    from halfbyte.cli import app

    result = CliRunner().invoke(app, ["calibrate", str(folder), "--device", "cpu"])
    assert result.exit_code == 0, result.output


def test_unquantized_equals_vllm_s_own_attention(model: Path) -> None:
    with engine(model, kv_cache_dtype="auto") as llm:
        assert_ours(llm, "float32")
        found = generate(llm, PROMPTS, 24)
    expected = halfbyte_tokens(model, PROMPTS, 24, kv_cache_dtype="float32")
    assert_same_tokens(found, expected, PROMPTS, model, kv_cache_dtype="float32")
    with engine(model, kv_cache_dtype="auto", attention_backend=None) as llm:
        assert generate(llm, PROMPTS, 24) == found


def test_nvfp4_equals_halfbyte_s_engine(model: Path) -> None:
    calibrate(model)
    expected = halfbyte_tokens(model, PROMPTS, 24)
    with engine(model) as llm:
        assert_ours(llm, "nvfp4")
        windows = {layer.impl.sliding_window for layer in layers_of(llm).values()}
        assert len(windows) == 2
        found = generate(llm, PROMPTS, 24)
    assert_same_tokens(found, expected, PROMPTS, model)
    with engine(model, max_num_batched_tokens=64, max_num_seqs=5) as llm:
        assert generate(llm, PROMPTS, 24) == found


# 0.24's own sampler for drafts takes other arguments on CPUs.
@needs_page_specs
def test_drafts_from_the_prompt_change_no_token(model: Path) -> None:
    """Windows, sinks and soft-caps with 1 + 3 query tokens per sequence."""
    calibrate(model)
    prompts = [prompt * 2 for prompt in PROMPTS]
    with engine(model) as llm:
        expected = generate(llm, prompts, 24)
    options = {**SMALL, "speculative_config": NGRAM, "max_tokens": 24}
    found, counted = run_apart(prompts, model=str(model), **options)
    assert found == expected
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 0


@needs_page_specs
def test_sliding_layers_may_stay_unquantized(model: Path) -> None:
    calibrate(model)
    formats = {"full_attention": "nvfp4", "sliding_attention": "float32"}
    expected = halfbyte_tokens(model, PROMPTS, 24, kv_cache_dtype=formats)
    with engine(model, kv_cache_dtype_skip_layers=["sliding_window"]) as llm:
        impls = [layer.impl for layer in layers_of(llm).values()]
        kinds = {impl.sliding_window is None: impl.format.k for impl in impls}
        assert kinds == {True: "nvfp4", False: "float32"}
        found = generate(llm, PROMPTS, 24)
    assert_same_tokens(found, expected, PROMPTS, model, kv_cache_dtype=formats)


@needs_page_specs
@pytest.mark.parametrize(
    ("k", "v"), [("fp8", "nvfp4"), ("mxfp4", "fp4_block16"), ("bfloat16", "nvfp4_4over6")]
)
def test_k_and_v_of_different_formats(k: str, v: str) -> None:
    formats: dict[str, Any] = {"kv_cache_dtype": k, "v_cache_dtype": v}
    expected = halfbyte_tokens(BUNDLED, TEXTS, **formats)
    options = {"halfbyte": {"k_dtype": k, "v_dtype": v}}
    with vllm_engine(additional_config=options, block_size=16) as llm:
        impl = next(iter(layers_of(llm).values())).impl
        assert (impl.format.k, impl.format.v) == (KVCacheDType.parse(k), v)
        found = generate(llm, TEXTS)
        page_bytes = impl.format.layout(64, 64, impl.num_kv_heads, 16).page_bytes
        num_layers = len(layers_of(llm))
        assert capacity(llm) // 16 == CACHE_BYTES // (page_bytes * num_layers)
    assert_same_tokens(found, expected, TEXTS, BUNDLED, **formats)


@needs_page_specs
def test_layers_skipped_by_index_stay_unquantized() -> None:
    with vllm_engine(kv_cache_dtype_skip_layers=["0", "2"]) as llm:
        found = [layer.impl.format.k for layer in layers_of(llm).values()]
        assert found == ["float32", "nvfp4", "float32", *["nvfp4"] * (len(found) - 3)]
        assert varied(generate(llm, TEXTS, 16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8_e4m3"])
def test_every_name_of_a_dtype(dtype: str) -> None:
    """vLLM's CPU backend stores 16 bits only in the model's own dtype."""
    own = "bfloat16" if dtype == "fp8_e4m3" else dtype
    with vllm_engine(dtype=own, kv_cache_dtype=dtype) as llm:
        assert_ours(llm, dtype)
        found = generate(llm, TEXTS[:3], 8)
    expected = halfbyte.LLM(BUNDLED, dtype=own, kv_cache_dtype=dtype)
    params = halfbyte.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    outputs = expected.generate(list(TEXTS[:3]), params)
    # 16 bits round differently, but the first tokens are not that close.
    assert [tokens[0] for tokens in found] == [output.token_ids[0] for output in outputs]


@pytest.mark.parametrize(("head_size", "kv_heads"), [(48, 2), (112, 1), (64, 4)])
def test_head_sizes_and_groups(head_size: int, kv_heads: int, tmp_path: Path) -> None:
    """GQA, MQA and a KV head for each query head; sizes that are no powers of two."""
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    save_varied(make_model("gemma3_text", head_dim=head_size, **sizes), tmp_path)
    calibrate(tmp_path)
    expected = halfbyte_tokens(tmp_path, PROMPTS, 24)
    with engine(tmp_path) as llm:
        impls = assert_ours(llm, "nvfp4")
        assert {(impl.head_size, impl.num_kv_heads) for impl in impls} == {(head_size, kv_heads)}
        found = generate(llm, PROMPTS, 24)
    assert_same_tokens(found, expected, PROMPTS, tmp_path)


def capacity(llm: Any) -> int:
    """Tokens that the cache holds, by vLLM's count."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)


def max_running(llm: Any, prompts: list[list[int]]) -> int:
    """Max concurrent requests that vLLM has pages for."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    most = 0
    for _ in range(6):  # two for all prompts, and none of them ends
        llm.llm_engine.step()
        most = max(most, len(scheduler.running))
    llm.llm_engine.abort_request([str(i) for i in range(len(prompts))])
    return most


def test_equal_memory_holds_3_5_times_the_tokens() -> None:
    """By vLLM's count, and by the requests that it really runs at once."""
    counted, admitted = {}, {}
    prompts = [token_ids(118, seed=n).tolist() for n in range(45)]
    memory = 7 * 2**20  # 11 and 39 of them
    for dtype in ("auto", "nvfp4"):
        options: dict[str, Any] = {"kv_cache_dtype": dtype, "kv_cache_memory_bytes": memory}
        with vllm_engine(dtype="bfloat16", block_size=16, max_num_seqs=256, **options) as llm:
            assert_ours(llm, "bfloat16" if dtype == "auto" else dtype)
            counted[dtype] = capacity(llm)
            admitted[dtype] = max_running(llm, prompts)
    assert counted["nvfp4"] / counted["auto"] == pytest.approx(32 / 9, rel=0.01)
    assert 3.5 <= admitted["nvfp4"] / admitted["auto"] <= 3.7, admitted
