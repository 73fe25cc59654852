"""Prefill with sliding windows: what FlashAttention is given, and causal squares."""

import sys
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from attention.cases import config, make_case
from attention.dense_cases import LARGE, SMALL, check, check_on_a_cpu
from halfbyte.attention import ATTENTION_BACKENDS, dense, dense_plan, dense_windows
from halfbyte.attention.dense_plan import query_parts
from halfbyte.attention.dense_windows import windowed_chunks
from triton_interpreter import interpreted

SQUARES: dict[str, dict[str, Any]] = {
    "without-prefix": {"sliding_window": 20, "query_lens": (20, 90), "seq_lens": (20, 90)},
    "behind-a-prefix": {"sliding_window": 70, "query_lens": (33, 40), "seq_lens": (133, 300)},
    "from-within-the-window": {"sliding_window": 50, "query_lens": (60, 17), "seq_lens": (90, 51)},
    "window-of-two": {"sliding_window": 2, "query_lens": (20,), "seq_lens": (27,)},
    "sinks": {"sliding_window": 40, "sinks": True, "query_lens": (1, 90), "seq_lens": (50, 140)},
}


@pytest.mark.parametrize("rows_of_results", [1000, 96])
@pytest.mark.parametrize("name", SQUARES)
def test_windows_as_causal_squares(
    name: str, rows_of_results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "SQUARE_WINDOW", 1)
    monkeypatch.setattr(dense, "_has_cudnn", lambda inputs: True)
    attended = Mock(side_effect=dense._attend_edge)
    monkeypatch.setattr(dense, "_attend_edge", attended)
    monkeypatch.setattr(dense, "attend_windowed", Mock(side_effect=AssertionError))
    check_on_a_cpu(SQUARES[name], rows_of_results, monkeypatch)
    assert attended.called


@pytest.mark.parametrize("most_queries", [1000, 13])
@pytest.mark.parametrize(("queries", "cached"), [(100, 0), (100, 7), (5, 40), (30, 31), (1, 0)])
def test_parts_of_queries_see_triangles(queries: int, cached: int, most_queries: int) -> None:
    window = 32
    assert list(query_parts(50, cached, None, 20)) == [(0, 20), (20, 40), (40, 50)]
    parts = list(query_parts(queries, cached, window, most_queries))
    assert [i for part in parts for i in range(*part)] == list(range(queries))
    for begin, end in parts:
        assert 0 < end - begin <= min(window, most_queries)
        assert (cached + begin < window) == (cached + end - 1 < window)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in LARGE if "window" in name])
def test_windows_as_causal_squares_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "SQUARE_WINDOW", 1)
    check(make_case(**{"head_size": 128, "group": 2, "kv_heads": 1, **LARGE[name]}), "cuda")


@pytest.mark.parametrize("most_keys", [64, 100, 1000])
@pytest.mark.parametrize("most_queries", [16, 1000])
def test_chunks_hold_every_query_and_the_keys_it_sees(most_keys: int, most_queries: int) -> None:
    window = 30
    sequences = [(0, 0, 20, 20), (1, 20, 33, 200), (3, 53, 70, 90), (4, 130, 9, 12)]
    seen = []
    for chunks in windowed_chunks(sequences, window, most_keys, most_queries, torch.device("cpu")):
        assert chunks.keys <= most_keys
        assert chunks.queries <= most_queries
        assert chunks.rows[-1] == chunks.keys
        assert chunks.query_starts[-1] == chunks.queries
        row = chunks.query_begin
        for i, sequence in enumerate(chunks.sequences.tolist()):
            queries = int(chunks.query_starts[i + 1] - chunks.query_starts[i])
            begin, end = int(chunks.begins[i]), int(chunks.ends[i])
            assert int(chunks.rows[i + 1] - chunks.rows[i]) == end - begin <= chunks.most_keys
            assert queries <= chunks.most_queries
            assert begin == max(0, end - queries - window + 1)
            seen += [(sequence, row + j, end - queries + j) for j in range(queries)]
            row += queries
    wanted = [(i, row + j, n - new + j) for i, row, new, n in sequences for j in range(new)]
    assert seen == wanted


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, ...]:
    """What PyTorch's operator computes; query i of n sees keys up to `keys - n + i`."""
    assert (dropout, causal, debug, window_size_right) == (0.0, True, False, 0)
    assert query_starts.dtype == key_starts.dtype == torch.int32
    outs, logs = [], []
    group = query.shape[1] // key.shape[1]
    sizes = query_starts.diff().tolist(), key_starts.diff().tolist()
    assert (max(sizes[0]), max(sizes[1])) == (most_queries, most_keys)
    for q, k, v in zip(
        query.double().split(sizes[0]),
        key.double().repeat_interleave(group, 1).split(sizes[1]),
        value.double().repeat_interleave(group, 1).split(sizes[1]),
        strict=True,
    ):
        own = len(k) - len(q) + torch.arange(len(q))[:, None]
        seen = (torch.arange(len(k)) <= own) & (torch.arange(len(k)) >= own - window_size_left)
        logits = torch.einsum("qhd,khd->hqk", q, k) * scale
        logits = logits.masked_fill(~seen, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), v))
        logs.append(logits.logsumexp(-1))
    nothing = torch.empty(0)
    return torch.cat(outs).to(query.dtype), torch.cat(logs, 1).float(), nothing, nothing, nothing


@pytest.mark.parametrize("name", [name for name in SMALL if "window" in name])
def test_what_flash_attention_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_plan, "MIN_QUERIES", 16)
    monkeypatch.setattr(dense_windows, "_flash_on_cpu", dense_windows._flash)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention)
    for module in ("halfbyte.kernels.unpack", "halfbyte.kernels.combine"):
        monkeypatch.setitem(sys.modules, module, interpreted(module))
    check(make_case(head_size=64, group=2, **SMALL[name]), "cpu")


def test_flash_attention_takes_such_arguments() -> None:
    """By its fake kernel, which knows names, order and shapes."""
    chunks = windowed_chunks([(0, 0, 20, 20), (1, 20, 33, 90)], 30, 200, 200, torch.device("cpu"))
    query = torch.empty(53, 8, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(chunks[0].keys, 2, 64, dtype=torch.bfloat16, device="meta")
    out, logs = dense_windows._flash((query, key, key), chunks[0], 30, 0.1)
    assert (out.shape, out.dtype) == ((53, 8, 64), torch.bfloat16)
    assert (logs.shape, logs.dtype) == ((8, 53), torch.float32)


def test_prefill_with_windows_is_chosen() -> None:
    work = config(num_tokens=8192, num_seqs=4, sliding_window=4096)
    assert ATTENTION_BACKENDS.select(work, compute_capability=90).name == "dense"
