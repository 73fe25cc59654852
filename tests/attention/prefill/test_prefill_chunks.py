"""Prefill with halfbyte's kernel: how batches are split, and the kernel on rows, also on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.cases import config, dense, make_case
from attention.prefill.dense_cases import LARGE, SMALL, assert_dense, inputs_of, make_small
from halfbyte.attention import ATTENTION_BACKENDS, AttentionInputs, AttentionPlans
from halfbyte.attention.paged.plan import Tiles, TritonTarget, choose_row_tiles
from halfbyte.attention.prefill import plan as dense_plan
from halfbyte.attention.prefill.chunks import make_chunks
from halfbyte.layouts import PageLayout
from slow import slow
from triton_interpreter import interpreted

OTHERS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 20.0, "query_lens": (520, 70), "seq_lens": (520, 1700)},
    "softcap-and-window": {
        "softcap": 20.0,
        "sinks": True,
        "sliding_window": 200,
        "query_lens": (520, 70, 3),
        "seq_lens": (520, 1700, 90),
    },
    "wider-keys": {
        "head_size": 192,
        "head_size_v": 128,
        "query_lens": (520, 70),
        "seq_lens": (520, 1700),
    },
    "wider-values": {
        "head_size": 80,
        "head_size_v": 256,
        "query_lens": (520, 70),
        "seq_lens": (520, 1700),
    },
    "short-prompts": {"query_lens": (70, 300, 64, 63), "seq_lens": (70, 300, 64, 63)},
    "group-of-three": {"group": 3, "query_lens": (70, 300), "seq_lens": (90, 300)},
    "group-of-200": {"group": 200, "query_lens": (70,), "seq_lens": (90,)},
    "float16": {"query_dtype": torch.float16, "query_lens": (70, 300), "seq_lens": (90, 300)},
}


@pytest.mark.parametrize("tokens_per_tile", [1, 5, 16, 64])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("max_keys", [200, 260, 1000])
def test_work_holds_every_query_once(
    max_keys: int, window: int | None, tokens_per_tile: int
) -> None:
    sequences = [(0, 0, 20, 20), (1, 20, 33, 200), (3, 53, 70, 90), (4, 130, 9, 12)]
    seen = []
    device = torch.device("cpu")
    for chunks in make_chunks(sequences, window, max_keys, tokens_per_tile, device):
        keys = chunks.keys
        assert keys.num_rows <= max_keys
        assert chunks.work.dtype == torch.int32
        table = torch.arange(5)[keys.sequences].tolist()
        counts = (keys.ends - keys.begins).tolist()
        assert (sum(counts), max(counts)) == (keys.num_rows, keys.max_keys)
        ends = (keys.rows + keys.ends - keys.begins).tolist()
        assert keys.rows.tolist() == [0, *ends[:-1]]
        for token, count, row, position, *_ in chunks.work.tolist():
            assert 1 <= count <= tokens_per_tile
            i = keys.rows.tolist().index(row)
            assert position + count <= counts[i]
            begin = int(keys.begins[i])
            for j in range(count):
                own = begin + position + j
                assert begin <= (0 if window is None else max(0, own - window + 1))
                seen.append((table[i], token + j, own))
        longest = chunks.work[:, 3].tolist()
        assert longest == sorted(longest, reverse=True)
    wanted = [(i, row + j, n - new + j) for i, row, new, n in sequences for j in range(new)]
    assert sorted(seen) == wanted


@pytest.mark.parametrize("group", [1, 3, 8, 40])
@pytest.mark.parametrize("tiles", [Tiles(16, 16, 4, 2), Tiles(32, 64, 4, 2)], ids=str)
def test_rows_of_others_are_not_touched(tiles: Tiles, group: int) -> None:
    """Rows and keys of other sequences (NaN here) do not matter."""
    run_rows = interpreted("halfbyte.attention.prefill.rows").run_rows
    torch.manual_seed(0)
    query = torch.randn(30, 2 * group, 16)
    key, value = torch.randn(60, 2, 16), torch.randn(60, 2, 32)
    sequences = [(0, 3, 21, 21), (1, 27, 2, 33)]
    (chunks,) = make_chunks(sequences, None, 100, tiles.tokens(group), torch.device("cpu"))
    key[54:], value[54:] = torch.nan, torch.nan
    out, lse = torch.full((30, 2 * group, 32), 7.0), torch.full((30, 2 * group), 7.0)
    sinks = torch.randn(2 * group)
    layout = PageLayout("bfloat16", "bfloat16", 16, 32, 2, 16)
    inputs = AttentionInputs(
        query=query,
        pages=torch.zeros((1, layout.page_bytes), dtype=torch.uint8),
        layout=layout,
        query_start_loc=torch.tensor([0, 21, 23], dtype=torch.int32),
        seq_lens=torch.tensor([21, 33], dtype=torch.int32),
        block_tables=torch.zeros((2, 3), dtype=torch.int32),
        scale=-0.3,
        k_scale=1.0,
        v_scale=1.0,
        sliding_window=None,
        sinks=sinks,
        softcap=None,
        batch_invariant=False,
        given_out=out,
        lse=lse,
        plans=AttentionPlans(),
    )
    run_rows(inputs, key, value, chunks.work, tiles)
    for _, row, new, length in sequences:
        first = 0 if row == 3 else 21
        k, v = (x[first : first + length].double() for x in (key, value))
        exact, exact_lse = dense(
            query[row : row + new], k, v, length, -0.3, torch.float64, sinks=sinks
        )
        for ours, wanted in ((out, exact), (lse, exact_lse)):
            torch.testing.assert_close(ours[row : row + new].double(), wanted, rtol=1e-5, atol=1e-5)
    for row in (0, 1, 2, 24, 25, 26, 29):
        assert bool((out[row] == 7.0).all())
        assert bool((lse[row] == 7.0).all())


@pytest.mark.parametrize(
    "name",
    [
        "window",
        "softcap",
        "window-over-some",
        "window-larger-than-the-workspace",
    ],
)
def test_short_prompts_without_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts are too short for PyTorch's attention."""
    assert_dense(make_small(SMALL[name], monkeypatch, pytorch_from=1000), "cpu")


@pytest.mark.parametrize(
    ("head_size", "head_size_v", "softcap"),
    [(16, 16, 5.0), (80, 80, None), slow(80, 80, 5.0), slow(256, 256, 5.0), (32, 192, 5.0)],
)
def test_windows_with_heads_of_every_size(
    head_size: int, head_size_v: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {"query_lens": (20, 90), "seq_lens": (20, 300)}
    options = {"sliding_window": 70, "sinks": True, "softcap": softcap}
    sizes = {"head_size": head_size, "head_size_v": head_size_v}
    small = {"workspace_tokens": 2048, "pytorch_from": 1000}
    case = make_small({**lengths, **options, **sizes}, monkeypatch, **small)
    plan = dense_plan.make_plan(inputs_of(case, "cpu"), 16)
    assert not plan.split_off
    assert not plan.long
    assert_dense(case, "cpu")


@pytest.mark.parametrize("capability", [80, slow(86), 90, slow(100), slow(120)])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((64, 64), {"windowed": True, "has_sinks": True}),
        ((64, 64), {"has_lse": True}),
        ((128, 128), {"windowed": True}),
        ((128, 128), {"capped": True}),
        ((192, 128), {}),
        ((256, 256), {"windowed": True, "capped": True}),
    ],
    ids=str,
)
def test_kernel_compiles(sizes: tuple[int, int], options: dict[str, bool], capability: int) -> None:
    pytest.importorskip("triton")
    import triton.language as tl

    from halfbyte.attention.prefill.rows import row_constants, rows_kernel
    from triton_compiler import compile_kernel

    target = TritonTarget(capability, 100)
    window = 128 if options.get("windowed") else None
    tiles = choose_row_tiles(*sizes, window, target)
    switches = ("windowed", "capped", "has_sinks", "has_lse")
    usage = compile_kernel(
        rows_kernel,
        {
            **dict.fromkeys(("query", "key", "value", "out"), "*bf16"),
            **dict.fromkeys(("sinks", "lse"), "*fp32"),
            **dict.fromkeys(("score_scale", "cap"), "fp32"),
            "tiles": "*i32",
        },
        {
            **row_constants(8, 4, *sizes, tiles),
            **{name: options.get(name, False) for name in switches},
            "operand": tl.bfloat16,
            "folded": not options.get("capped"),
        },
        capability,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    assert usage.shared <= target.shared_bytes
    assert usage.stack <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("name", OTHERS)
def test_chunks_on_a_gpu(name: str) -> None:
    options: dict[str, Any] = {"head_size": 128, "group": 2, "kv_heads": 1, **OTHERS[name]}
    assert_dense(make_case(**options), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [48, 64, 96, 256])
def test_windows_on_a_gpu(head_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sizes in LARGE.items():
        if "window" in name:
            assert_dense(
                make_case(**{"group": 8, "kv_heads": 2, **sizes, "head_size": head_size}), "cuda"
            )


@pytest.mark.parametrize(
    "options", [{"sliding_window": 4096}, {"softcap": 30.0}, {"sliding_window": 128}], ids=str
)
def test_is_chosen_for_prefill(options: dict[str, Any]) -> None:
    work = config(num_tokens=8192, num_seqs=4, **options)
    assert ATTENTION_BACKENDS.select(work, compute_capability=90).name == "dense"


def test_calls_beyond_the_workspace_take_the_general_kernel() -> None:
    case = make_case(head_size=64, query_lens=(70, 70), seq_lens=(70, 300), softcap=5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_plan, "workspace_tokens", lambda inputs: 100)
        plan = dense_plan.make_plan(inputs_of(case, "cpu"), 16)
    assert [chunks.keys.num_rows for chunks in plan.chunks] == [70]
    assert [part.seq_lens.tolist() for part in plan.split_off] == [[300]]
    assert plan.long == []


@pytest.mark.parametrize(
    ("options", "lens", "takers"),
    [
        # Few new tokens; many cached ones for each; fewer.
        ({}, [(3, 400), (12, 4000), (12, 300), (130, 9000)], "decode general own own"),
        ({"sliding_window": 100}, [(12, 4000), (600, 4000), (3, 9)], "own own decode"),
        # Two dozen sequences of one tile of the general kernel each, and longer ones.
        ({}, [(16, 600)] * 23 + [(17, 600)], " ".join(["own"] * 24)),
        ({}, [(16, 600), (17, 600)] * 24, " ".join(["general own"] * 24)),
        ({}, [(16, 271)] * 24, " ".join(["own"] * 24)),
        ({"sliding_window": 300}, [(16, 600)] * 24, " ".join(["own"] * 24)),
        # PyTorch's attention: many queries, many keys, or prompts that fit in one call.
        ({}, [(2048, 2048), (700, 700), (512, 9000)], "pytorch own pytorch"),
        ({}, [(512, 512)] * 16, " ".join(["pytorch"] * 16)),
        ({}, [(512, 512)] * 2, "own own"),
        ({}, [(256, 256)] * 16, " ".join(["pytorch"] * 16)),
        ({}, [(2048, 1984)] * 4, " ".join(["pytorch"] * 4)),
        ({}, [(2048, 1990)] * 4, " ".join(["own"] * 4)),
        ({}, [(1290, 1280), (1344, 1280), (1344, 1279)], "pytorch pytorch own"),
        ({}, [(513, 513)] * 16, " ".join(["own"] * 16)),
        ({"softcap": 5.0}, [(2048, 2048), (12, 4000)], "own general"),
        ({"head_size": 64}, [(2048, 2048), (12, 4000)], "own general"),
        # Larger than the workspace.
        ({}, [(300, 70_000), (30, 70_000)], "pytorch general"),
        ({"softcap": 5.0}, [(300, 70_000)], "general"),
        # A window larger than the workspace that masks nothing.
        ({"sliding_window": 70_000}, [(300, 300), (2048, 2048)], "own pytorch"),
    ],
    ids=str,
)
def test_who_takes_which_sequence(
    options: dict[str, Any], lens: list[tuple[int, int]], takers: str
) -> None:
    queries, lengths = ([pair[i] for pair in lens] for i in (0, 1))
    case = make_case(head_size=16, query_lens=(1,), seq_lens=(1,))
    layout = PageLayout("nvfp4", "nvfp4", options.get("head_size", 128), None, 8, 16)
    inputs = replace(
        inputs_of(case, "cpu"),
        layout=layout,
        query=torch.empty((0, 32, layout.head_size), dtype=torch.bfloat16),
        query_start_loc=torch.tensor([0, *queries]).cumsum(0),
        seq_lens=torch.tensor(lengths),
        block_tables=torch.zeros((len(lens), 1), dtype=torch.int32),
        softcap=options.get("softcap"),
        sliding_window=options.get("sliding_window"),
    )
    plan = dense_plan.make_plan(inputs, 16)
    taken: dict[int, str] = {}
    for part in plan.split_off:
        rows = range(sum(queries)) if part.rows is None else part.rows.tolist()
        sizes = {"num_tokens": len(rows), "num_seqs": len(part.seq_lens)}
        work = config(layout=layout, split_off=True, **sizes)
        backend = ATTENTION_BACKENDS.select(work, compute_capability=90).name
        taken |= dict.fromkeys(rows, {"cuda": "decode", "triton": "general"}[backend])
    for chunks in plan.chunks:
        for token, count, *_ in chunks.work.tolist():
            taken |= dict.fromkeys(range(token, token + count), "own")
    for long in plan.long:
        for begin in range(long.query_begin, sum(queries), long.stride)[: long.count]:
            taken |= dict.fromkeys(range(begin, begin + long.queries), "pytorch")
    if plan.empty is not None:
        taken |= dict.fromkeys(plan.empty.tolist(), "nobody")
    wanted = [
        "nobody" if i < n - length else taker
        for (n, length), taker in zip(lens, takers.split(), strict=True)
        for i in range(n)
    ]
    assert [taken[i] for i in range(sum(queries))] == wanted
