"""Batch invariance: a request's logits are bitwise equal for any batch and any chunks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from halfbyte.engine import LLM, SamplingParams
from halfbyte.linear import NvFp4Linear
from models.zoo import ARCHITECTURES, make_model, token_ids
from slow import one_in

LAYERS = ["sliding_attention", "full_attention"]
PROMPT = token_ids(60, seed=60).tolist()


def logits(llm: LLM, chunks: Sequence[int], others: Sequence[int] = ()) -> torch.Tensor:
    """`[60, vocabulary]` of a prompt in chunks, beside others that then decode.

    Args:
        chunks: their sizes.
        others: lengths of the other prompts.
    """
    tables, names = llm.core.tables, range(1 + len(others))
    for name in names:
        tables.add(name)
    found, position = [], 0
    for number, count in enumerate(chunks):
        ids = PROMPT[position : position + count]
        position += count
        work = [(0, ids)]
        for name, length in enumerate(others, 1):
            new = token_ids(length if number == 0 else 1, seed=name).tolist()
            work.insert(name % 2, (name, new))  # before and after it
        for name, new in work:
            tables.append(name, len(new))
        start = sum(len(new) for _, new in work[: work.index((0, ids))])
        rows = llm.core.runner.run(work, all_logits=True)
        found.append(rows[start : start + count].clone())
    for name in names:
        tables.free(name)
    return torch.cat(found)


def assert_invariant(model: Any, **options: Any) -> None:
    llm = LLM(model, batch_invariant=True, num_pages=200, **options)
    alone = logits(llm, [60])
    assert torch.isfinite(alone).all()
    assert torch.equal(logits(llm, [60], [5, 33, 17, 9]), alone)
    assert torch.equal(logits(llm, [13, 13, 13, 13, 8], [21, 3]), alone)
    assert torch.equal(logits(llm, [7] * 8 + [4]), alone)
    assert torch.equal(logits(llm, [59, 1], [2, 2, 2]), alone)


@pytest.mark.parametrize("architecture", one_in(2, ARCHITECTURES))
def test_logits_do_not_depend_on_the_batch_nor_on_chunks(architecture: str) -> None:
    # Rows that are no multiple of a SIMD vector, where errors are likeliest.
    assert_invariant(make_model(architecture, intermediate_size=100), kv_cache_dtype="nvfp4")


@pytest.mark.parametrize(("dtype", "threads"), [(torch.bfloat16, 2), (torch.float16, 1)])
def test_logits_of_smaller_floats_on_several_threads(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = make_model(
            "gemma2", dtype, num_hidden_layers=2, intermediate_size=700, layer_types=LAYERS
        )
        assert_invariant(model, kv_cache_dtype="fp8")
    finally:
        torch.set_num_threads(before)


def test_seeded_tokens_do_not_depend_on_the_batch() -> None:
    """Long enough that another order of summation would show; with chunks and preemption."""
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4", batch_invariant=True)
    prompts = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60, 2)]
    params = [
        SamplingParams(max_tokens=30, seed=i, temperature=0 if i == 2 else 1.0, logprobs=1)
        for i in range(5)
    ]
    together = llm.generate(prompts, params)
    narrow = LLM(
        make_model("llama"),
        kv_cache_dtype="nvfp4",
        batch_invariant=True,
        max_batched_tokens=7,
        num_pages=16,
    )
    assert narrow.generate(prompts, params) == together
    for prompt, one, output in zip(prompts, params, together, strict=True):
        assert llm.generate(prompt, one)[0] == output


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_request_of_nan_stays_alone(batch_invariant: bool) -> None:
    """Its activations become NaN although weights are finite."""
    model = make_model("llama")
    llm = LLM(model, kv_cache_dtype="nvfp4", batch_invariant=batch_invariant)
    with torch.no_grad():
        model.model.embed_tokens.weight[100] = torch.nan
    clean = [i if i != 100 else 99 for i in token_ids(20, seed=1).tolist()]
    params = SamplingParams(max_tokens=9, temperature=0)
    expected = llm.generate(clean, params)[0]
    assert 100 not in expected.token_ids
    poisoned, beside = llm.generate([[5, 100, 7], clean], params)
    assert poisoned.error == "the model's logits have nan for their largest"
    assert beside == expected


def test_layers_that_were_loaded_without_it_are_refused() -> None:
    model = make_model("llama")
    linear = model.model.layers[0].self_attn.q_proj
    layer = NvFp4Linear(linear.in_features, linear.out_features, bias=False, dtype=torch.float32)
    model.model.layers[0].self_attn.q_proj = layer
    with pytest.raises(
        ValueError, match=r"batch_invariant: model\.layers\.0\.self_attn\.q_proj was"
    ):
        LLM(model, batch_invariant=True, kv_cache_dtype="float32")
