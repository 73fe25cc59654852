"""Batches with prompts for `dense`, and their check, on a CPU in Triton's interpreter or a GPU."""

import sys
from typing import Any

import pytest
import torch

from attention.cases import Case, assert_close_to_exact, make_case
from halfbyte.attention import AttentionInputs, AttentionPlans, router
from halfbyte.attention.prefill import plan as dense_plan
from halfbyte.attention.prefill.dense import DenseAttention
from triton_interpreter import interpreted

SMALL: dict[str, dict[str, Any]] = {
    "prefixes": {"query_lens": (20, 33, 17), "seq_lens": (20, 133, 90)},
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
    "window-larger-than-the-workspace": {
        "sliding_window": 100,
        "query_lens": (20, 33, 17, 12),
        "seq_lens": (20, 50, 133, 12),
    },
    "softcap": {"softcap": 5.0, "query_lens": (20, 33, 17), "seq_lens": (20, 63, 90)},
    "softcap-and-window": {
        "softcap": 5.0,
        "sinks": True,
        "sliding_window": 30,
        "query_lens": (20, 33, 17, 2),
        "seq_lens": (20, 133, 90, 44),
    },
    "wider-keys": {
        "head_size": 96,
        "head_size_v": 48,
        "query_lens": (20, 33),
        "seq_lens": (20, 50),
    },
    "wider-values": {
        "head_size": 48,
        "head_size_v": 80,
        "sinks": True,
        "query_lens": (20, 33),
        "seq_lens": (20, 50),
    },
    "window-of-one": {"sliding_window": 1, "query_lens": (20, 33), "seq_lens": (20, 133)},
    "window-sinks-and-decoding-sequences": {
        "sliding_window": 30,
        "sinks": True,
        "query_lens": (1, 40, 3, 12, 0, 30, 70),
        "seq_lens": (50, 140, 3, 64, 9, 30, 70),
    },
    "shorter-than-their-queries": {
        "sinks": True,
        "query_lens": (30, 33, 20, 40, 3),
        "seq_lens": (10, 133, 0, 25, 2),
    },
    "recipe": {
        "transform": {},
        "query_lens": (20, 33, 17, 1, 5),
        "seq_lens": (20, 133, 90, 70, 5),
    },
    "recipe-window": {
        "transform": {},
        "sliding_window": 30,
        "sinks": True,
        "query_lens": (20, 33, 17, 2),
        "seq_lens": (20, 133, 31, 44),
    },
    "recipe-without-rotation": {
        "transform": {"rotate": False},
        "query_lens": (33, 20),
        "seq_lens": (133, 20),
    },
}


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
    "recipe": {
        "transform": {},
        "query_lens": (1, 530, 600, 3, 100, 0),
        "seq_lens": (50, 1600, 600, 3, 140, 9),
    },
    "recipe-window": {
        "transform": {},
        "sliding_window": 300,
        "query_lens": (520, 640, 1),
        "seq_lens": (520, 1700, 90),
    },
}


def inputs_of(case: Case, device: str, lse: torch.Tensor | None = None) -> AttentionInputs:
    arguments = case.arguments(device)
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
    """Calls the backend directly; on a CPU it would not be selected."""
    lse = torch.empty(case.query.shape[:2], device=device) if return_lse else None
    inputs = inputs_of(case, device, lse)
    router.run_on(DenseAttention, inputs)
    return inputs.out.cpu(), None if lse is None else lse.cpu()


def assert_dense(case: Case, device: str) -> None:
    out, lse = attend(case, device, True)
    assert_close_to_exact(out, case)
    assert lse is not None
    # K is rounded to bfloat16 once its scale is applied, as the baseline's is; with a recipe, means
    # and first tokens here are several times as large as K.
    allowed = 3e-2 if "transform" not in case.options else 0.1
    torch.testing.assert_close(lse.double(), case.expected()[1], rtol=1e-3, atol=allowed)
    alone, _ = attend(case, device, False)
    assert_close_to_exact(alone, case)


def prefer_pytorch(monkeypatch: pytest.MonkeyPatch, from_queries: int) -> None:
    """Use PyTorch's attention for all prompts with at least this many tokens that it supports."""
    monkeypatch.setattr(dense_plan, "MIN_QUERIES", from_queries)
    monkeypatch.setattr(dense_plan, "MIN_PAIRS", 0)
    monkeypatch.setattr(dense_plan, "MIN_HEAD_SIZE", 16)


def make_small(
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    workspace_tokens: int = 64,
    max_queries: int = 64,
    pytorch_from: int = 16,
) -> Case:
    """A batch for the CPU; reduces block sizes and memory bounds to few tokens.

    Args:
        workspace_tokens: capacity of the workspace, for heads of 64.
        max_queries: max queries per call of PyTorch's attention.
        pytorch_from: min queries for PyTorch's attention.
    """
    prefer_pytorch(monkeypatch, pytorch_from)
    monkeypatch.setattr(dense_plan, "MIN_CHUNK", 10)
    monkeypatch.setattr(dense_plan, "_KEY_BLOCKS", (64, 32))
    monkeypatch.setattr(dense_plan, "WORKSPACE_BYTES", workspace_tokens * 2 * 2 * 64 * 2)
    monkeypatch.setattr(dense_plan, "queries_at_once", lambda inputs: max_queries)
    for name in ("prefill.unpack", "prefill.combine", "prefill.rows"):
        module = f"halfbyte.attention.{name}"
        monkeypatch.setitem(sys.modules, module, interpreted(module))
    return make_case(**{"head_size": 64, "group": 2, **options})
