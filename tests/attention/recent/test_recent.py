"""Attention to unquantized last tokens on GPUs: interpreted on a CPU, compiled, run on one."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attention.cases import DECODE_CASES, RECENT_CASES, assert_close_to_exact, make_case
from attention.graphs import assert_graph_follows_lengths
from attention.prefill.dense_cases import inputs_of, make_small, prefer_pytorch
from halfbyte.attention import AttentionInputs, AttentionPlans, paged_attention, router
from halfbyte.attention.prefill.dense import DenseAttention
from halfbyte.attention.prefill.sm90 import launcher as sm90
from halfbyte.layouts import PageLayout
from slow import CAPABILITIES, one_in, slow

pytest.importorskip("triton")

from triton_compiler import SHARED_BYTES, compile_kernel
from triton_interpreter import interpreted


def run_packed(inputs: AttentionInputs) -> None:
    """The Triton backend, in the interpreter."""
    interpreted("halfbyte.attention.paged.launcher").run(inputs)


# A tile of 16 rows has three tokens of five heads, and one padding row.
CASES: dict[str, dict[str, Any]] = {
    **RECENT_CASES,
    "group-5": {**RECENT_CASES["several-queries"], "group": 5},
}


@pytest.mark.parametrize(
    "name",
    one_in(
        2,
        (
            slow(name) if name in {"recipe-several-queries", "several-queries", "window"} else name
            for name in CASES
            if name != "prefill"
        ),
    ),
)
def test_in_the_interpreter(name: str) -> None:
    case = make_case(**{**CASES[name], "query_dtype": torch.float32})
    lse = torch.empty(case.query.shape[:2])
    inputs = inputs_of(case, "cpu", lse)
    interpreted("halfbyte.attention.recent.launcher").run_with_recent(inputs, run_packed)
    exact, exact_lse = case.expected()
    torch.testing.assert_close(inputs.out.double(), exact, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [2, 5])
def test_prompts_in_the_interpreter(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """New sequences, whose first rows have no keys in the pages, and others."""
    options: dict[str, Any] = {
        "recent": 20,
        "group": group,
        "transform": {},
        "sinks": True,
        "query_lens": (60, 33, 70, 1, 5),
        "seq_lens": (60, 133, 70, 70, 5),
    }
    case = make_small(options, monkeypatch)
    lse = torch.empty(case.query.shape[:2])
    inputs = inputs_of(case, "cpu", lse)
    launcher = interpreted("halfbyte.attention.recent.launcher")
    launcher.run_with_recent(inputs, partial(router.run_packed, DenseAttention))
    assert_close_to_exact(inputs.out, case)
    torch.testing.assert_close(lse.double(), case.expected()[1], rtol=1e-3, atol=0.1)


@pytest.mark.parametrize(
    ("recent", "query_lens", "seq_lens", "in_one_call"),
    [
        (64, (256, 256), (256, 256), True),
        (20, (90,), (90,), True),
        (20, (60,), (95,), True),  # some queries before the first one pad the call
        slow(20, (60,), (140,), False),  # in several calls
        slow(20, (60, 50), (60, 50), False),
        (20, (40, 10), (40, 10), False),  # the second one is in its ring
        (20, (12, 18), (12, 18), False),
    ],
    ids=str,
)
def test_prompts_whose_result_is_read_where_it_lies(
    recent: int,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    in_one_call: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of batches that PyTorch's attention computes in one call; none of their rows is copied."""
    lengths = {"query_lens": query_lens, "seq_lens": seq_lens}
    options: dict[str, Any] = {"recent": recent, "transform": {}, "sinks": True, **lengths}
    sizes = {"workspace_tokens": 600, "max_queries": 300}
    case = make_small(options, monkeypatch, **sizes)
    launcher = interpreted("halfbyte.attention.recent.launcher")
    if in_one_call:
        monkeypatch.setattr(DenseAttention, "forward", None)  # would be an error
    for lse in (torch.full(case.query.shape[:2], torch.nan), None):
        inputs = inputs_of(case, "cpu", lse)
        inputs.set_output(torch.full_like(inputs.query, torch.nan))
        launcher.run_with_recent(inputs, partial(router.run_packed, DenseAttention))
        assert_close_to_exact(inputs.out, case)
        if lse is not None:
            torch.testing.assert_close(lse.double(), case.expected()[1], rtol=1e-3, atol=0.1)


@pytest.mark.usefixtures("rows_alike")
def test_batch_invariant_rows_are_bitwise_equal() -> None:
    """A prompt in one step of a batch, and alone in two steps."""
    lens: dict[str, Any] = {"query_lens": (40, 1, 9), "seq_lens": (140, 70, 9)}
    case = make_case(**{**RECENT_CASES["d128"], **lens, "kv_heads": 1, "recent": 20})
    together = replace(inputs_of(case, "cpu"), batch_invariant=True)
    run = interpreted("halfbyte.attention.recent.launcher").run_with_recent
    run(together, run_packed)
    recent = together.recent
    assert recent is not None
    first = case.query_lens[0]
    ring = recent.keys.shape[2]
    entry = int(recent.entries[0])
    for begin, end in ((0, 25), (25, first)):
        before = case.seq_lens[0] - first + begin
        for rings, new in ((recent.keys, recent.key), (recent.values, recent.value)):
            for i in range(begin):
                rings[entry, :, (before - begin + i) % ring] = new[i]
        alone = replace(
            together,
            query=case.query[begin:end],
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([before + end - begin], dtype=torch.int32),
            block_tables=case.block_tables[:1],
            plans=AttentionPlans(),
            recent=recent._replace(
                entries=recent.entries[:1],
                key=recent.key[begin:end],
                value=recent.value[begin:end],
            ),
        )
        run(alone, run_packed)
        assert torch.equal(alone.out, together.out[begin:end])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "head_size", "prefill"),
    [
        (torch.bfloat16, 64, True),
        (torch.bfloat16, 128, True),
        (torch.bfloat16, 128, False),
        (torch.float16, 256, True),
        (torch.bfloat16, 256, False),
        (torch.float16, 512, True),
        (torch.float32, 128, True),
        (torch.float32, 256, False),
    ],
)
def test_kernel_compiles(
    dtype: torch.dtype, head_size: int, prefill: bool, capability: int
) -> None:
    from halfbyte.attention.recent import launcher
    from halfbyte.attention.recent.kernel import recent_kernel
    from halfbyte.kernels.formats.dot_operands import dot_operand

    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 8, 16)
    pointer = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    tiles = launcher.choose_tiles(dtype, head_size, prefill)
    names = ("query", "keys", "values", "key", "value", "out")
    usage = compile_kernel(
        recent_kernel,
        {
            **dict.fromkeys((*names, "packed"), pointer),
            **dict.fromkeys(("entries", "starts", "lengths"), "*i32"),
            **dict.fromkeys(("packed_lse", "sinks", "lse"), "*fp32"),
            **dict.fromkeys(("score_scale", "cap"), "fp32"),
        },
        {
            "kv_heads": layout.num_kv_heads,
            "group": 4,
            "ring": 80,
            "head_size": head_size,
            "head_size_v": head_size,
            "padded": head_size,
            "padded_v": head_size,
            "operand": dot_operand(dtype),
            "capped": True,
            "joins": True,
            "by_sequence": prefill,
            "has_sinks": True,
            "has_lse": True,
            "two_loops": prefill,
            "block_m": tiles.block_m,
            "block_n": tiles.block_n,
        },
        capability,
        **launcher.launch_options(tiles, capability),
    )
    # SM86 and SM89 run what is compiled for SM80, with as little memory as SM120.
    assert usage.shared <= min(SHARED_BYTES[capability], SHARED_BYTES[120])
    assert usage.stack <= (384 if dtype == torch.float32 else 32)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, backend: str | None) -> None:
    case = make_case(**CASES[name])
    out, lse = paged_attention(
        case.query.cuda(),
        case.pages.cuda(),
        backend=backend,
        return_lse=True,
        **case.arguments("cuda"),
    )
    assert_close_to_exact(out.cpu(), case)
    torch.testing.assert_close(lse.cpu().double(), case.expected()[1], rtol=1e-3, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("lens", [(512, 512), (700,), (512, 512, 40)], ids=str)
def test_prompts_on_a_gpu(
    lens: tuple[int, ...], head_size: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's attention (in one call, padded, and with another prompt), or by the kernel for
    pages and last tokens."""
    prefer_pytorch(monkeypatch, 256)
    if not at_once:
        monkeypatch.setattr(sm90, "supports", lambda inputs: False)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")
    else:
        launcher = "halfbyte.attention.recent.launcher"
        monkeypatch.setattr(f"{launcher}.run_with_recent", None)  # would be an error
    options: dict[str, Any] = {"recent": 64, "transform": {}, "sinks": True}
    case = make_case(**options, head_size=head_size, query_lens=lens, seq_lens=lens)
    query, pages = case.query.cuda(), case.pages.cuda()
    out, lse = paged_attention(
        query, pages, backend="dense", return_lse=True, **case.arguments("cuda")
    )
    assert_close_to_exact(out.cpu(), case)
    torch.testing.assert_close(lse.cpu().double(), case.expected()[1], rtol=1e-3, atol=0.1)


@pytest.mark.gpu
def test_decode_on_a_gpu() -> None:
    """With the `decode` kernel and means of 64 tokens; `dense` does not support the batch."""
    options: dict[str, Any] = {"recent": 64, "transform": {"segment": 64}}
    case = make_case(**DECODE_CASES["ragged"], **options)
    arguments = case.arguments("cuda")
    out = paged_attention(case.query.cuda(), case.pages.cuda(), backend="cuda", **arguments)
    assert_close_to_exact(out.cpu(), case)
    assert_graph_follows_lengths(case, backend="cuda")
