"""The CUDA backend for few tokens per expert: plans, compilation, selection, and runs on a GPU."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from halfbyte.dispatch import NoImplementationError
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.moe import GPT_OSS, SWIGLU, MoeConfig, init_moe_kernel, moe_experts, select_moe_kernel
from halfbyte.moe.cuda import launcher
from halfbyte.moe.cuda.kernel import CudaKernel
from halfbyte.moe.cuda.plan import (
    MAX_MEAN,
    Work,
    is_small,
    make_plan,
    max_entries,
    mean_entries,
    usual_plans,
)
from linear.gpus import H200, RTX_3090
from machine_code import compiled, stack_bytes
from moe.cases import (
    LIMITED,
    assert_close_enough,
    on_gpu,
    random_experts,
    random_hidden,
    random_routing,
)
from moe.works import GPT, QWEN
from slow import slow

LAYERS = {"qwen3-30b-a3b": (QWEN, 8), "gpt-oss-20b": (GPT, 4)}
CONFIG = MoeConfig(128, 2048, 768, torch.bfloat16, device_type="cuda", compute_capability=90)


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
def test_no_tokens_need_no_kernel(weight_format: Any) -> None:
    """Also without a GPU: nothing is chosen, compiled or launched."""
    experts = random_experts(8, 64, 32, weight_format=weight_format)
    kernel = CudaKernel(MoeConfig.of(experts, torch.bfloat16))
    ids, weights = random_routing(0, 2, 8)
    out = kernel.apply(kernel.prepare(experts), random_hidden(0, 64, torch.bfloat16), ids, weights)
    assert out.shape == (0, 64)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("gpu", [H200, RTX_3090], ids=["h200", "rtx-3090"])
@pytest.mark.parametrize("name", LAYERS)
def test_plans_fit_a_gpu(name: str, gpu: Gpu) -> None:
    works, top_k = LAYERS[name]
    for work in works:
        for m in (1, 2, 4, 16, 64):
            plan = make_plan(work, m, top_k, gpu)
            assert plan in usual_plans(work, gpu)
            assert work.items(plan.parts) % plan.split == 0  # no warp waits for another
            taken = plan.shared_bytes(work, m * top_k, gpu.num_sms) + 1024
            assert plan.ctas * taken <= gpu.block_bytes + 1024
            assert 0 < plan.grid(work, m * top_k, gpu.num_sms) <= plan.ctas * gpu.num_sms


def test_all_calls_have_usual_plans() -> None:
    """Also for other numbers of experts per token than the model's: nothing compiles in a graph."""
    for work in (*QWEN, *GPT):
        plans = usual_plans(work, H200)
        for m in range(1, 129):
            for top_k in (1, 3, 8):
                if is_small(m * top_k, work.num_experts):
                    assert make_plan(work, m, top_k, H200) in plans


def test_warps_share_k_only_where_tiles_are_few() -> None:
    """One warp per tile needs no sums of other warps, but one token's tiles are not enough."""
    assert make_plan(QWEN[0], 1, 8, H200).split == 4
    assert make_plan(GPT[1], 1, 4, H200).split == 4
    assert make_plan(QWEN[0], 64, 8, H200).split == 1
    assert make_plan(QWEN[1], 64, 8, H200).split == 1


def test_mean_entries_are_those_of_random_routing() -> None:
    generator = torch.Generator().manual_seed(0)
    for pairs, experts, columns in ((8, 128, 1), (512, 128, 8), (300, 32, 4)):
        counts = torch.randint(experts, (400, pairs), generator=generator)
        counts = torch.nn.functional.one_hot(counts, experts).sum(1)
        found = (-(-counts // columns)).sum(1).double().mean()
        assert found == pytest.approx(mean_entries(pairs, experts, columns), rel=0.03)


@pytest.mark.parametrize("name", LAYERS)
def test_copies_in_flight_cover_the_latency(name: str) -> None:
    """64 KiB per SM: an H200's bandwidth times about 1.8 µs."""
    works, top_k = LAYERS[name]
    for work in works:
        for m in (1, 4, 16, 64):
            plan = make_plan(work, m, top_k, H200)
            item_bytes = work.item_bytes(plan.parts)
            assert plan.ctas * plan.split * plan.groups * plan.stages * item_bytes >= 2**16


def test_plans_are_near_the_fastest_of_the_committed_run() -> None:
    """Limits for the mean over all cases and for each; the run timed every plan it knew."""
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "moe_plans_packed.json"
    ratios = []
    for case in json.loads(file.read_text())["cases"]:
        works, top_k = LAYERS[case["shape"]]
        plan = make_plan(works[case["product"] == "down"], case["m"], top_k, H200)
        times = case["microseconds"]
        ratios.append(times[",".join(map(str, plan[:6]))] / min(times.values()))
    assert len(ratios) == 32
    assert fmean(ratios) < 1.035
    assert max(ratios) < 1.15


def test_a_row_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="K = 524288 is too large"):
        make_plan(Work(64, 2**19, 4, "nvfp4", False), 1, 1, H200)


def test_max_entries_is_reached() -> None:
    assert max_entries(8, 128, 4) == 8
    assert max_entries(128 + 8, 128, 4) == 128 + 2
    assert max_entries(5, 1, 4) == 2


def test_small_calls() -> None:
    assert is_small(64 * 8, 128)
    assert is_small(64 * 4, 32)
    assert not is_small(65 * 4, 32)
    assert not is_small(1025, 1024)


def test_what_it_can_do() -> None:
    assert CudaKernel.can_implement(CONFIG)[0]
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"device_type": "cpu"}, "tensors are on cpu"),
        ({"dtype": torch.float32}, "not float32"),
        ({"dtype": torch.float16, "weight_format": "mxfp4"}, "exceed float16's range"),
        ({"batch_invariant": True}, "not batch-invariant"),
        ({"hidden_size": 2064}, "sizes in multiples of 32, not 2064 and 768"),
        ({"num_experts": 1025}, "up to 1024 experts"),
    ]
    for change, reason in refusals:
        answer = CudaKernel.can_implement(replace(CONFIG, **change))
        assert not answer[0]
        assert reason in answer[1]
    assert CudaKernel.is_supported(75) == (False, "needs compute capability 8.0, this is 7.5")


def test_it_goes_first_and_leaves_other_layers_to_triton() -> None:
    pytest.importorskip("triton")
    assert select_moe_kernel(CONFIG) is CudaKernel
    assert select_moe_kernel(CONFIG, "cuda") is CudaKernel
    for refused in ({"dtype": torch.float32}, {"batch_invariant": True}):
        config = replace(CONFIG, **refused)
        assert select_moe_kernel(config).name == "triton"
        with pytest.raises(NoImplementationError, match="cuda"):
            select_moe_kernel(config, "cuda")


@pytest.mark.parametrize(
    ("work", "mean", "dtype", "architecture"),
    [
        (QWEN[0], 1, torch.bfloat16, "sm_90a"),
        slow(QWEN[0], 1, torch.float16, "sm_90a"),
        slow(QWEN[0], 4, torch.bfloat16, "sm_90a"),
        slow(QWEN[1], 1, torch.bfloat16, "sm_90a"),
        slow(QWEN[0], MAX_MEAN, torch.bfloat16, "sm_90a"),
        (GPT[0], 1, torch.bfloat16, "sm_80"),
        slow(GPT[0], 1, torch.bfloat16, "sm_90a"),
        slow(GPT[1], MAX_MEAN, torch.bfloat16, "sm_90a"),
        slow(GPT[0], 1, torch.bfloat16, "sm_100a"),
        slow(GPT[0], 1, torch.bfloat16, "sm_120a"),
    ],
    ids=str,
)
def test_compiles_without_spills(
    work: Work, mean: int, dtype: torch.dtype, architecture: str
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    plan = make_plan(work, 16, mean * work.num_experts // 16, H200)
    macros: dict[str, int | None] = dict((*launcher.dtype_macros(dtype), *plan.macros(work)))
    cubin = compiled("moe/cuda/experts.cu", macros, architecture)
    assert stack_bytes(cubin) == 0


@pytest.mark.parametrize(
    ("work", "m", "top_k"),
    [slow(QWEN[0], 4, 8), (QWEN[1], 4, 8), slow(GPT[0], 1, 4), (GPT[1], 1, 4)],
)
def test_kernels_for_few_pairs_compile_without_spills(work: Work, m: int, top_k: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    plan = make_plan(work, m, top_k, H200)
    assert plan.few
    assert plan.is_single(work) == (work in GPT)
    macros: dict[str, int | None] = dict(
        (*launcher.dtype_macros(torch.bfloat16), *plan.macros(work))
    )
    assert stack_bytes(compiled("moe/cuda/experts.cu", macros, "sm_90a")) == 0


def test_sum_compiles() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    assert stack_bytes(compiled("moe/cuda/sum.cu", {"X_BF16": 1, "SORTED": 0}, "sm_90a")) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("weight_format", "activation", "bias", "dtype"),
    [
        ("nvfp4", SWIGLU, False, torch.bfloat16),
        ("nvfp4", LIMITED, True, torch.float16),
        ("mxfp4", LIMITED, True, torch.bfloat16),
        ("mxfp4", GPT_OSS, True, torch.bfloat16),
    ],
    ids=["swiglu", "limited-fp16", "mxfp4-limited", "gpt-oss"],
)
@pytest.mark.parametrize(("h", "i"), [(2048, 768), (608, 96), (96, 544), (2880, 2880)])
def test_error_on_a_gpu(
    weight_format: Any, activation: Any, bias: bool, dtype: torch.dtype, h: int, i: int
) -> None:
    options: Any = {"weight_format": weight_format, "activation": activation, "bias": bias}
    experts = on_gpu(random_experts(8, h, i, dtype=dtype, **options))
    for m, top_k in ((0, 2), (1, 3), (1, 8), (2, 8), (7, 1), (20, 2), (32, 2), (200, 4)):
        ids, weights = (t.cuda() for t in random_routing(m, top_k, 8))
        ids[m // 2 :: 7, :1] = -1
        hidden = random_hidden(m, h, dtype).cuda()
        out = moe_experts(hidden, experts, ids, weights, backend="cuda")
        assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.gpu
def test_one_expert_takes_all_on_a_gpu() -> None:
    experts = on_gpu(random_experts(8, 2048, 768, dtype=torch.bfloat16))
    hidden = random_hidden(60, 2048, torch.bfloat16).cuda()
    ids, weights = torch.full((60, 1), 5).cuda(), torch.ones(60, 1).cuda()
    out = moe_experts(hidden, experts, ids, weights, backend="cuda")
    assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 9, 150], ids=["one", "few", "many"])
def test_in_a_cuda_graph_after_itself(m: int) -> None:
    """Each call takes the previous one's result and overlaps with it; routing changes."""
    experts = on_gpu(random_experts(8, 2048, 768, dtype=torch.bfloat16))
    kernel = init_moe_kernel(MoeConfig.of(experts, torch.bfloat16), "cuda")
    tensors = kernel.prepare(experts)
    ids, weights = (t.cuda() for t in random_routing(m, 2, 8))
    hidden = random_hidden(m, 2048, torch.bfloat16).cuda()

    def calls() -> torch.Tensor:
        x = hidden
        for _ in range(4):
            x = kernel.apply(tensors, x, ids, weights)
        return x

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = calls()
    for seed in range(3, 23):
        ids.copy_(random_routing(m, 2, 8, seed=seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        x = hidden
        for _ in range(4):
            x = kernel.apply(tensors, x, ids, weights)
            torch.cuda.synchronize()
        assert torch.equal(out, x)
