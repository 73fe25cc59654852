"""The W4A16 GEMM kernel on SM90: compilation and launch parameters."""

import re
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import Memory
from halfbyte.linear.w4a16.gemm_sm90 import launcher as gemm
from halfbyte.linear.w4a16.gemm_sm90.plan import SWIGLU_TILES, TILES, GemmPlan, Tile, make_plan
from halfbyte.linear.w4a16.packed_weight import TILE_K, TILE_N
from halfbyte.linear.w4a16.packed_words import DTYPES
from linear.gpus import H200
from linear.w4a16.test_gemm_sm90_plan import WEIGHTS
from machine_code import compiled, disassembled, stack_bytes, used
from slow import slow

DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NUM_SMS = H200.num_sms
REGISTERS_PER_SM = 65536


@pytest.mark.parametrize(
    ("tile", "dtype", "swiglu"),
    [
        (tile, dtype, swiglu) if i % 8 == j + 2 * swiglu else slow(tile, dtype, swiglu)
        for swiglu in (False, True)
        for i, tile in enumerate(SWIGLU_TILES if swiglu else TILES)
        for j, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_kernel_compiles(tile: Tile, dtype: torch.dtype, swiglu: bool, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    options = gemm.macros(dtype, tile, swiglu)
    cubin = compiled("linear/w4a16/gemm_sm90/gemm.cu", options, "sm_90a")
    assert stack_bytes(cubin) == 0
    code = disassembled(cubin, tmp_path)
    registers = used(cubin, "REG") * 128 * (tile.groups + 1)
    # What the producer and the workers take later, or `setmaxnreg` would wait for ever.
    producer, workers = sorted(int(n, 16) for n in re.findall(r"USETMAXREG\S* .*?(0x\w+)", code))
    assert 128 * (producer + tile.groups * workers) <= registers
    if tile.tokens <= 128 and tile.groups <= 2:
        # Room for a norm's 512 threads of 32 registers on the same SM.
        assert registers + 512 * 32 < REGISTERS_PER_SM
    # Three steps of the loop stand there, four matmuls at a time: ptxas has not serialized them.
    matmuls = 3 * tile.step // 16
    assert len(re.findall(r"\bHGMMA\b", code)) == matmuls
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == matmuls // 4 + 1


@pytest.mark.parametrize("m", [40, 200, 520, 1500, 20000])
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_kernels_divide_as_plans_do(n: int, k: int, m: int) -> None:
    """Multiplying by rounded inverses (`gemm_sm90/work.cuh`) finds the same tiles and spans."""
    for tile in TILES:
        plan = make_plan(n, k, m, NUM_SMS, tile)
        work = gemm.work(plan, n, k, m)
        line = plan.steps(k) + plan.crossing
        places = plan.cut_tiles * line

        def quotient(name: str, x: int, work: dict[str, Any] = work) -> int:
            inverse: int = work[name].inverse
            return x * inverse >> 31

        def span_begin(number: int, work: dict[str, Any] = work) -> int:
            span: int = work["span"]
            return number * span + quotient("clusters", number * work["more"], work)

        for pair in {*range(min(work["tiles"], 300)), work["tiles"] - 1}:
            assert quotient("row_pairs", pair) == pair // tile.row_pairs(n)
        begins = [span_begin(number) for number in range(plan.clusters + 1)]
        assert begins == [places * number // plan.clusters for number in range(plan.clusters + 1)]
        for number, place in enumerate(begins[: plan.clusters] if places else []):
            assert quotient("line", place) == place // line
            about = int(np.float32(place) * np.float32(work["clusters_per_place"]))
            assert abs(about - number) <= 1
            last = begins[number + 1] - 1
            assert abs(int(np.float32(last) * np.float32(work["clusters_per_place"])) - number) <= 1


def test_work_that_cannot_be_counted_is_refused() -> None:
    plan = make_plan(4096, 4096, 2**31, NUM_SMS)
    with pytest.raises(ValueError, match="too large"):
        gemm.work(plan, 4096, 4096, 2**31)
    with pytest.raises(ValueError, match="2 steps to share among 24 clusters"):
        gemm.work(GemmPlan(TILES[0], 1, 24, 1), 256, 200, 64)


class Launched(NamedTuple):
    """The recorded parameters of a launch."""

    params: Any
    grid: int
    inputs: tuple[torch.Tensor, ...]
    """weight, weight_scale, row_scale and bias."""
    out: torch.Tensor


def launched(shape: tuple[int, ...], n: int, plan: GemmPlan | None = None) -> Launched:
    """Call with x of a shape and record the launch; `allocate` returns ones."""
    k, dtype = shape[-1], torch.bfloat16
    calls: list[tuple[Any, int]] = []

    def launch(kernel: object, grid: int, threads: int, arguments: Any, *, overlap: bool) -> None:
        assert overlap
        calls.append((arguments[-1], grid))

    def allocate(memory: Memory, device: object) -> torch.Tensor:
        return torch.ones(memory.shape, dtype=memory.dtype)

    blocks = (-(-n // TILE_N), -(-k // TILE_K) * 2)
    weight, weight_scale = (torch.empty((*blocks, size), dtype=torch.int32) for size in (512, 64))
    inputs = (weight, weight_scale, torch.empty(n), torch.empty(n, dtype=dtype))
    x = torch.empty(shape, dtype=dtype)
    gemm.gemm_product.cache_clear()
    with (
        patch.object(nvrtc, "launch", launch),
        patch.object(gemm, "tensor_map", lambda *arguments: None),
        patch.object(gemm, "_kernel", lambda *arguments: None),
        patch.object(gemm, "num_sms", lambda device: NUM_SMS),
        patch.object(gemm, "allocate", allocate),
    ):
        out = gemm.gemm_product(x.shape, n, x.dtype, x.get_device(), plan)(x, *inputs)
    gemm.gemm_product.cache_clear()
    ((params, grid),) = calls
    return Launched(params, grid, inputs, out)


@pytest.mark.parametrize("n", [200, 201])
def test_what_a_launch_is_given(n: int) -> None:
    k, m = 144, 70
    params, grid, inputs, out = launched((2, 35, k), n)
    plan = make_plan(n, k, m, NUM_SMS)
    assert grid == 2 * plan.clusters
    assert (params.work.m, params.work.n) == (m, n)
    assert (params.work.blocks_n, params.work.steps) == (4, plan.steps(k))
    assert params.work.clusters.by == plan.clusters
    pointers = (params.weight, params.weight_scale, params.row_scale, params.bias)
    assert pointers == tuple(tensor.data_ptr() for tensor in inputs)
    assert torch.equal(out, torch.ones(2, 35, n, dtype=out.dtype))
    assert out.is_contiguous()
    # A launch raises flags with two values.
    assert launched((2, 35, k), n).params.flag_epoch >= params.flag_epoch + 2


def test_workspace_of_tiles_that_are_cut() -> None:
    """Sums, then flags; none where every cluster has whole tiles."""
    tile, clusters = TILES[0], 5
    params = launched((128, 512), 700, GemmPlan(tile, 6, clusters, 6)).params
    places = 2 * clusters
    floats = places * tile.tokens * tile.rows
    assert params.flags == params.partial + 4 * floats
    assert params.flags % 8 == 0
    params = launched((128, 512), 700, GemmPlan(tile, 10, clusters, 0)).params
    assert not params.partial
    assert not params.flags


def test_tiles_of_too_many_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 32 clusters share a tile"):
        launched((64, 8192), 256, GemmPlan(TILES[0], 1, 40, 1))
