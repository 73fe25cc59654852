"""Whole runs of the attention benchmark on a CPU, tiny, and SDPA's calls."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench.shared import RATE, TIMES, assert_report_of_decode, measure_quickly
from halfbyte.bench import AttentionBenchmark, Case, attention_calls
from halfbyte.bench.attention_calls import sdpa_calls, sdpa_dtypes
from halfbyte.bench.cases import decode, prefill, store

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_quickly(monkeypatch, 3)


def windowed(case: Case) -> Case:
    return replace(case, sliding_window=5)


def test_report_says_what_was_measured_and_on_what() -> None:
    benchmark = AttentionBenchmark(CPU, ("nvfp4", "fp8", "nvfp4"), query_dtype=torch.float32)
    assert_report_of_decode(benchmark, decode("llama", 2, 48))


def test_queries_are_bfloat16_by_default() -> None:
    ours = AttentionBenchmark(CPU, with_peers=False).run(decode("llama", 2, 48))["halfbyte_nvfp4"]
    # Results are rounded to bfloat16, and sums are in float32.
    assert 1e-4 < ours["error"] < 1e-2


def test_prefill_counts_operations_and_store_counts_bytes() -> None:
    benchmark = AttentionBenchmark(CPU, with_peers=False, query_dtype=torch.float32)
    row = benchmark.run(prefill("llama", 1, 20, 12))
    ours = row["halfbyte_nvfp4"]
    assert set(ours) == {"error", "teraflops_per_s", *TIMES}
    operations = 4 * 32 * 128 * sum(range(13, 33))
    expected = operations / ours["back_to_back"] / 1e6
    assert ours["teraflops_per_s"] == pytest.approx(expected, abs=0.005)
    few = benchmark.run(windowed(prefill("llama", 1, 20, 12)))["halfbyte_nvfp4"]
    assert few["error"] < 1e-5
    row = benchmark.run(store("llama", 32))
    assert set(row["halfbyte_nvfp4"]) == {*TIMES, *RATE}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (decode("llama", 1, 30), True),
        (prefill("llama", 1, 30), True),
        (prefill("llama", 1, 30, 2), True),
        (windowed(prefill("llama", 1, 30)), False),
        (decode("gpt-oss", 1, 30), False),
        (decode("gemma", 1, 30), False),
        (store("llama", 30), False),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_sdpa_takes_part_where_it_can_do_the_work(case: Case, expected: bool) -> None:
    assert bool(sdpa_dtypes(case, CPU)) == expected


def test_sdpa_prefills_on_cached_tokens() -> None:
    call = sdpa_calls(prefill("llama", 1, 5, 3), torch.float32, CPU)[0]
    query, key, value = call.args  # type: ignore[attr-defined]
    assert (query.shape, key.shape) == ((1, 32, 5, 128), (1, 32, 8, 128))
    scores = query @ key.transpose(2, 3) / 128**0.5
    later = torch.arange(8)[None, :] > 3 + torch.arange(5)[:, None]
    exact = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
    torch.testing.assert_close(call(), exact)


@pytest.mark.gpu
def test_gpu_sdpa_prefills_on_cached_tokens() -> None:
    call = sdpa_calls(prefill("llama", 1, 5, 3), torch.bfloat16, torch.device("cuda"))[0]
    query, key, value = (x.double() for x in call.args)  # type: ignore[attr-defined]
    key, value = (x.repeat_interleave(4, 1) for x in (key, value))
    later = torch.arange(8)[None, :] > 3 + torch.arange(5)[:, None]
    exact = F.scaled_dot_product_attention(query, key, value, attn_mask=~later.cuda())
    torch.testing.assert_close(call().double(), exact, rtol=2e-2, atol=2e-2)


def test_sdpa_decodes_with_the_group_folded_into_queries() -> None:
    call = sdpa_calls(decode("llama", 2, 30), torch.float32, CPU)[0]
    query, key, value = call.args  # type: ignore[attr-defined]
    assert query.shape == (2, 8, 4, 128)
    flat = query.flatten(1, 2).unsqueeze(2)
    plain = F.scaled_dot_product_attention(flat, key, value, enable_gqa=True)
    torch.testing.assert_close(call().flatten(1, 2), plain[:, :, 0])


def test_ours_that_fails_is_noted_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("out\nof order")

    monkeypatch.setattr(attention_calls, "paged_attention", fail)
    benchmark = AttentionBenchmark(CPU, ("fp8",))
    row = benchmark.run(decode("llama", 1, 20))
    assert row["halfbyte_fp8"] == {"failed": "RuntimeError: out of order"}
    assert row["sdpa_bf16"]["single"] > 0


@pytest.mark.parametrize("factor", [1.2, torch.nan])
def test_ours_that_is_wrong_has_failed(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    right = attention_calls.paged_attention

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        out = right(*arguments, **options)
        return out if options["backend"] == "reference" else out.mul_(factor)

    monkeypatch.setattr(attention_calls, "paged_attention", wrong)
    benchmark = AttentionBenchmark(CPU, with_peers=False)
    row = benchmark.run(decode("llama", 1, 20))
    assert row["halfbyte_nvfp4"]["failed"].startswith("RuntimeError: wrong results: error ")


def test_formats_are_checked_first() -> None:
    with pytest.raises(ValueError, match="unknown 'int3'"):
        AttentionBenchmark(CPU, ("int3",))
    with pytest.raises(ValueError, match="'auto' is a model's choice"):
        AttentionBenchmark(CPU, ("auto",))


@pytest.mark.gpu
def test_benchmark_on_a_gpu() -> None:
    benchmark = AttentionBenchmark(torch.device("cuda"), ("nvfp4", "bfloat16"))
    for case in (decode("llama", 4, 300), store("llama", 64), prefill("llama", 2, 40, 20)):
        row = benchmark.run(case)
        names = ["halfbyte_nvfp4", "halfbyte_bf16"]
        for name in [*names, "sdpa_bf16"] if case.kind != "store" else names:
            assert "failed" not in row[name], row[name]
            assert row[name]["single"] > 0
    assert benchmark.report["microseconds"][0]["halfbyte_nvfp4"]["error"] < 0.01
