"""The CUDA decode kernel: when it is selected, and its results on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.cases import (
    DECODE_CASES,
    Case,
    assert_close_to_exact,
    config,
    make_case,
)
from attention.graphs import assert_graph_follows_lengths
from halfbyte.attention import ATTENTION_BACKENDS, paged_attention
from halfbyte.dispatch import NoImplementationError
from halfbyte.layouts import PageLayout

pytest.importorskip("cuda.bindings.nvrtc")


def test_formats_too_wide_for_a_gpu_are_refused() -> None:
    layout = PageLayout("bfloat16", "bfloat16", 256, None, 8, 16)
    work = config(layout=layout, compute_capability=89)
    with pytest.raises(NoImplementationError, match="more shared memory"):
        ATTENTION_BACKENDS.select(work, explicit="cuda", compute_capability=89)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_selection_on_every_gpu(capability: int, head_size: int) -> None:
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 8, 16)
    work = config(layout=layout, compute_capability=capability)
    assert ATTENTION_BACKENDS.select(work, compute_capability=capability).name == "cuda"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": PageLayout("mxfp4", "nvfp4", 128, None, 8, 16)}, "not K in mxfp4"),
        ({"layout": PageLayout("fp8", "float16", 128, None, 8, 16)}, "V in float16 for queries of"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 80, None, 8, 16)}, "head sizes 64, 128 and 256"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 64, None, 8, 8)}, "multiple of 16 tokens"),
        (
            {"layout": PageLayout("nvfp4", "nvfp4", 64, None, 8, 16, "HND", "sm100")},
            "linear V scales",
        ),
        ({"query_dtype": torch.float32}, "query in bfloat16 or float16"),
        ({"num_tokens": 4096}, "a few query tokens per sequence"),
        ({"device_type": "cpu"}, "not on a GPU"),
        ({"aligned_pages": False}, "needs pages aligned to 16 bytes, less than 4 GiB apart"),
    ],
    ids=["mxfp4", "float16", "d80", "page-8", "sm100", "float32", "prefill", "cpu", "padding"],
)
def test_selection_falls_back_and_an_explicit_choice_says_why(changes: dict, reason: str) -> None:
    work = config(**changes)
    assert ATTENTION_BACKENDS.select(work, compute_capability=90).name != "cuda"
    with pytest.raises(NoImplementationError, match=f"'cuda' cannot be used here: .*{reason}"):
        ATTENTION_BACKENDS.select(work, explicit="cuda", compute_capability=90)


@pytest.mark.parametrize(("capability", "reason"), [(0, "needs an NVIDIA GPU"), (75, "8.0")])
def test_machines_without_the_kernel(capability: int, reason: str) -> None:
    verdict = ATTENTION_BACKENDS.explain(compute_capability=capability)[0]
    assert (verdict.name, verdict.usable) == ("cuda", False)
    assert reason in verdict.reason


def run(case: Case, **options: Any) -> Any:
    pages = options.pop("pages", case.pages.cuda())
    arguments = {**case.arguments("cuda"), **options}
    return paged_attention(case.query.cuda(), pages, backend="cuda", **arguments)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("group", [4, 32], ids=["decode", "decode-wgmma-of-whole-pages"])
def test_another_than_the_current_device(group: int) -> None:
    case = make_case(head_size=128, group=group, kv_heads=1, query_lens=(1, 1), seq_lens=(40, 999))
    pages, query = case.pages.to("cuda:1"), case.query.to("cuda:1")
    out = paged_attention(query, pages, backend="cuda", **case.arguments("cuda:1"))
    assert out.device == torch.device("cuda:1")
    assert_close_to_exact(out.cpu(), case)
    assert torch.cuda.current_device() == 0


_LENGTHS: dict[str, Any] = {"query_lens": (1,) * 8, "seq_lens": (1, 15, 64, 65, 128, 129, 1000, 0)}
WIDE_CASES: dict[str, dict[str, Any]] = {
    "group-32-d128": {"head_size": 128, "group": 32, **_LENGTHS},
    "group-32-d64-page-64": {"head_size": 64, "group": 32, "block_size": 64, **_LENGTHS},
    "group-32-d256-page-64": {"head_size": 256, "group": 32, "block_size": 64, **_LENGTHS},
    "group-64-d128-page-48": {"head_size": 128, "group": 64, "block_size": 48, **_LENGTHS},
    "group-40-d256": {"head_size": 256, "group": 40, "kv_heads": 1, **_LENGTHS},
    "group-32-k256-v64": {"head_size": 256, "head_size_v": 64, "group": 32, **_LENGTHS},
    "group-40-k64-v256": {"head_size": 64, "head_size_v": 256, "group": 40, **_LENGTHS},
    "group-32-k128-v64": {"head_size": 128, "head_size_v": 64, "group": 32, **_LENGTHS},
    "group-32-d256-nhd": {"head_size": 256, "group": 32, "order": "NHD", **_LENGTHS},
    "wgmma-several-queries-window-sinks": {
        "head_size": 128,
        "group": 8,
        "sinks": True,
        "sliding_window": 90,
        "query_lens": (9, 4, 0, 5, 17, 4),
        "seq_lens": (9, 64, 70, 132, 2000, 3001),
    },
    "wgmma-ragged": {
        "head_size": 128,
        "group": 32,
        "kv_heads": 1,
        "query_lens": (1,) * 40,
        "seq_lens": tuple(range(1, 8000, 200)),
    },
}
"""Beyond 16 query columns: `attention/decode/decode_wgmma.cu` on SM90."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*DECODE_CASES, *WIDE_CASES])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch-invariant"])
def test_cuda_attention(name: str, batch_invariant: bool) -> None:
    case = make_case(**{**DECODE_CASES, **WIDE_CASES}[name])
    out, lse = run(case, return_lse=True, batch_invariant=batch_invariant)
    assert_close_to_exact(out.cpu(), case)
    _, exact_lse = case.expected()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*DECODE_CASES, *WIDE_CASES])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch-invariant"])
def test_cuda_attention_to_k_that_a_recipe_changed(name: str, batch_invariant: bool) -> None:
    changes = {"k_dtype": "nvfp4", "transform": {"segment": 64}}
    case = make_case(**{**DECODE_CASES, **WIDE_CASES}[name] | changes)
    out, lse = run(case, return_lse=True, batch_invariant=batch_invariant)
    assert_close_to_exact(out.cpu(), case)
    _, exact_lse = case.expected()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-3, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"center": False}, {"rotate": False}, {"first_tokens": 0}])
def test_cuda_attention_to_parts_of_a_recipe(options: dict[str, bool]) -> None:
    case = make_case(head_size=128, transform={"segment": 64, **options}, **_LENGTHS)
    assert_close_to_exact(run(case).cpu(), case)


def test_means_of_fewer_tokens_than_a_tile_are_left_to_others() -> None:
    can, reason = ATTENTION_BACKENDS.get("cuda").can_implement(config(transform=True, segment=16))
    assert (can, reason) == (False, "means of multiples of 64 tokens, not 16")


@pytest.mark.gpu
@pytest.mark.parametrize("group", [*range(1, 17), 24, 48, 96, 128])
def test_cuda_attention_of_every_group(group: int) -> None:
    kv_heads = 2 if group <= 16 else 1
    case = make_case(head_size=128, group=group, kv_heads=kv_heads, sinks=True, **_LENGTHS)
    assert_close_to_exact(run(case).cpu(), case)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("group", [4, 32])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_cuda_attention_of_every_page(block_size: int, group: int, order: str) -> None:
    lengths: dict[str, Any] = {
        "query_lens": (1,) * 5,
        "seq_lens": (1, block_size, 255, 700, 1025),
    }
    case = make_case(head_size=128, group=group, block_size=block_size, order=order, **lengths)
    assert_close_to_exact(run(case).cpu(), case)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("group", [20, 64])
def test_cuda_attention_of_whole_pages(
    block_size: int, head_size: int, order: str, group: int
) -> None:
    """Of one KV head, in rows that other layers' pages share; what was never written is NaN."""
    case = make_case(
        head_size=head_size,
        group=group,
        kv_heads=1,
        block_size=block_size,
        order=order,
        sliding_window=300,
        query_lens=(1, 2, 1, 3, 1, 1),
        seq_lens=(1, 63, 0, 64, 129, 2000),
    )
    count, size = case.pages.shape
    rows = torch.full((count, 3 * size + 16), 0xFF, dtype=torch.uint8, device="cuda")
    pages = rows[:, size : 2 * size]
    pages.copy_(case.pages)
    assert_close_to_exact(run(case, pages=pages).cpu(), case)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [4, 32])
def test_cuda_attention_of_a_single_page(group: int) -> None:
    case = make_case(head_size=128, group=group, kv_heads=1, query_lens=(1,), seq_lens=(9,))
    page = int(case.block_tables[0, 0])
    case = replace(
        case,
        pages=case.pages[page : page + 1].clone(),
        block_tables=torch.zeros_like(case.block_tables),
        slots=[case.slots[0] % 16],
    )
    assert_close_to_exact(run(case).cpu(), case)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [4, 32])
def test_cuda_attention_without_pages(group: int) -> None:
    for queries in (0, 1):
        case = make_case(
            head_size=128,
            group=group,
            kv_heads=1,
            query_lens=(queries, queries),
            seq_lens=(0, 0),
            sinks=True,
        )
        for count in (0, 1, 3):
            out = run(case, pages=case.pages[:count].cuda())
            assert torch.equal(out.cpu(), torch.zeros(2 * queries, group, 128, dtype=out.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [4, 32])
def test_cuda_attention_in_a_graph_with_changing_parts(group: int) -> None:
    """Rows of a single unit and rows of several units are written by different code."""
    count, pages = 300, 512
    case = make_case(
        head_size=128, group=group, kv_heads=1, query_lens=(1,) * count, seq_lens=(64,) * count
    )
    lengths = torch.full((count,), 64, dtype=torch.int32)
    tables = torch.randint(len(case.pages), (count, pages), dtype=torch.int32)
    query, cache, seq_lens, block_tables = (
        x.cuda() for x in (case.query, case.pages.fill_(0x33), lengths, tables)
    )
    arguments = {**case.arguments(), "seq_lens": seq_lens, "block_tables": block_tables}
    arguments["query_start_loc"] = arguments["query_start_loc"].cuda()
    for name in ("k_scale", "v_scale"):
        arguments[name] = torch.tensor(arguments[name]).cuda()
    out = torch.empty_like(query)

    def step() -> None:
        paged_attention(query, cache, backend="cuda", out=out, **arguments)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    # All values are equal, so their weighted mean is exact in any order of sums.
    ended = out.clone()
    for longest in (16 * pages, 64, 16 * pages):
        seq_lens[::7] = longest
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out, ended, rtol=2**-7, atol=0)


@pytest.mark.gpu
def test_cuda_attention_batch_invariant_rows_are_bitwise_equal() -> None:
    case = make_case(**DECODE_CASES["ragged"])
    together = run(case, batch_invariant=True).cpu()
    for i in (0, 7, 19):
        arguments: dict[str, Any] = {
            **case.arguments(),
            "query_start_loc": torch.tensor([0, 1], dtype=torch.int32).cuda(),
            "seq_lens": torch.tensor([case.seq_lens[i]], dtype=torch.int32).cuda(),
            "block_tables": case.block_tables[i : i + 1].cuda(),
            "batch_invariant": True,
            "backend": "cuda",
        }
        alone = paged_attention(case.query[i : i + 1].cuda(), case.pages.cuda(), **arguments)
        assert torch.equal(alone.cpu()[0], together[i])


@pytest.mark.gpu
@pytest.mark.parametrize("scales_on", ["cpu", "cuda"])
@pytest.mark.parametrize("transform", [None, {"segment": 64}], ids=["", "recipe"])
def test_cuda_attention_in_a_graph_follows_changing_lengths(
    scales_on: str, transform: dict[str, int] | None
) -> None:
    case = make_case(**DECODE_CASES["ragged"], transform=transform)
    assert_graph_follows_lengths(case, scales_on, backend="cuda")


@pytest.mark.gpu
def test_cuda_attention_marks_nan_blocks() -> None:
    case = make_case(head_size=128, query_lens=(1, 1), seq_lens=(40, 40))
    case.layout.views(case.pages).v_scale[  # type: ignore[index]
        int(case.slots[1][3]) // 16, int(case.slots[1][3]) % 16, 0, 0
    ] = 0x7F
    out = run(case).cpu()
    assert not out[0].isnan().any()
    assert out[1, :4, :16].isnan().all()
    assert not out[1, :4, 16:].isnan().any()
    assert not out[1, 4:].isnan().any()


@pytest.mark.gpu
def test_cuda_attention_refuses_misaligned_pages() -> None:
    case = make_case(head_size=128, query_lens=(1,), seq_lens=(40,))
    wide = torch.zeros(case.pages.shape[0], case.pages.shape[1] + 8, dtype=torch.uint8).cuda()
    with pytest.raises(NoImplementationError, match=r"'cuda' cannot .* aligned to 16 bytes"):
        run(case, pages=wide)
