"""Plans of the CUDA kernels for one token, and their compilation."""

from typing import Any

import pytest
import torch

from halfbyte.kernels.runtime.occupancy import RESERVED_BYTES, bytes_for_ctas
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.linear.w4a16.gpu import dtype_macros
from halfbyte.moe.cuda.plan import Work
from halfbyte.moe.cuda.token_plan import (
    TokenPlan,
    ctas_per_sm,
    make_token_plan,
    usual_token_plans,
)
from linear.gpus import H200, RTX_3090
from machine_code import compiled, stack_bytes, used
from moe.works import GPT, QWEN
from slow import slow

LAYERS = pytest.mark.parametrize(
    ("works", "top_k"), [(QWEN, 8), slow(GPT, 4)], ids=["qwen3-30b-a3b", "gpt-oss-20b"]
)
REGISTERS, REGISTERS_AT_ONCE = 65536, 8
"""Of an SM; a thread's are a multiple of the latter."""


def plan_of(work: Work, top_k: int, gpu: Gpu = H200) -> TokenPlan:
    plan = make_token_plan(work, top_k, gpu)
    assert plan is not None
    return plan


@pytest.mark.parametrize("gpu", [H200, RTX_3090], ids=["h200", "rtx-3090"])
def test_plans_fit_a_gpu(gpu: Gpu) -> None:
    for work in (*QWEN, *GPT):
        for top_k in (1, 2, 6, 8):
            plan = plan_of(work, top_k, gpu)
            assert plan in usual_token_plans(work, gpu)
            assert work.items(plan.parts) % plan.split == 0  # no warp waits for another
            assert plan.shared_bytes(work, top_k) <= gpu.block_bytes
            assert 0 < plan.grid(work, top_k, gpu.num_sms) <= gpu.num_sms


def test_no_plan() -> None:
    assert make_token_plan(Work(64, 2**19, 4, "nvfp4", False), 1, H200) is None
    assert make_token_plan(QWEN[0], 17, H200) is None
    assert len(usual_token_plans(QWEN[0], H200)) <= 5


@LAYERS
def test_both_products_share_an_sm(works: tuple[Work, Work], top_k: int) -> None:
    """One CTA of each, but not two of either: the second's weights come while the first runs."""
    sm_bytes = H200.block_bytes + RESERVED_BYTES
    taken, registers = [], 0
    for work in works:
        plan = plan_of(work, top_k)
        needed = plan.shared_bytes(work, top_k)
        taken.append(bytes_for_ctas(needed, ctas_per_sm(work), sm_bytes) + RESERVED_BYTES)
        per_thread = used(_compiled(work, plan, "sm_90a"), "REG")
        registers += plan.threads * -(-per_thread // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    first, second = taken
    assert first + second <= sm_bytes < min(2 * first, first + 2 * second)
    assert registers <= REGISTERS


@pytest.mark.parametrize(
    ("work", "top_k", "dtype", "architecture"),
    [
        (QWEN[0], 8, torch.bfloat16, "sm_90a"),
        slow(QWEN[1], 8, torch.float16, "sm_90a"),
        slow(GPT[0], 4, torch.bfloat16, "sm_80"),
        (GPT[1], 4, torch.bfloat16, "sm_90a"),
        slow(GPT[0], 4, torch.bfloat16, "sm_100a"),
        slow(QWEN[0], 1, torch.bfloat16, "sm_120a"),
    ],
    ids=str,
)
def test_compiles_without_spills(
    work: Work, top_k: int, dtype: torch.dtype, architecture: str
) -> None:
    assert stack_bytes(_compiled(work, plan_of(work, top_k), architecture, dtype)) == 0


def _compiled(
    work: Work, plan: TokenPlan, architecture: str, dtype: torch.dtype = torch.bfloat16
) -> bytes:
    pytest.importorskip("cuda.bindings.nvrtc")
    macros: dict[str, Any] = dict((*dtype_macros(dtype), *plan.macros(work)))
    return compiled("moe/cuda/token.cu", macros, architecture)
