"""Launch plans of the Triton attention kernel, and that it compiles for every GPU."""

from typing import Any

import pytest
import torch

from attention.cases import config
from halfbyte.attention.paged.plan import (
    PagedPlan,
    TritonTarget,
    choose_tiles,
    make_plan,
    operand_dtype,
)
from halfbyte.layouts import KVCacheDType, PageLayout
from slow import CAPABILITIES

H200 = TritonTarget(compute_capability=90, num_sms=132)
NVFP4 = PageLayout("nvfp4", "nvfp4", 128, None, 8, 16)


def plan_of(num_tokens: int, num_seqs: int, max_length: int, **changes: Any) -> PagedPlan:
    target = changes.pop("target", H200)
    return make_plan(
        config(num_tokens=num_tokens, num_seqs=num_seqs, **changes), max_length, target
    )


def test_plan_splits_few_long_sequences_only() -> None:
    one = plan_of(1, 1, 131072)
    assert 8 * one.num_splits >= 132
    assert 1 < plan_of(64, 64, 8192).num_splits < one.num_splits
    assert plan_of(1024, 1024, 8192).num_splits == 1
    assert plan_of(1, 1, 600).num_splits == 1
    assert plan_of(1, 1, 131072, sliding_window=128).num_splits == 1
    assert plan_of(8192, 4, 8192).num_splits == 1


def test_plan_bounds_the_memory_of_partial_results() -> None:
    plan = plan_of(4096, 4, 131072, batch_invariant=True)
    assert plan.tokens_per_launch < 4096
    assert plan.tokens_per_launch * plan.num_splits * 32 * 130 * 4 <= 256 * 2**20


@pytest.mark.parametrize("group", [1, 4, 16, 128])
def test_batch_invariant_plan_depends_on_layout_and_group(group: int) -> None:
    plans = [
        plan_of(*batch, num_heads=8 * group, batch_invariant=True)
        for batch in ((1, 1, 100), (4096, 3, 131072), (64, 64, 8192))
    ]
    assert len({(plan.tiles, plan.split_length) for plan in plans}) == 1
    for plan in plans:
        assert plan.split_length % plan.tiles.block_n == 0
        assert plan.merges


def test_operands_hold_what_the_cache_holds() -> None:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for name, dtype in (
        ("nvfp4", fp16),
        ("nvfp4_4over6", fp16),
        ("fp8_e4m3", fp16),
        ("fp8_e5m2", fp16),
        ("float16", fp16),
        ("bfloat16", bf16),
        ("mxfp4", bf16),
        ("fp4_block16", bf16),
        ("float32", fp32),
    ):
        assert operand_dtype(KVCacheDType(name), bf16) == dtype
        assert operand_dtype(KVCacheDType(name), fp32) == fp32


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("shape", "rows", "options"),
    [
        (("bfloat16", "bfloat16", 128), 4, {}),
        (("fp8", "fp8", 128), 4, {"windowed": True}),
        (("nvfp4", "nvfp4", 128), 4, {}),
        (("nvfp4", "nvfp4", 128), 4, {"recipe": True}),
        (("nvfp4", "nvfp4", 128), 1024, {"recipe": True, "windowed": True}),
        (("nvfp4", "nvfp4", 256), 1024, {"capped": True}),
        (("mxfp4", "mxfp4", 64), 1024, {}),
        (("fp8_e5m2", "nvfp4", 128), 32, {"has_sinks": True}),
        (("float32", "float32", 64), 4, {}),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else None,
)
def test_attention_kernel_compiles(
    shape: tuple[str, str, int], rows: int, options: dict[str, bool], capability: int
) -> None:
    pytest.importorskip("triton")
    from halfbyte.attention.paged.kernels import attention_kernel
    from halfbyte.attention.paged.launcher import kernel_constants
    from triton_compiler import SHARED_BYTES, compile_kernel

    layout = PageLayout(shape[0], shape[1], shape[2], None, 8, 16)
    target = TritonTarget(capability, 100)
    tiles = choose_tiles(layout, torch.bfloat16, rows, target, batch_invariant=False)
    switches = ("windowed", "capped", "has_sinks", "has_lse")
    pointers = ["k_global", "v_global", "sinks", "lse", "partial_out", "partial_stats"]
    pointers += ["bias", "first_scores"]
    usage = compile_kernel(
        attention_kernel,
        {
            **dict.fromkeys(("query", "out", "first_values"), "*bf16"),
            **dict.fromkeys(("tables", "starts", "lengths", "first_indices"), "*i32"),
            **dict.fromkeys(pointers, "*fp32"),
            **dict.fromkeys(("score_scale", "cap", "out_scale"), "fp32"),
            "pages": "*u8",
        },
        {
            **kernel_constants(layout, torch.bfloat16, 32, tiles, capability),
            **{name: options.get(name, False) for name in switches},
            "k_global_on_device": True,
            "v_global_on_device": True,
            "segment": 64 if options.get("recipe") else 0,
            "knows_first": options.get("recipe", False),
            "split": rows < 64,
            "split_length": 0,
            "out_column": 1,
        },
        capability,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    assert usage.shared <= target.shared_bytes == SHARED_BYTES[capability]
    assert usage.stack <= 64


@pytest.mark.parametrize("capability", [80, 120])
def test_merge_kernel_compiles(capability: int) -> None:
    pytest.importorskip("triton")
    from halfbyte.attention.paged.kernels import merge_kernel
    from triton_compiler import compile_kernel

    pointers = ("partial_out", "partial_stats", "v_global", "sinks", "lse")
    usage = compile_kernel(
        merge_kernel,
        {**dict.fromkeys(pointers, "*fp32"), "out": "*bf16", "out_scale": "fp32"},
        {
            "num_heads": 32,
            "head_size_v": 512,
            "padded_v": 512,
            "v_global_on_device": True,
            "has_sinks": True,
            "has_lse": True,
            "block": 16,
        },
        capability,
    )
    assert usage.stack == 0
