"""`LLM` against transformers' own greedy generation, and out of pages or context."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from halfbyte.assets import bundled_model_path
from halfbyte.dispatch import NoImplementationError
from halfbyte.engine import LLM, FinishReason, SamplingParams, memory
from halfbyte.kvcache import KV_CACHE_QUANT_REGISTRY
from halfbyte.models import load_model
from models.zoo import ARCHITECTURES, make_model, token_ids
from slow import one_in

GREEDY = SamplingParams(max_tokens=20, temperature=0)
PROMPTS = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60)]


def transformers_greedy(model: Any, prompt: list[int]) -> list[int]:
    model.set_attn_implementation("eager")
    output = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", one_in(2, ARCHITECTURES))
def test_llm_unquantized_equals_transformers(architecture: str) -> None:
    model = make_model(architecture)
    expected = [transformers_greedy(model, prompt) for prompt in PROMPTS]
    llm = LLM(model, kv_cache_dtype="float32", num_pages=200, max_batched_tokens=16)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "nvfp4"])
def test_llm_sees_the_same_logits_however_a_prompt_is_chunked(
    architecture: str, kv_cache_dtype: str
) -> None:
    model = make_model(architecture)
    logits = []
    for chunk in (1, 7, 64):
        llm = LLM(model, kv_cache_dtype=kv_cache_dtype, num_pages=200)
        llm.core.tables.add(0)
        for start in range(0, 60, chunk):
            ids = PROMPTS[3][start : start + chunk]
            llm.core.tables.append(0, len(ids))
            last = llm.core.runner.run([(0, ids)])
        logits.append(last)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kv_cache_dtype", one_in(2, KV_CACHE_QUANT_REGISTRY))
def test_llm_every_dtype_alone_as_in_a_batch(kv_cache_dtype: str) -> None:
    model = make_model("qwen3")
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype, num_pages=100)
    together = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, together, strict=True):
        assert llm.generate(prompt, GREEDY)[0].token_ids == output.token_ids


@pytest.mark.parametrize("num_pages", [7, 9, 13])
def test_llm_preempts_when_pages_run_out(num_pages: int) -> None:
    model = make_model("llama")
    expected = LLM(model, kv_cache_dtype="float32", num_pages=100).generate(PROMPTS, GREEDY)
    llm = LLM(model, kv_cache_dtype="float32", num_pages=num_pages)
    outputs = llm.generate(PROMPTS, GREEDY)
    llm.core.tables.check_integrity()
    assert llm.core.tables.allocator.num_used == 0
    assert outputs == expected


def test_llm_fails_only_the_request_that_cannot_fit() -> None:
    model = make_model("llama")
    llm = LLM(model, kv_cache_dtype="nvfp4", num_pages=4)  # 3 pages of 16 tokens to use
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.finish_reason.value for output in outputs] == [
        "length",
        "error",
        "length",
        "error",
    ]
    assert outputs[3].error is not None
    assert "out of KV cache pages" in outputs[3].error
    llm.core.tables.check_integrity()
    assert llm.core.tables.allocator.num_used == 0
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == outputs[0].token_ids


def test_llm_more_requests_than_run_at_once() -> None:
    model = make_model("llama")
    expected = LLM(model, kv_cache_dtype="nvfp4").generate(PROMPTS * 2, GREEDY)
    narrow = LLM(model, kv_cache_dtype="nvfp4", max_num_seqs=2)
    assert narrow.generate(PROMPTS * 2, GREEDY) == expected


def test_llm_seeded_sampling_does_not_depend_on_the_batch() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4")
    params = [SamplingParams(max_tokens=12, seed=seed, top_k=20) for seed in (1, 2, 3, 4)]
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(p, one)[0] for p, one in zip(PROMPTS, params, strict=True)]
    assert together == alone
    other = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=9, top_k=20))
    assert other[0].token_ids != alone[0].token_ids


def test_llm_stops_at_stop_tokens() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4")
    free = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    stop = next(token for token in free if token != free[0])
    params = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(stop,))
    output = llm.generate(PROMPTS[0], params)[0]
    assert output.token_ids == free[: free.index(stop) + 1]
    assert output.finish_reason is FinishReason.STOP


def test_llm_refuses_options_that_cannot_be() -> None:
    """Raised before anything is loaded."""
    with pytest.raises(NoImplementationError, match="attention backend: unknown 'zz'"):
        LLM("/no/such/folder", attention_backend="zz")
    options: list[tuple[dict[str, Any], str]] = [
        ({"kv_cache_dtype": "nvpf4"}, "KV cache dtype: unknown 'nvpf4'; expected one of"),
        ({"v_cache_dtype": ["nvfp4", "fp9"]}, "KV cache dtype: unknown 'fp9'"),
        ({"kv_cache_dtype": {"full_attention": "x"}}, "KV cache dtype: unknown 'x'"),
        ({"kv_cache_dtype": 4}, "kv_cache_dtype: expected a format or formats, got 4"),
        ({"kv_scales": {}}, "kv_scales: expected KVScales or a file, got dict"),
        ({"tokenizer": "/no/such/tokenizer"}, "/no/such/tokenizer: no such folder"),
        ({"num_pages": 2.5}, "num_pages: expected an integer, got 2.5"),
    ]
    names = ("block_size", "num_pages", "max_model_len", "max_batched_tokens", "max_num_seqs")
    options += [({name: 0}, f"{name}: expected at least 1, got 0") for name in names]
    for option, message in options:
        with pytest.raises(ValueError, match=message):
            LLM("/no/such/folder", **option)
    with pytest.raises(ValueError, match=r"max_model_len: expected 1 \.\. 256, got 257"):
        LLM(make_model("llama"), max_model_len=257)


def test_llm_takes_a_tokenizer_s_folder() -> None:
    llm = LLM(load_model(bundled_model_path(), device="cpu"), str(bundled_model_path()))
    assert llm.generate("import", GREEDY)[0].text


def test_llm_formats_may_be_torch_dtypes() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype=torch.bfloat16, v_cache_dtype="fp8")
    layout = llm.pool.layout(0)
    assert (layout.k_dtype, layout.v_dtype) == ("bfloat16", "fp8_e4m3")


def test_llm_stops_at_the_end_of_the_context() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4", max_model_len=40)
    output = llm.generate(PROMPTS[1], SamplingParams(max_tokens=100, temperature=0))[0]
    assert len(output.token_ids) == 40 - 33
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "is empty"),
        ([[1] * 256], "256 tokens leave no room to generate in a context of 256"),
        ([[1, 131]], "not all in 0 .. 130"),
        ([[-1]], "not all in 0 .. 130"),
        ("text", "has no tokenizer"),
        ([[1.5, 2.0]], "prompt: expected an integer, got 1.5"),
        (b"bytes", "prompts: expected texts or lists of token ids, got bytes"),
        ([b"bytes"], "prompt: expected a text or a list of token ids, got bytes"),
        (None, "prompts: expected texts or lists of token ids, got NoneType"),
        ([torch.tensor(1)], "prompt: expected a text or a list of token ids, got int"),
        ([None], "prompt: expected a text or a list of token ids, got NoneType"),
        (
            BatchEncoding({"input_ids": [[1]]}),
            "got BatchEncoding .of a tokenizer's result pass in",
        ),
        ([{"prompt_token_ids": [1]}], "prompt: expected a text or a list of token ids, got dict"),
    ],
)
def test_llm_refuses_prompts_before_it_starts(prompt: object, message: str) -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4")
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
    assert not llm.core.scheduler.has_work


def test_llm_stream_closed_early_frees_its_pages() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4")
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="one batch at a time"):
        next(llm.stream(PROMPTS[0], GREEDY))
    stream.close()
    assert llm.core.tables.allocator.num_used == 0
    assert not llm.core.scheduler.has_work
    assert len(llm.generate(PROMPTS[0], GREEDY)[0].token_ids) == 20


def test_llm_stream_gives_every_token_in_order() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4")
    expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    for token in llm.stream(PROMPTS, GREEDY):
        streamed[token.index].append(token.token)
    assert streamed == expected


def test_llm_no_prompts() -> None:
    assert LLM(make_model("llama"), kv_cache_dtype="nvfp4").generate([], GREEDY) == []


def test_llm_sliding_layers_give_up_dead_pages() -> None:
    model = make_model("mistral")  # every layer has a window of 11
    llm = LLM(model, kv_cache_dtype="nvfp4", max_batched_tokens=16)
    llm.generate(PROMPTS[3], SamplingParams(max_tokens=100, temperature=0))
    assert llm.core.tables.allocator.max_used <= 3


def test_llm_mixed_formats_share_a_pool() -> None:
    formats = {"full_attention": "nvfp4", "sliding_attention": "bfloat16"}
    llm = LLM(make_model("gpt_oss"), kv_cache_dtype=formats)
    block_sizes = [group.block_size for group in llm.pool.plan.groups]
    assert block_sizes[0] < block_sizes[1]
    assert max(llm.pool.plan.waste) <= 0.05
    assert len(llm.generate(PROMPTS[3], GREEDY)[0].token_ids) == 20


def test_llm_leaves_the_model_as_it_was() -> None:
    model = make_model("llama")
    llm = LLM(model, kv_cache_dtype="nvfp4")
    llm.generate(PROMPTS, GREEDY)
    assert model.config._attn_implementation == "eager"
    assert transformers_greedy(model, PROMPTS[0])


def test_llm_k_and_v_of_different_formats() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="fp8", v_cache_dtype="nvfp4")
    layout = llm.pool.layout(0)
    assert (layout.k_dtype, layout.v_dtype) == ("fp8_e4m3", "nvfp4")
    assert len(llm.generate(PROMPTS[0], GREEDY)[0].token_ids) == 20


def test_llm_refuses_what_is_no_sampling_params() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4")
    for params in ({"max_tokens": 3}, [None], 3):
        with pytest.raises(ValueError, match="sampling_params: expected SamplingParams, got"):
            llm.generate([PROMPTS[0]], params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stop: this model has no tokenizer; use stop_token_ids"):
        llm.generate([PROMPTS[0]], SamplingParams(stop=("sys",)))


def test_llm_takes_tensors_of_token_ids() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4")
    as_list = llm.generate([PROMPTS[0]], GREEDY)
    assert llm.generate((list(p) for p in PROMPTS[:1]), GREEDY) == as_list  # type: ignore[arg-type]
    assert llm.generate(list(np.array(PROMPTS[0])), GREEDY) == as_list
    assert llm.generate(torch.tensor(PROMPTS[0]), GREEDY) == as_list  # type: ignore[arg-type]
    assert llm.generate(torch.tensor([PROMPTS[0]]), GREEDY) == as_list  # type: ignore[arg-type]


def test_llm_tiny_temperatures_are_greedy() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4")
    greedy = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    for temperature in (1e-44, 1e-46, 1e-300):
        tiny = SamplingParams(max_tokens=20, temperature=temperature, seed=0)
        assert llm.generate(PROMPTS[0], tiny)[0].token_ids == greedy


def test_the_pool_keeps_to_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if not even one sequence of full length fits, which is logged."""
    model = make_model("llama")
    whole = LLM(model, kv_cache_dtype="nvfp4", max_num_seqs=1)
    sequence = (whole.pool.num_pages - 1) * whole.pool.plan.page_bytes
    monkeypatch.setattr(memory, "_CPU_POOL_BYTES", sequence // 2)
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        llm = LLM(model, kv_cache_dtype="nvfp4")
    assert (llm.pool.num_pages - 1) * llm.pool.plan.page_bytes <= sequence // 2
    (message,) = caplog.messages
    context = model.config.max_position_embeddings
    assert message.startswith(
        f"the KV cache has room for 50 % of a sequence of max_model_len {context}; "
    )
    assert f"num_pages ({whole.pool.num_pages} for one sequence)" in message
    long, short = [1] * (context - 10), [1] * 20
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    failed, served = llm.generate([long, short], params)
    assert failed.error
    assert len(served.token_ids) == 4
