from dataclasses import asdict

import pytest
import torch

from bench.shared import assert_sees_causally
from benchmarks.attention.cases import CASES, Case, decode, of_row, ragged
from halfbyte.bench.cases import prefill

PREFILL = Case(**asdict(prefill("llama", 2, 7, 11)))


def test_cases_have_names_of_their_own_and_all_kinds() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.kind for case in CASES} == {"decode", "prefill", "store"}
    assert all(case.name.startswith(case.kind) for case in CASES)


def test_rows_name_their_cases() -> None:
    for case in CASES:
        assert of_row({**asdict(case), "halfbyte_nvfp4": {}}) == case


def test_lengths_are_equal_or_log_uniform_and_reproducible() -> None:
    assert decode("llama", 3, 100).lengths().tolist() == [100] * 3
    case = ragged("llama", 256, 2048)
    lengths = case.lengths()
    assert torch.equal(lengths, case.lengths())
    assert lengths.dtype == torch.int32
    assert 64 <= lengths.min() < 100
    assert 1800 < lengths.max() <= 2048
    # Log-uniform: half of them below the geometric mean of the bounds, which is 362.
    assert 0.4 < (lengths < 362).float().mean() < 0.6
    assert ragged("gemma", 4, 3).lengths().tolist() == [3] * 4
    narrow = ragged("llama", 256, 2048, shortest=512)
    assert narrow.name == "decode-llama-256x2048-ragged-from-512"
    assert narrow.shortest == 512
    assert 512 <= narrow.lengths().min() < 530
    assert 0.4 < (narrow.lengths() < 1024).float().mean() < 0.6


@pytest.mark.parametrize(
    "case",
    [decode("gemma", 3, 50), ragged("llama", 5, 90), PREFILL],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_what_causal_attention_sees(case: Case, window: int | None) -> None:
    assert_sees_causally(case, window)


def test_ragged_cases_evened_out_keep_their_tokens() -> None:
    for case in CASES:
        if case.ragged:
            even = case.evened_out()
            tokens = int(case.lengths().sum())
            assert abs(int(even.lengths().sum()) - tokens) <= case.batch / 2
            assert set(even.lengths().tolist()) == {even.context}


def test_shortest_sequence_is_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="shortest: expected at least 1, got 0"):
        ragged("llama", 2, 10, shortest=0)
