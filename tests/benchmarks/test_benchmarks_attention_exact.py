"""The error of attention against float64."""

import math

import pytest
import torch

from attention.cases import dense
from benchmarks.attention.cases import ragged
from benchmarks.attention.exact import attention_error
from halfbyte.bench import Case
from halfbyte.bench.attention_calls import attention_calls, make_queries
from halfbyte.bench.cases import decode, prefill
from halfbyte.bench.data import make_cache
from halfbyte.kvcache import read_tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case",
    [
        ragged("llama", 3, 70),
        decode("gpt-oss", 2, 40),
        decode("gemma", 2, 40),
        prefill("llama", 2, 20, 13),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "bfloat16"])
def test_error_is_that_of_the_sampled_tokens(case: Case, dtype: str) -> None:
    cache, queries = make_cache(case, dtype, CPU), make_queries(case, CPU, torch.float32)
    out = attention_calls(case, cache, queries)[0]()
    error = attention_error(out, queries.query, case, cache, queries.sinks).ours
    assert error < 1e-5
    # The last query token of the longest sequence is in the sample; other tokens may be wrong.
    longest = int(case.lengths().argmax())
    row = (longest + 1) * case.query_tokens - 1
    wrong = out.clone()
    wrong[row, 0] *= 1.5
    assert attention_error(wrong, queries.query, case, cache, queries.sinks).ours > 1e-3
    wrong[row, 0] = torch.nan
    assert math.isnan(attention_error(wrong, queries.query, case, cache, queries.sinks).ours)
    if case.sinks:
        assert attention_error(out, queries.query, case, cache, None).ours > 1e-3


def test_error_agrees_with_plain_attention() -> None:
    case = decode("gemma", 1, 40)
    cache, queries = make_cache(case, "nvfp4", CPU), make_queries(case, CPU)
    slots = cache.block_tables[0, 0] * case.block_size + torch.arange(40)
    key, value = read_tokens(
        cache.pools[0], slots, cache.layout, cache.scale, cache.scale, torch.float64
    )
    exact, _ = dense(queries.query, key, value, 40, case.head_size**-0.5, torch.float64)
    error = attention_error(exact, queries.query, case, cache, None)
    assert error.ours < 1e-12
    assert 1e-4 < error.bfloat16 < 3e-2
