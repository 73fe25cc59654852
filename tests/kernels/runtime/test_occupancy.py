"""Kernels whose grids fill the GPU take no more CTAs per SM than the grids have, also when their
launches overlap with the previous kernel."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

import cuda_on_host
from attention.decode.decode_plans import Step, inputs_of
from attention.decode.decode_plans import on_host as decode_on_host
from halfbyte.attention.decode import cuda as decode
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.occupancy import RESERVED_BYTES, bytes_for_ctas
from halfbyte.linear.w4a16.gemv import launcher as gemv
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.moe.cuda import launcher as moe
from halfbyte.moe.cuda import sums
from halfbyte.moe.cuda.gemm_sm90 import launcher as moe_gemm
from halfbyte.moe.cuda.gemm_sm90 import narrow, products
from moe.cases import random_hidden, random_routing
from moe.on_host import BF16, KINDS, experts_of, packed_on_host

SM_BYTES = 228 * 1024
H200 = Gpu(90, SM_BYTES - RESERVED_BYTES, 132, 66)
CACHED: tuple[Any, ...] = (
    *(gemv._gemv_kernels, moe._product_kernel, moe._plan),
    *(products.kernel_of, products.product_kernel, products.map_of, narrow._map_of_x),
)


class Launch(NamedTuple):
    shared_bytes: int
    grid: int
    ctas_per_sm: int


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Launch]]:
    """Launches on an H200, which do nothing, by name of the function."""
    found: dict[str, Launch] = {}

    def load(
        name: str, macros: Any, functions: Any, device: int, *, largest_share: bool = False
    ) -> dict[str, Any]:
        return {function: nvrtc.Kernel(function, size, device) for function, size in functions}

    def launch(
        kernel: Any, grid: int, threads: int, arguments: Any, *, overlap: bool, ctas_per_sm: int = 0
    ) -> None:
        found[kernel[0]] = Launch(kernel[1] or 0, grid, ctas_per_sm)

    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "launch", launch)
    for module in (gemv, moe, moe_gemm, narrow, products):
        monkeypatch.setattr(module, "gpu_of", lambda device: H200)
    for module in (gemv, moe, moe_gemm, narrow, sums):
        monkeypatch.setattr(module, "allocate", cuda_on_host.allocate)
    for cached in CACHED:
        cached.cache_clear()
    with cuda_on_host.tensor_maps_on_host():
        yield found
    for cached in CACHED:
        cached.cache_clear()


def ctas_that_fit(shared_bytes: int, sm_bytes: int = SM_BYTES) -> int:
    return sm_bytes // (shared_bytes + RESERVED_BYTES)


@pytest.mark.parametrize("sm_bytes", [SM_BYTES, 100 * 1024])
@pytest.mark.parametrize("ctas", range(1, 9))
def test_exactly_as_many_ctas_fit(ctas: int, sm_bytes: int) -> None:
    most = sm_bytes // ctas - RESERVED_BYTES
    for used in (0, 1000, most // 2, most):
        taken = bytes_for_ctas(used, ctas, sm_bytes)
        assert taken >= used
        assert ctas_that_fit(taken, sm_bytes) == ctas


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_decode(head_size: int, launches: dict[str, Launch]) -> None:
    """By their shared memory more CTAs would fit; of head size 64 registers suffice for them."""
    step = Step([9000] * 4, [1] * 4, head_size=head_size, group=8)
    with decode_on_host(step):
        inputs = inputs_of(step, query=torch.zeros(4, 16, head_size, dtype=BF16))
        plan = decode.plan_of(inputs.packed, decode.bind_recipe(inputs).variant)
    with patch.object(decode, "_merge", lambda *_: None):
        decode.run(inputs, plan)
    found, variant = launches["decode"], plan.variant
    assert found.grid == 132 * found.ctas_per_sm == 132 * variant.ctas
    assert ctas_that_fit(found.shared_bytes) > variant.ctas


@pytest.mark.parametrize("m", [1, 16])
def test_gemv(m: int, launches: dict[str, Launch]) -> None:
    """One token's x takes so little memory that more CTAs would fit."""
    product = gemv.GemvProduct(torch.Size((m, 4096)), 28672, BF16, -1, False, None)
    any_weight = torch.zeros(1)
    product(torch.zeros(m, 4096, dtype=BF16), any_weight, any_weight, any_weight, None)
    found, plan = launches["linear_gemv"], product._plan
    assert found.ctas_per_sm == plan.ctas
    assert (ctas_that_fit(found.shared_bytes) > plan.ctas) == (m == 1)


@pytest.mark.parametrize(
    ("launcher", "planner", "maker"),
    [(moe, moe, "_plan"), (moe_gemm, products, "make_plan")],
    ids=["few tokens", "many tokens"],
)
def test_experts(
    launcher: Any,
    planner: Any,
    maker: str,
    launches: dict[str, Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, plans = getattr(planner, maker), list[Any]()

    def recorded(*arguments: Any) -> Any:
        plans.append(make(*arguments))
        return plans[-1]

    monkeypatch.setattr(planner, maker, recorded)
    experts = experts_of(KINDS["swiglu"], 3, 288, 160)
    matrices = packed_on_host(experts, BF16)
    routing = random_routing(9, 1, 3)
    launcher.run(random_hidden(9, 288, BF16), *matrices, experts.activation, *routing)
    (found,) = (launch for launch in launches.values() if launch.ctas_per_sm)
    assert found.ctas_per_sm == plans[-1].ctas <= ctas_that_fit(found.shared_bytes)
