"""Attention to the last tokens as they are, on GPUs: interpreted on a CPU, compiled, run on one."""

from typing import Any

import pytest
import torch

from attention.cases import DECODE_CASES, RECENT_CASES, assert_close_to_exact, make_case
from attention.graphs import assert_graph_follows_lengths
from attention.prefill.dense_cases import inputs_of, make_small
from halfbyte.attention import AttentionInputs, paged_attention
from halfbyte.attention.prefill.dense import DenseAttention
from halfbyte.layouts import PageLayout

pytest.importorskip("triton")

from triton_compiler import SHARED_BYTES, compile_kernel
from triton_interpreter import interpreted


class _Interpreted:
    """The Triton backend, in the interpreter."""

    @staticmethod
    def forward(inputs: AttentionInputs) -> None:
        interpreted("halfbyte.attention.paged.launcher").attend(inputs)


@pytest.mark.parametrize("name", [name for name in RECENT_CASES if name != "prefill"])
def test_in_the_interpreter(name: str) -> None:
    case = make_case(**{**RECENT_CASES[name], "query_dtype": torch.float32})
    lse = torch.empty(case.query.shape[:2])
    inputs = inputs_of(case, "cpu", lse)
    interpreted("halfbyte.attention.recent.launcher").attend_with_recent(inputs, _Interpreted)
    exact, exact_lse = case.expected()
    torch.testing.assert_close(inputs.out.double(), exact, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_prompts_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of new sequences, whose first rows find nothing in the pages, and of others."""
    options: dict[str, Any] = {
        "recent": 20,
        "transform": {},
        "sinks": True,
        "query_lens": (60, 33, 70, 1, 5),
        "seq_lens": (60, 133, 70, 70, 5),
    }
    case = make_small(options, monkeypatch)
    lse = torch.empty(case.query.shape[:2])
    inputs = inputs_of(case, "cpu", lse)
    interpreted("halfbyte.attention.recent.launcher").attend_with_recent(inputs, DenseAttention)
    assert_close_to_exact(inputs.out, case)
    torch.testing.assert_close(lse.double(), case.expected()[1], rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize(
    ("dtype", "head_size", "block_m"),
    [
        (torch.bfloat16, 64, 16),
        (torch.bfloat16, 128, 64),
        (torch.bfloat16, 256, 16),
        (torch.float16, 512, 16),
        (torch.float32, 128, 16),
        (torch.float32, 256, 16),
    ],
)
def test_kernel_compiles(dtype: torch.dtype, head_size: int, block_m: int, capability: int) -> None:
    from halfbyte.attention.recent import launcher
    from halfbyte.attention.recent.kernel import recent_kernel
    from halfbyte.kernels.formats.dot_operands import dot_operand

    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 8, 16)
    pointer = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    tile = launcher.tile_of_keys(launcher.is_large(dtype, head_size))
    names = ("query", "keys", "values", "key", "value", "first_values")
    usage = compile_kernel(
        recent_kernel,
        {
            **dict.fromkeys(names, pointer),
            **dict.fromkeys(("entries", "starts", "lengths", "first_indices"), "*i32"),
            **dict.fromkeys(("out", "lse", "first_scores"), "*fp32"),
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
            "knows_first": True,
            "block_m": block_m,
            "block_n": tile["block_n"],
        },
        capability,
        num_stages=tile["num_stages"],
    )
    assert usage.shared <= SHARED_BYTES[capability]
    assert usage.stack <= (384 if dtype == torch.float32 else 64)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("name", RECENT_CASES)
def test_on_a_gpu(name: str, backend: str | None) -> None:
    case = make_case(**RECENT_CASES[name])
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
def test_decode_on_a_gpu() -> None:
    """By `decode`, of means of 64 tokens, where `dense` does not take the batch."""
    options: dict[str, Any] = {"recent": 64, "transform": {"segment": 64}}
    case = make_case(**DECODE_CASES["ragged"], **options)
    arguments = case.arguments("cuda")
    out = paged_attention(case.query.cuda(), case.pages.cuda(), backend="cuda", **arguments)
    assert_close_to_exact(out.cpu(), case)
    assert_graph_follows_lengths(case, backend="cuda")
