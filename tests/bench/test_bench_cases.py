from dataclasses import replace

import pytest
import torch

from halfbyte.bench import CPU_CASES, GPU_CASES, Case, grid, select
from halfbyte.bench.cases import decode, prefill, store


@pytest.mark.parametrize("cases", [GPU_CASES, CPU_CASES], ids=["gpu", "cpu"])
def test_usual_cases_have_names_of_their_own_and_all_kinds(cases: tuple) -> None:
    assert len({case.name for case in cases}) == len(cases)
    assert {case.kind for case in cases} == {"decode", "prefill", "store"}
    assert all(case.name.startswith(case.kind) for case in cases)


def test_lengths_are_equal_or_log_uniform_and_the_same_every_time() -> None:
    assert decode("llama", 3, 100).lengths().tolist() == [100] * 3
    case = decode("llama", 256, 2048, ragged=True)
    lengths = case.lengths()
    assert torch.equal(lengths, case.lengths())
    assert lengths.dtype == torch.int32
    assert 64 <= lengths.min() < 100
    assert 1800 < lengths.max() <= 2048
    # Log-uniform: half of them below the geometric mean of the bounds, which is 362.
    assert 0.4 < (lengths < 362).float().mean() < 0.6
    assert decode("gemma", 4, 3, ragged=True).lengths().tolist() == [3] * 4
    narrow = decode("llama", 256, 2048, ragged=True, shortest=512)
    assert narrow.name == "decode-llama-256x2048-ragged-from-512"
    assert narrow.shortest == 512
    assert 512 <= narrow.lengths().min() < 530
    assert 0.4 < (narrow.lengths() < 1024).float().mean() < 0.6


@pytest.mark.parametrize(
    "case",
    [decode("gemma", 3, 50), decode("llama", 5, 90, ragged=True), prefill("llama", 2, 7, 11)],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_what_causal_attention_sees(case: Case, window: int | None) -> None:
    case = replace(case, sliding_window=window)
    seen = [
        [range(max(0, p + 1 - (window or p + 1)), p + 1) for p in range(n - case.query_tokens, n)]
        for n in case.lengths().tolist()
    ]
    assert case.pairs == sum(len(keys) for row in seen for keys in row)
    assert case.tokens_read == sum(len(set().union(*row)) for row in seen)


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


def test_ragged_cases_evened_out_keep_their_tokens() -> None:
    for case in GPU_CASES:
        if case.ragged:
            even = case.evened_out()
            tokens = int(case.lengths().sum())
            assert abs(int(even.lengths().sum()) - tokens) <= case.batch / 2
            assert set(even.lengths().tolist()) == {even.context}


def test_grid_has_every_kind_at_every_point() -> None:
    cases = grid(["llama", "gpt-oss"], [1, 2], [16, 32])
    names = {case.name for case in cases}
    assert len(cases) == len(names) == 8 + 8 + 6  # 1 x 32 and 2 x 16 store the same
    assert {"decode-gpt-oss-2x16", "prefill-llama-1x32-on-0", "store-llama-64"} <= names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["bloom"], [1], [1]), "heads: unknown 'bloom'; expected one of llama, gpt-oss, gemma"),
        ((["llama"], [0], [1]), "batch: expected at least 1"),
        ((["llama"], [1], [-5]), "context: expected at least 1"),
    ],
    ids=["heads", "batch", "context"],
)
def test_grid_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid(*arguments)


def test_shortest_sequence_is_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="shortest: expected at least 1, got 0"):
        decode("llama", 2, 10, ragged=True, shortest=0)


def test_select_by_regular_expression() -> None:
    assert select(GPU_CASES, None) == list(GPU_CASES)
    assert [case.name for case in select(GPU_CASES, "gpt-oss-6|^store.*64$")] == [
        "decode-gpt-oss-64x8192",
        "store-llama-64",
    ]
    with pytest.raises(ValueError, match="matches none of decode-llama-64x8192, "):
        select(GPU_CASES, "nothing")
    with pytest.raises(ValueError, match="is not a regular expression"):
        select(GPU_CASES, "(")
