"""Random caches, timing and the error against float64."""

import math
import time
from dataclasses import replace

import pytest
import torch

from attention.cases import dense
from halfbyte.bench.cases import Case, decode, prefill
from halfbyte.bench.data import copies, make_cache, random_tables, short_name
from halfbyte.bench.exact import attention_error
from halfbyte.bench.subjects import Queries, attention_calls, store_calls
from halfbyte.bench.timing import (
    bandwidths,
    capture,
    measure,
    measure_in_turns,
    ready,
    waits_for_host,
    whole_turns,
)
from halfbyte.kvcache import KV_CACHE_QUANT_REGISTRY, read_tokens

CPU = torch.device("cpu")


def test_tables_name_every_page_once_in_random_order() -> None:
    table, num_pages = random_tables(torch.tensor([1, 33, 16, 200]), 16)
    counts = [1, 3, 1, 13]
    used = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    assert num_pages == sum(counts)
    assert sorted(used.tolist()) == list(range(num_pages))
    assert used.tolist() != sorted(used.tolist())
    assert table.dtype == torch.int32


@pytest.mark.parametrize("dtype", list(KV_CACHE_QUANT_REGISTRY))
def test_caches_hold_finite_values_of_both_signs_and_sane_size(dtype: str) -> None:
    case = decode("gpt-oss", 2, 100)
    cache = make_cache(case, dtype, CPU)
    slots = torch.arange(cache.pools[0].shape[0] * case.block_size)
    for pages in cache.pools[:2]:
        for values in read_tokens(pages, slots, cache.layout, cache.scale, cache.scale):
            assert values.isfinite().all()
            assert 0.01 < values.abs().mean() < 10
            assert 0.4 < (values < 0).sum() / (values != 0).sum() < 0.6
    assert not torch.equal(cache.pools[0], cache.pools[1])
    assert cache.num_bytes == 200 * cache.layout.bytes_per_token


def test_copies_leave_the_caches_within_reason() -> None:
    gpu = torch.device("cuda")
    assert copies(600_000_000, gpu) == 1
    assert copies(100_000_000, gpu) == 5
    assert copies(1000, gpu) == 256
    assert copies(0, CPU) == 64


def test_names_of_formats_in_reports() -> None:
    names = [short_name(name) for name in ("nvfp4", "fp8", "bfloat16", "float32", "mxfp4")]
    assert names == ["nvfp4", "fp8", "bf16", "fp32", "mxfp4"]


@pytest.mark.parametrize(
    "case",
    [
        decode("llama", 3, 70, ragged=True),
        decode("gpt-oss", 2, 40),
        decode("gemma", 2, 40),
        prefill("llama", 2, 20, 13),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "bfloat16"])
def test_error_is_that_of_the_sampled_tokens(case: Case, dtype: str) -> None:
    cache, queries = make_cache(case, dtype, CPU), Queries.make(case, CPU, torch.float32)
    out = attention_calls(case, cache, queries, None)[0]()
    error = attention_error(out, queries.query, case, cache, queries.sinks).ours
    assert error < 1e-5
    # The last query token of the longest sequence is looked at; all others beside it may be wrong.
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
    cache, queries = make_cache(case, "nvfp4", CPU), Queries.make(case, CPU)
    slots = cache.block_tables[0, 0] * case.block_size + torch.arange(40)
    key, value = read_tokens(
        cache.pools[0], slots, cache.layout, cache.scale, cache.scale, torch.float64
    )
    exact, _ = dense(queries.query, key, value, 40, case.head_size**-0.5, torch.float64)
    error = attention_error(exact, queries.query, case, cache, None)
    assert error.ours < 1e-12
    assert 1e-4 < error.bfloat16 < 3e-2


def test_store_writes_what_the_reference_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(decode("llama", 1, 100), kind="store", query_tokens=100)
    calls, num_bytes = store_calls(case, "nvfp4", CPU)
    assert len(calls) == 64
    assert num_bytes == 2 * 100 * 8 * 128 * 2 + 100 * 8 + 100 * 8 * 2 * 72
    calls[-1]()
    monkeypatch.setattr(
        "halfbyte.bench.subjects.reshape_and_cache", lambda k, v, pages, *_: pages.random_()
    )
    with pytest.raises(RuntimeError, match="other values than the reference"):
        store_calls(case, "nvfp4", CPU)


def test_measure_tells_microseconds() -> None:
    times = measure([lambda: time.sleep(0.002)] * 3, CPU)
    assert set(times) == {"single", "back_to_back"}
    assert all(2000 <= value < 20_000 for value in times.values())


def test_measure_repeats_slow_calls_less_often() -> None:
    count = 0

    def slow() -> None:
        nonlocal count
        count += 1
        time.sleep(0.15)

    measure([slow], CPU)
    assert 6 <= count <= 10


@pytest.mark.parametrize(("copies", "expected"), [(1, 20), (3, 21), (15, 30), (20, 20), (33, 33)])
def test_every_copy_has_as_many_turns(copies: int, expected: int) -> None:
    calls = [lambda: None for _ in range(copies)]
    row = whole_turns(calls)
    assert len(row) == expected
    assert row == calls * (expected // copies)


def test_bandwidths_are_those_of_a_machine() -> None:
    read, copied = bandwidths(CPU)
    assert 1e-4 < copied < 2
    assert 1e-4 < read < 2


@pytest.mark.gpu
def test_capture_replays_and_calls_that_wait_are_found() -> None:
    x = torch.zeros(3, device="cuda")

    def add() -> None:
        x.add_(1)

    replay = capture([add])  # called once, captured, replayed once
    replay()
    torch.cuda.synchronize()
    assert x.tolist() == [3.0] * 3
    subject = ready([add], torch.device("cuda"), in_graph=True)
    assert subject.row is not None
    times = measure_in_turns({"": subject}, torch.device("cuda"), rounds=2)[""]
    assert 0.2 < times["in_graph"] < times["single"]
    x.zero_()
    subject.row.replay()
    assert x.tolist() == [float(subject.row.calls)] * 3
    assert not waits_for_host(add)
    assert waits_for_host(lambda: x.max().item())
    assert torch.cuda.get_sync_debug_mode() == 0
    assert measure([add], torch.device("cuda"))["graph"] is True
    assert measure([lambda: x.max().item()], torch.device("cuda"))["graph"] is False
    with pytest.raises(RuntimeError, match="not this one"):
        waits_for_host(_raise)


def _raise() -> None:
    raise RuntimeError("not this one")
