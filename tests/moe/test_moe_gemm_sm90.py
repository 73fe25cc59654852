"""The CUDA kernels for many tokens per expert on SM90: plans, compilation, selection."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from halfbyte.moe.cuda import kernel
from halfbyte.moe.cuda.gemm_sm90.plan import (
    LIST_PAIRS,
    MAX_CTAS,
    MAX_NARROW_PAIRS,
    MAX_PAIRS,
    NARROW,
    SORT_THREADS,
    TOKENS,
    WIDTHS,
    MoeGemmPlan,
    choose_tokens,
    make_plan,
    max_rows,
    max_tiles,
    row_pairs,
)
from halfbyte.moe.cuda.gemm_sm90.products import padded
from halfbyte.moe.cuda.plan import MAX_EXPERTS, Work
from linear.gpus import H200, RTX_3090
from machine_code import compiled, disassembled, stack_bytes
from moe.test_moe_cuda import LAYERS
from moe.works import GPT, QWEN
from slow import slow

MIXTRAL = Work(2 * 14336, 4096, 8, "nvfp4", True), Work(4096, 14336, 8, "nvfp4", False)
BLOCK_BYTES, NUM_SMS = H200.block_bytes, H200.num_sms


@pytest.mark.parametrize("name", LAYERS)
def test_plans_fit_a_gpu(name: str) -> None:
    works, _ = LAYERS[name]
    for tokens in TOKENS:
        for work in works:
            plan = make_plan(work, tokens, BLOCK_BYTES)
            assert plan.tokens == tokens
            assert plan.ctas * (plan.shared_bytes(work) + 1024) <= BLOCK_BYTES + 1024
            assert plan.ctas == MAX_CTAS[tokens]
            assert plan.stages % 2 == 0
            barriers = plan.stages // 2 + plan.stages + 2 * plan.weight_slots
            assert 8 * barriers <= 256


def test_stages_in_flight_cover_the_latency() -> None:
    """Where weights are read once: 32 KiB of them per SM, without the slots that are being read."""
    for work in (*QWEN, *GPT):
        plan = make_plan(work, 64, BLOCK_BYTES)
        assert plan.ctas * (plan.weight_slots - 1) * 128 * 128 // 2 >= 2**15


@pytest.mark.parametrize(
    ("work", "rings"),
    [
        (QWEN[0], [(4, 8), (6, 12), (4, 8), (6, 8), (6, 6)]),
        (QWEN[1], [(4, 8), (6, 12), (3, 8), (6, 8), (3, 6)]),
        (GPT[0], [(4, 8), (6, 12), (4, 8), (6, 8), (6, 6)]),
        (GPT[1], [(4, 8), (6, 12), (3, 8), (6, 8), (4, 6)]),
    ],
    ids=["qwen3-gate-up", "qwen3-down", "gpt-oss-gate-up", "gpt-oss-down"],
)
def test_plans_that_were_timed(work: Work, rings: list[tuple[int, int]]) -> None:
    """Steps of W and stages of x for tiles of 16, 32, 64, 128 and 192 tokens: those of
    `moe_gemm_packed.json`."""
    for tokens, ring in zip((16, 32, 64, 128, 192), rings, strict=True):
        assert make_plan(work, tokens, BLOCK_BYTES) == MoeGemmPlan(tokens, *ring, MAX_CTAS[tokens])


def test_sizes_of_a_layer_do_not_matter() -> None:
    """Nothing in shared memory grows with them."""
    for work in (*MIXTRAL, Work(64, 2**16, 8, "nvfp4", False)):
        for tokens in TOKENS:
            assert make_plan(work, tokens, BLOCK_BYTES) == make_plan(
                QWEN[not work.gated], tokens, BLOCK_BYTES
            )


def test_less_shared_memory_than_on_sm90() -> None:
    with pytest.raises(ValueError, match="99 bytes of shared memory have no room for 64 tokens"):
        make_plan(QWEN[0], 64, 99)


def test_more_tokens_per_expert_make_larger_tiles() -> None:
    for works, top_k in LAYERS.values():
        chosen = [choose_tokens(works, m * top_k, BLOCK_BYTES, NUM_SMS) for m in (128, 1024, 16384)]
        assert chosen[0] in (16, 32)
        assert chosen == sorted(chosen)
        assert chosen[2] >= 192


@pytest.mark.parametrize(
    ("name", "m", "fastest"),
    [
        *(("qwen", m, 16) for m in (64, 96, 128, 160, 192)),
        *(("qwen", m, 32) for m in (256, 384)),
        *(("gpt", m, 16) for m in (64, 80, 96)),
        *(("gpt", m, 32) for m in (112, 128, 192)),
        ("gpt", 256, 64),
    ],
)
def test_tiles_are_those_that_were_fastest_on_a_gpu(name: str, m: int, fastest: int) -> None:
    works, top_k = (QWEN, 8) if name == "qwen" else (GPT, 4)
    assert choose_tokens(works, m * top_k, BLOCK_BYTES, NUM_SMS) == fastest


def test_widths_are_equally_spaced() -> None:
    """As the kernel's macros say."""
    for tokens, widths in WIDTHS.items():
        step = tokens // len(widths)
        assert widths == tuple(range(step, tokens + 1, step))


def test_sizes_of_any_routing_are_reached() -> None:
    """Of an expert with one pair more than whole tiles, and others with one pair."""
    assert max_tiles(64 + 1 + 3, 4, 64) == 2 + 3 - 1 + 1
    assert max_tiles(3, 4, 64) == 3
    assert max_rows(4, 4) == 4 * 16
    assert max_rows(17, 1) == 32


def test_narrow_tiles_are_for_as_many_pairs_as_a_cta_lists() -> None:
    works = tuple(work._replace(num_experts=MAX_EXPERTS) for work in QWEN)
    assert choose_tokens(works, MAX_NARROW_PAIRS, BLOCK_BYTES, NUM_SMS) == NARROW
    assert choose_tokens(works, MAX_NARROW_PAIRS + 1, BLOCK_BYTES, NUM_SMS) > NARROW


def test_lists_of_the_sort_kernel_fit_without_more_shared_memory() -> None:
    grid = min(2 * NUM_SMS, -(-MAX_PAIRS // (SORT_THREADS // 32)))
    assert 8 * MAX_EXPERTS + 4 * -(-MAX_PAIRS // grid) <= 48 * 1024


def test_intermediate_channels_fill_their_steps() -> None:
    """Gate_up writes all channels that down reads."""
    for gate_up, down in (QWEN, GPT, MIXTRAL):
        assert row_pairs(gate_up) * 128 == padded(down.k)


def test_the_number_of_pairs_selects() -> None:
    variant = kernel._variant
    for gpu, many in ((H200, "gemm"), (RTX_3090, "triton")):
        variant.cache_clear()
        with patch.object(kernel, "gpu_of", lambda device, gpu=gpu: gpu):
            # Of more than eight tiles per SM `experts.cu`, which has more warps, is faster.
            assert variant(1, 8, QWEN, 0) == ("token" if gpu is H200 else "streaming")
            assert variant(1, 4, GPT, 0) == "streaming"
            assert variant(1, 4, QWEN, 0) == "token"
            assert variant(1, 32, QWEN, 0) == "streaming"
            assert variant(72, 8, QWEN, 0) == "streaming"
            assert variant(64, 4, GPT, 0) == "streaming"
            assert variant(73, 8, QWEN, 0) == ("gemm" if gpu is H200 else "streaming")
            assert variant(65, 4, GPT, 0) == many
            assert variant(128, 8, QWEN, 0) == ("gemm" if gpu is H200 else "streaming")
            assert variant(129, 8, QWEN, 0) == many
            assert variant(MAX_PAIRS, 1, QWEN, 0) == many
            assert variant(MAX_PAIRS + 1, 1, QWEN, 0) == "triton"
    variant.cache_clear()


@pytest.mark.parametrize(
    ("work", "tokens", "dtype"),
    [
        (QWEN[0], 256, torch.bfloat16),
        (QWEN[1], 64, torch.float16),
        (GPT[0], 192, torch.bfloat16),
        *(
            slow(work, tokens, torch.bfloat16)
            for work in (*QWEN, *GPT)
            for tokens in TOKENS[1:]
            if (work, tokens) not in ((QWEN[0], 256), (GPT[0], 192))
        ),
        *(slow(work, 256, torch.float16) for work in QWEN),
    ],
    ids=str,
)
def test_compiles_without_spills(
    work: Work, tokens: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    plan = make_plan(work, tokens, BLOCK_BYTES)
    macros = dict((("X_BF16", int(dtype == torch.bfloat16)), *plan.macros(work)))
    cubin = compiled("moe/cuda/gemm_sm90/gemm.cu", {**macros}, "sm_90a")
    assert stack_bytes(cubin) == 0
    code = disassembled(cubin, tmp_path)
    # Eight matmuls in a step, four at a time: ptxas has not serialized them.
    loops = len(WIDTHS[tokens])
    assert len(re.findall(r"\bHGMMA\b", code)) == 8 * loops
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == 3 * loops


@pytest.mark.parametrize(
    ("work", "dtype"),
    [
        (QWEN[0], torch.bfloat16),
        (GPT[0], torch.bfloat16),
        slow(QWEN[0], torch.float16),
    ],
    ids=str,
)
def test_narrow_tiles_compile_without_spills(
    work: Work, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    plan = make_plan(work, NARROW, BLOCK_BYTES)
    macros = dict((("X_BF16", int(dtype == torch.bfloat16)), *plan.macros(work)))
    cubin = compiled("moe/cuda/gemm_sm90/narrow.cu", {**macros}, "sm_90a")
    assert stack_bytes(cubin) == 0
    # Sixteen matmuls in a step of 8 tokens, and twice as many for 16; again with large scales.
    # All that for each product, and half of it for halves of down's tiles of rows.
    matmuls = re.findall(r"\bHMMA\b", disassembled(cubin, tmp_path))
    assert len(matmuls) == (240 if work.weight_format == "mxfp4" else 120)


def test_sort_list_and_sum_compile() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for pairs in LIST_PAIRS:
        assert stack_bytes(compiled("moe/cuda/gemm_sm90/list.cu", {"PAIRS": pairs}, "sm_90a")) == 0
    assert stack_bytes(compiled("moe/cuda/gemm_sm90/sort.cu", {}, "sm_90a")) == 0
    assert stack_bytes(compiled("moe/cuda/sum.cu", {"X_BF16": 1, "SORTED": 1}, "sm_90a")) == 0
