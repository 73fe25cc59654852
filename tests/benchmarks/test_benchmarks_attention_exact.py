"""The error of attention against float64."""

import math
from dataclasses import replace

import pytest
import torch

from attention.cases import dense
from benchmarks.attention.cases import ragged
from benchmarks.attention.exact import attention_error
from halfbyte.bench import Case
from halfbyte.bench.attention_calls import attention_calls
from halfbyte.bench.cases import decode, prefill
from halfbyte.bench.data import make_inputs
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
    inputs = make_inputs(case, dtype, CPU, torch.float32)
    out = attention_calls(case, inputs)[0]()
    error = attention_error(out, case, inputs).ours
    assert error < 1e-5
    # The last query token of the longest sequence is in the sample; other tokens may be wrong.
    longest = int(case.lengths().argmax())
    row = (longest + 1) * case.query_tokens - 1
    wrong = out.clone()
    wrong[row, 0] *= 1.5
    assert attention_error(wrong, case, inputs).ours > 1e-3
    wrong[row, 0] = torch.nan
    assert math.isnan(attention_error(wrong, case, inputs).ours)
    if case.sinks:
        assert attention_error(out, case, replace(inputs, sinks=None)).ours > 1e-3


def test_error_agrees_with_plain_attention() -> None:
    case = decode("gemma", 1, 40)
    inputs = make_inputs(case, "nvfp4", CPU)
    slots = inputs.block_tables[0, 0] * case.block_size + torch.arange(40)
    key, value = read_tokens(
        inputs.pools[0], slots, inputs.layout, inputs.scale, inputs.scale, torch.float64
    )
    exact, _ = dense(inputs.query, key, value, 40, case.head_size**-0.5, torch.float64)
    error = attention_error(exact, case, inputs)
    assert error.ours < 1e-12
    assert 1e-4 < error.bfloat16 < 3e-2
