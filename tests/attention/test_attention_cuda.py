"""The CUDA decode kernel: compiled anywhere, run where there is a GPU."""

from typing import Any

import pytest
import torch

from attention.cases import DECODE_CASES, Case, assert_close_to_exact, make_case
from halfbyte.attention import ATTENTION_BACKENDS, paged_attention
from halfbyte.attention.base import AttentionConfig
from halfbyte.dispatch import NoImplementationError
from halfbyte.layouts import PageLayout

pytest.importorskip("cuda.bindings.nvrtc")

from halfbyte.kernels import nvrtc
from halfbyte.kernels.decode_nvfp4 import macros, shared_bytes


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_kernel_compiles(architecture: str, head_size: int) -> None:
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 2, 16)
    for softcap, duplicate in ((False, True), (True, False)):
        options = macros(layout, torch.bfloat16, softcap, duplicate)
        assert nvrtc.compile_source("decode_nvfp4", options, architecture)[:4] == b"\x7fELF"


def test_kernel_that_does_not_compile_says_why() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"decode_nvfp4.cu for sm_90a: .*HEAD_SIZE"):
        nvrtc.compile_source("decode_nvfp4", {}, "sm_90a")


def test_shared_memory_lets_two_ctas_share_a_multiprocessor() -> None:
    for head_size in (64, 128):
        layout = PageLayout("nvfp4", "nvfp4", head_size, None, 2, 16)
        assert 2 * (shared_bytes(layout) + 1024) <= 228 * 1024


def config(**changes: Any) -> AttentionConfig:
    fields: dict[str, Any] = {
        "layout": PageLayout("nvfp4", "nvfp4", 128, None, 8, 16),
        "num_heads": 32,
        "query_dtype": torch.bfloat16,
        "device_type": "cuda",
        "num_tokens": 64,
        "num_seqs": 64,
        "sliding_window": None,
        "has_sinks": False,
        "softcap": None,
        "batch_invariant": False,
        "return_lse": False,
        "compute_capability": 90,
    }
    return AttentionConfig(**{**fields, **changes})


@pytest.mark.parametrize(
    ("capability", "head_sizes"),
    [
        (80, {64, 128}),
        (86, {64}),
        (89, {64}),
        (90, {64, 128, 256}),
        (100, {64, 128, 256}),
        (120, {64}),
    ],
)
def test_selection_on_gpus_by_their_shared_memory(capability: int, head_sizes: set[int]) -> None:
    chosen = set()
    for head_size in (64, 128, 256):
        layout = PageLayout("nvfp4", "nvfp4", head_size, None, 8, 16)
        work = config(layout=layout, compute_capability=capability)
        if ATTENTION_BACKENDS.select(work, compute_capability=capability).name == "cuda":
            chosen.add(head_size)
    assert chosen == head_sizes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": PageLayout("fp8", "nvfp4", 128, None, 8, 16)}, "reads nvfp4"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 80, None, 8, 16)}, "head sizes 64, 128 and 256"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 64, None, 8, 8)}, "multiple of 16 tokens"),
        (
            {"layout": PageLayout("nvfp4", "nvfp4", 64, None, 8, 16, "HND", "sm100")},
            "linear V scales",
        ),
        ({"query_dtype": torch.float32}, "query in bfloat16 or float16"),
        ({"num_tokens": 4096}, "a few query tokens per sequence"),
        ({"device_type": "cpu"}, "not on a GPU"),
    ],
    ids=["fp8", "d80", "page-8", "sm100", "float32", "prefill", "cpu-tensors"],
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
    arguments: dict[str, Any] = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }
    pages = options.pop("pages", case.pages.cuda())
    return paged_attention(case.query.cuda(), pages, backend="cuda", **arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODE_CASES)
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch-invariant"])
def test_cuda_attention(name: str, batch_invariant: bool) -> None:
    case = make_case(**DECODE_CASES[name])
    out, lse = run(case, return_lse=True, batch_invariant=batch_invariant)
    assert_close_to_exact(out.cpu(), case)
    _, exact_lse = case.expected()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-4, atol=1e-4)


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
def test_cuda_attention_in_a_graph_follows_changing_lengths() -> None:
    case = make_case(**DECODE_CASES["ragged"])
    arguments: dict[str, Any] = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }
    for name in ("k_scale", "v_scale"):
        arguments[name] = torch.tensor(arguments[name]).cuda()
    query, pages = case.query.cuda(), case.pages.cuda()
    out = torch.zeros(*query.shape[:2], 128, dtype=query.dtype, device="cuda")

    def step() -> None:
        paged_attention(query, pages, backend="cuda", out=out, **arguments)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in (
        case.seq_lens,
        [max(1, n - 1) for n in case.seq_lens],
        [min(5, n) for n in case.seq_lens],
    ):
        arguments["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(out, replayed)


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
    with pytest.raises(ValueError, match="multiples of 16"):
        run(case, pages=wide)
