"""Prefill through unpacked pages: the way on a CPU in Triton's interpreter, the rest on a GPU."""

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from attention.cases import Case, assert_close_to_exact, config, make_case
from halfbyte.attention import (
    ATTENTION_BACKENDS,
    AttentionInputs,
    AttentionPlans,
    dense,
    dense_plan,
    dense_windows,
)
from halfbyte.attention.dense import DenseAttention, uses_cudnn
from halfbyte.attention.dense_plan import key_blocks, query_parts, rounded_up
from halfbyte.attention.dense_windows import windowed_chunks
from halfbyte.layouts import PageLayout
from triton_interpreter import interpreted


@pytest.mark.parametrize("cached", [0, 1, 1023, 1024, 5000, 40000, 200_000])
@pytest.mark.parametrize("most_tokens", [2048, 65536])
def test_key_blocks_cover_the_cached_tokens(cached: int, most_tokens: int) -> None:
    blocks = key_blocks(cached, most_tokens)
    end = 0
    for begin, stop in blocks:
        assert begin == end
        assert stop - begin <= most_tokens
        end = stop
    assert 0 <= cached - end < 1024
    # Few sizes, because cuDNN builds a kernel for each.
    assert {stop - begin for begin, stop in blocks} <= {2**i for i in range(10, 16)}


def test_rounding_leaves_few_sizes_and_little_waste() -> None:
    assert [rounded_up(n) for n in (1, 256, 257, 1500, 2048)] == [256, 256, 320, 1536, 2048]
    assert all(n <= rounded_up(n) <= max(256, n * 1.25) for n in range(1, 5000))
    assert len({rounded_up(n) for n in range(1, 2**15)}) <= 30


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_tokens": 32}, "is for prefill"),
        ({"batch_invariant": True}, "rounds differently"),
        ({"device_type": "cpu"}, "not on a GPU"),
        ({"softcap": 30.0}, "no soft-cap"),
        ({"query_dtype": torch.float32}, "query in bfloat16 or float16"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 64, 128, 8, 16)}, "one head size"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 512, None, 8, 16)}, "up to 256"),
    ],
)
def test_what_it_leaves_to_others(changes: dict[str, Any], reason: str) -> None:
    prompts = {"num_tokens": 8192, "num_seqs": 4}
    assert DenseAttention.can_implement(config(**prompts))[0]
    can, why = DenseAttention.can_implement(config(**{**prompts, **changes}))
    assert not can
    assert reason in why


def test_every_gpu_from_sm80() -> None:
    supported = {c for c in (0, 75, 80, 90, 120) if DenseAttention.is_supported(c)[0]}
    assert supported == {80, 90, 120}


def test_large_heads_go_to_cudnn_on_sm90_alone() -> None:
    """As PyTorch's own choice has it (`check_cudnn_tensor_shapes`)."""
    assert [uses_cudnn(c, 128) for c in (80, 89, 90, 100, 120)] == [False, False, True, True, True]
    assert [c for c in (80, 90, 100, 103, 120) if uses_cudnn(c, 256)] == [90]


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size"), [(8, 4, 128), (1, 32, 128), (8, 8, 64), (16, 1, 256)]
)
def test_memory_for_results_is_bounded(kv_heads: int, group: int, head_size: int) -> None:
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, kv_heads, 16)
    case = make_case(head_size=64, query_lens=(1,), seq_lens=(1,))
    inputs = replace(
        inputs_of(case, "cpu"),
        layout=layout,
        query=torch.empty((0, kv_heads * group, head_size), dtype=torch.bfloat16),
    )
    queries = dense_plan.queries_at_once(inputs)
    row = kv_heads * group * head_size * 2
    results = (dense_plan.MOST_PARTS + 2) * rounded_up(queries) * row
    assert results <= dense_plan.RESULT_BYTES
    assert 2 * queries <= dense_plan.workspace_tokens(inputs)
    assert queries >= 2048


def inputs_of(case: Case, device: str, lse: torch.Tensor | None = None) -> AttentionInputs:
    arguments: dict[str, Any] = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }
    options: dict[str, Any] = dict.fromkeys(("sliding_window", "sinks", "softcap", "given_out"))
    return AttentionInputs(
        query=case.query.to(device),
        pages=case.pages.to(device),
        batch_invariant=False,
        lse=lse,
        plans=AttentionPlans(),
        **{**options, **arguments},
    )


def attend(case: Case, device: str, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The backend itself: on a CPU the selection would not choose it."""
    lse = torch.empty(case.query.shape[:2], device=device) if return_lse else None
    inputs = inputs_of(case, device, lse)
    DenseAttention.forward(inputs)
    return inputs.out.cpu(), None if lse is None else lse.cpu()


def check(case: Case, device: str) -> None:
    out, lse = attend(case, device, True)
    assert_close_to_exact(out, case)
    assert lse is not None
    # K is rounded to bfloat16 once its scale is applied, as the baseline's is.
    torch.testing.assert_close(lse.double(), case.expected()[1], rtol=1e-3, atol=3e-2)
    alone, _ = attend(case, device, False)
    assert_close_to_exact(alone, case)


SMALL: dict[str, dict[str, Any]] = {
    "prefixes": {"query_lens": (20, 33, 17), "seq_lens": (20, 133, 90)},
    "equal-without-prefix": {"query_lens": (256, 256), "seq_lens": (256, 256)},
    "with-decoding-sequences": {
        "query_lens": (1, 40, 3, 12, 0, 30),
        "seq_lens": (50, 140, 3, 64, 9, 30),
    },
    "more-queries-than-the-workspace-holds": {"query_lens": (150, 20), "seq_lens": (190, 20)},
    "sinks-fp8-k": {
        "k_dtype": "fp8",
        "v_dtype": "nvfp4",
        "sinks": True,
        "query_lens": (40, 24),
        "seq_lens": (40, 99),
    },
    "window": {"sliding_window": 20, "query_lens": (20, 33, 17), "seq_lens": (20, 133, 90)},
    "window-over-some": {
        "sliding_window": 30,
        "query_lens": (20, 33, 30, 17, 30),
        "seq_lens": (30, 133, 30, 31, 70),
    },
    "window-of-more-than-the-workspace-holds": {
        "sliding_window": 40,
        "query_lens": (20, 33, 40, 17, 40),
        "seq_lens": (40, 133, 40, 41, 70),
    },
    "window-of-one": {"sliding_window": 1, "query_lens": (20, 33), "seq_lens": (20, 133)},
    "window-sinks-and-decoding-sequences": {
        "sliding_window": 30,
        "sinks": True,
        "query_lens": (1, 40, 3, 12, 0, 30, 70),
        "seq_lens": (50, 140, 3, 64, 9, 30, 70),
    },
}


def check_on_a_cpu(
    options: dict[str, Any], rows_of_results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks, and memory for them, of few tokens."""
    monkeypatch.setattr(dense_plan, "MIN_QUERIES", 16)
    monkeypatch.setattr(dense_plan, "_KEY_BLOCKS", (64, 32))
    monkeypatch.setattr(dense_plan, "WORKSPACE_BYTES", 64 * 2 * 2 * 64 * 2)  # 64 tokens
    for module in ("halfbyte.kernels.unpack", "halfbyte.kernels.combine"):
        monkeypatch.setitem(sys.modules, module, interpreted(module))
    case = make_case(head_size=64, group=2, **options)
    monkeypatch.setattr(
        dense_plan, "RESULT_BYTES", rows_of_results * case.query[0].numel() * case.query.itemsize
    )
    check(case, "cpu")


@pytest.mark.parametrize("rows_of_results", [1000, 96])
@pytest.mark.parametrize("name", SMALL)
def test_dense_attention_on_a_cpu(
    name: str, rows_of_results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_on_a_cpu(SMALL[name], rows_of_results, monkeypatch)


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


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the log of a sum of nothing
def test_combining_more_parts_than_fit_one_launch() -> None:
    combine = interpreted("halfbyte.kernels.combine").combine
    torch.manual_seed(0)
    parts = [(torch.randn(5, 6, 48), torch.randn(6, 5) * 3) for _ in range(11)]
    parts[3] = (torch.zeros(5, 6, 48), torch.full((6, 5), -torch.inf))
    sinks = torch.randn(6)
    out, lse = torch.full((5, 6, 48), torch.nan), torch.full((5, 6), torch.nan)
    combine(parts, sinks, out, lse)
    logs = torch.stack([log.t() for _, log in parts]).double()
    total = torch.cat([logs, sinks.double().expand(1, 5, 6)]).logsumexp(0)
    weights = (logs - total).exp()
    exact = sum(w[..., None] * o for w, (o, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), total, rtol=1e-5, atol=1e-6)


LARGE: dict[str, dict[str, Any]] = {
    "prefixes": {"query_lens": (520, 640), "seq_lens": (520, 1700)},
    "equal-without-prefix": {"query_lens": (512, 512), "seq_lens": (512, 512)},
    "with-decoding-sequences": {
        "query_lens": (1, 530, 3, 100, 0),
        "seq_lens": (50, 1600, 3, 140, 9),
    },
    "sinks": {"sinks": True, "query_lens": (512,), "seq_lens": (1700,)},
    "bfloat16": {"k_dtype": "bfloat16", "query_lens": (512,), "seq_lens": (1600,)},
    "head-size-64": {"head_size": 64, "query_lens": (512,), "seq_lens": (1600,)},
    "head-size-256": {"head_size": 256, "query_lens": (512,), "seq_lens": (1600,)},
    "window": {"sliding_window": 300, "query_lens": (520, 640), "seq_lens": (520, 1700)},
    "window-over-some": {
        "sliding_window": 1024,
        "query_lens": (520, 600, 1024),
        "seq_lens": (1024, 1700, 1024),
    },
    "window-sinks-and-decoding-sequences": {
        "sliding_window": 128,
        "sinks": True,
        "query_lens": (1, 530, 600, 3, 100, 0),
        "seq_lens": (50, 1600, 600, 3, 140, 9),
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_dense_attention_on_a_gpu(name: str) -> None:
    check(make_case(**{"head_size": 128, "group": 2, "kv_heads": 1, **LARGE[name]}), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in LARGE if "window" in name])
def test_windows_as_causal_squares_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "SQUARE_WINDOW", 1)
    check(make_case(**{"head_size": 128, "group": 2, "kv_heads": 1, **LARGE[name]}), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_flash_attention_on_a_gpu(head_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other GPUs than SM90 take."""
    monkeypatch.setattr(dense, "uses_cudnn", lambda *_: False)
    for sizes in LARGE.values():
        check(make_case(**{"group": 2, "kv_heads": 1, **sizes, "head_size": head_size}), "cuda")


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


@pytest.mark.gpu
def test_a_gpu_chooses_it_for_prefill() -> None:
    case = make_case(head_size=128, query_lens=(1024,), seq_lens=(1024,))
    assert ATTENTION_BACKENDS.select(inputs_of(case, "cuda").config()).name == "dense"
