from dataclasses import replace

import pytest

from bench.shared import assert_sees_causally
from halfbyte.bench import Case
from halfbyte.bench.cases import decode, prefill, store
from halfbyte.cli.bench_arguments import default_cases


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_usual_cases_have_names_of_their_own_and_all_kinds(device_type: str) -> None:
    cases = default_cases(device_type)
    assert len({case.name for case in cases}) == len(cases)
    assert {case.kind for case in cases} == {"decode", "prefill", "store"}
    assert all(case.name.startswith(case.kind) for case in cases)


@pytest.mark.parametrize(
    "case",
    [decode("gemma", 3, 50), decode("llama", 5, 90), prefill("llama", 2, 7, 11)],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_what_causal_attention_sees(case: Case, window: int | None) -> None:
    assert_sees_causally(case, window)


def test_presets_shape_the_cases() -> None:
    gemma, gpt = decode("gemma", 2, 100), decode("gpt-oss", 2, 100)
    assert (gemma.heads, gemma.kv_heads, gemma.query_tokens) == (4, 1, 4)
    assert (gpt.heads, gpt.sinks, gpt.block_size) == (64, True, 64)
    assert not store("gpt-oss", 10).sinks
    sliding = decode("gpt-oss-sliding", 2, 100)
    assert replace(sliding, name=gpt.name, sliding_window=None) == gpt
    assert sliding.sliding_window == 128
    assert store("gpt-oss-sliding", 10).sliding_window is None
    assert prefill("llama", 2, 100, 28).context == 128
    assert prefill("llama", 2, 100, 28).query_tokens == 100


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0, 1), "batch: expected at least 1"), ((1, -5), "context: expected at least 1")],
)
def test_sizes_are_at_least_1(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode("llama", *sizes)
