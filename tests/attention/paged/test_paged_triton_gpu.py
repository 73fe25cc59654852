"""The Triton attention kernel where there is a GPU."""

from typing import Any

import pytest
import torch

from attention.cases import (
    DECODE_CASES,
    TRANSFORM_CASES,
    Case,
    assert_close_to_exact,
    make_case,
)
from attention.graphs import assert_graph_follows_lengths
from gpu_sync import waiting_is_an_error
from halfbyte.attention import paged_attention
from halfbyte.attention.paged.plan import operand_dtype
from kvcache.page_arithmetic import KERNEL_DTYPES
from kvcache.transforms import on

pytest.importorskip("triton")

SMALL: dict[str, Any] = {"query_lens": (1, 5, 1), "seq_lens": (1, 40, 77)}
PREFILL_CASES: dict[str, dict[str, Any]] = {
    "prompts": {"query_lens": (300, 17, 1, 129), "seq_lens": (300, 17, 200, 500)},
    "bfloat16": {"k_dtype": "bfloat16", "query_lens": (200, 70), "seq_lens": (200, 300)},
    "fp8-window": {
        "k_dtype": "fp8",
        "sliding_window": 60,
        "sinks": True,
        "query_lens": (200, 70),
        "seq_lens": (200, 300),
    },
    "d256": {"head_size": 256, "query_lens": (200, 70), "seq_lens": (200, 300), "kv_heads": 1},
    "d80-softcap": {
        "k_dtype": "float16",
        "head_size": 80,
        "softcap": 5.0,
        "query_dtype": torch.float16,
        "query_lens": (200, 70),
        "seq_lens": (200, 300),
    },
    "mxfp4-mqa": {
        "k_dtype": "mxfp4",
        "group": 16,
        "kv_heads": 1,
        "query_lens": (100, 0, 40),
        "seq_lens": (100, 9, 300),
    },
    "d512": {
        "k_dtype": "bfloat16",
        "head_size": 512,
        "kv_heads": 1,
        "query_lens": (50,),
        "seq_lens": (90,),
    },
}
FORMAT_CASES: dict[str, dict[str, Any]] = {
    f"{dtype}-{str(query_dtype).removeprefix('torch.')}": {
        "k_dtype": dtype,
        "query_dtype": query_dtype,
        "query_lens": (1, 1, 2),
        "seq_lens": (1, 40, 300),
    }
    for dtype in KERNEL_DTYPES
    for query_dtype in (torch.bfloat16, torch.float16, torch.float32)
}
SHAPE_CASES: dict[str, dict[str, Any]] = {
    "d16": {"head_size": 16},
    "d80": {"head_size": 80},
    "d96-v80-fp8": {"head_size": 96, "head_size_v": 80, "k_dtype": "fp8"},
    "d512-v64-fp8": {"head_size": 512, "head_size_v": 64, "k_dtype": "fp8"},
    "d512-nvfp4": {"head_size": 512, "kv_heads": 1},
    "mqa-128": {"group": 128, "kv_heads": 1, "k_dtype": "bfloat16", "head_size": 128},
    "group-40": {"group": 40, "kv_heads": 1},
    "sm100": {"v_scale_layout": "sm100", "head_size": 128},
    "page-1": {"block_size": 1, "k_dtype": "fp8"},
    "page-8": {"block_size": 8},
    "page-256": {"block_size": 256, "k_dtype": "bfloat16", "head_size": 128},
    "fp16-k-mxfp4-v": {"k_dtype": "float16", "v_dtype": "mxfp4", "order": "NHD"},
}
LENGTHS: dict[str, Any] = {"query_lens": (1, 2, 1, 1), "seq_lens": (1, 40, 300, 0)}
GPU_CASES = {
    **{f"decode-{name}": case for name, case in DECODE_CASES.items()},
    **{f"prefill-{name}": case for name, case in PREFILL_CASES.items()},
    **{f"format-{name}": case for name, case in FORMAT_CASES.items()},
    **{f"shape-{name}": {**LENGTHS, **case} for name, case in SHAPE_CASES.items()},
}
RECIPE_CASES = {
    **TRANSFORM_CASES,
    **{
        f"segment-64-{name}": {**case, "transform": {"segment": 64}}
        for name, case in TRANSFORM_CASES.items()
        if not case["transform"]
    },
}


def run(case: Case, **options: Any) -> Any:
    arguments = {**case.arguments(), **options}
    on_gpu: dict[str, Any] = {name: on(value, "cuda") for name, value in arguments.items()}
    query, pages = on_gpu.pop("query", case.query.cuda()), on_gpu.pop("pages", case.pages.cuda())
    return paged_attention(query, pages, backend="triton", **on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "batch_invariant"),
    [(name, False) for name in GPU_CASES]
    + [(name, True) for name in GPU_CASES if not name.startswith("format")],
)
def test_triton_attention(name: str, batch_invariant: bool) -> None:
    case = make_case(**GPU_CASES[name])
    out, lse = run(case, return_lse=True, batch_invariant=batch_invariant)
    assert_close_to_exact(out.cpu(), case)
    exact, exact_lse = case.expected()
    if case.query.dtype == torch.float16 and (
        operand_dtype(case.layout.k_dtype, torch.float16) == torch.bfloat16
    ):
        pytest.xfail("float16 queries lose three bits where keys need bfloat16's range")
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-4, atol=1e-4)
    if case.query.dtype == torch.float32:
        torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(RECIPE_CASES))
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch-invariant"])
def test_triton_attention_to_k_that_a_recipe_changed(name: str, batch_invariant: bool) -> None:
    case = make_case(**RECIPE_CASES[name])
    out, lse = run(case, return_lse=True, batch_invariant=batch_invariant)
    assert_close_to_exact(out.cpu(), case)
    torch.testing.assert_close(lse.cpu().double(), case.expected()[1], rtol=1e-3, atol=5e-2)
    if case.query.dtype == torch.float32:
        exact, _ = case.expected()
        torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ragged", "several-queries-window", "d256", "fp8", "bfloat16"])
def test_triton_attention_batch_invariant_rows_are_bitwise_equal(name: str) -> None:
    case = make_case(**DECODE_CASES[name])
    together = run(case, batch_invariant=True)
    # Another prompt in the batch, and every sequence alone.
    starts = case.arguments()["query_start_loc"].tolist()
    prompt = torch.randn(300, *case.query.shape[1:]).to(case.query.dtype)
    with_prompt = run(
        case,
        query=torch.cat([prompt, case.query]),
        query_start_loc=torch.tensor([0, *(300 + s for s in starts)], dtype=torch.int32),
        seq_lens=torch.tensor([0, *case.seq_lens], dtype=torch.int32),
        block_tables=torch.cat([case.block_tables[:1], case.block_tables]),
        batch_invariant=True,
    )
    assert torch.equal(with_prompt[300:], together)
    for i, n in enumerate(case.query_lens):
        alone = run(
            case,
            query=case.query[starts[i] : starts[i + 1]],
            query_start_loc=torch.tensor([0, n], dtype=torch.int32),
            seq_lens=torch.tensor([case.seq_lens[i]], dtype=torch.int32),
            block_tables=case.block_tables[i : i + 1, : max(1, -(-case.seq_lens[i] // 16))],
            batch_invariant=True,
        )
        assert torch.equal(alone, together[starts[i] : starts[i + 1]])


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch-invariant"])
def test_triton_attention_in_a_graph_follows_changing_lengths(batch_invariant: bool) -> None:
    case = make_case(**{**DECODE_CASES["ragged"], "k_dtype": "fp8"})
    assert_graph_follows_lengths(case, backend="triton", batch_invariant=batch_invariant)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["nvfp4", "mxfp4", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("queries", [1, 40], ids=["decode", "prompt"])
def test_triton_attention_marks_nan_and_only_where_it_is(dtype: str, queries: int) -> None:
    case = make_case(k_dtype=dtype, query_lens=(queries, queries), seq_lens=(40, 40))
    page, offset = int(case.slots[1][0]) // 16, int(case.slots[1][0]) % 16
    views = case.layout.views(case.pages)
    marked = views.v_data if views.v_scale is None else views.v_scale
    marked[page, offset, 0, 0] = 0xFF
    width = 1 if views.v_scale is None else case.layout.v_dtype.scale_block_size
    out = run(case).cpu()
    assert not out[:queries].isnan().any()
    assert out[queries:, :4, :width].isnan().all()
    assert not out[queries:, :4, width:].isnan().any()
    assert not out[queries:, 4:].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [100, -100])
def test_triton_attention_queries_of_any_magnitude(exponent: int) -> None:
    case = make_case(**SMALL)
    expected = run(case)
    case.query *= 2.0**exponent
    assert torch.equal(run(case, scale=case.arguments()["scale"] * 2.0**-exponent), expected)


@pytest.mark.gpu
def test_triton_attention_never_waits_for_the_gpu() -> None:
    case = make_case(**SMALL)
    arguments: dict[str, Any] = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }
    query, pages = case.query.cuda(), case.pages.cuda()
    expected = paged_attention(query, pages, backend="triton", **arguments)
    with waiting_is_an_error():
        out = paged_attention(query, pages, backend="triton", **arguments)
    assert torch.equal(out, expected)
