"""Plans of the W4A16 GEMV kernel: they fit, cover all work and keep the order of summation."""

import pytest

from halfbyte.linear.w4a16.gemv import plan as linear_plan
from halfbyte.linear.w4a16.gemv.plan import MAX_K, Gpu, make_plan
from linear.gpus import H200, RTX_3090

SHAPES = [(6144, 4096), (28672, 4096), (4096, 14336), (576, 576), (48, 16), (128256, 4096)]
DOWN_OF_405B = (16384, 53248)
GPUS = {
    "h200": H200,
    "rtx-3090": RTX_3090,
    "like-a100": Gpu(80, 166912, 108, 0),
    "like-rtx-5090": Gpu(120, 101376, 170, 85),
    "like-rtx-3050": Gpu(86, 101376, 20, 0),
    "like-orin": Gpu(87, 166912, 8, 0),
}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (8192, 28672), DOWN_OF_405B, (64, MAX_K)])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_plans_fit_the_gpu(n: int, k: int, gpu: Gpu, batch_invariant: bool) -> None:
    for m in (1, 2, 5, 8, 16, 17, 33, 64, 1000):
        plan = make_plan(n, k, m, gpu, batch_invariant)
        assert plan.ctas * (plan.shared_bytes(n, k, m) + 1024) <= gpu.block_bytes + 1024
        at_once = gpu.num_sms * plan.ctas // plan.split
        if plan.join == 1:
            assert gpu.compute_capability >= 90
            assert plan.split == 2
            at_once = gpu.max_clusters * plan.ctas
        assert 1 <= plan.groups <= min(at_once, linear_plan.row_units(n))
        assert 1 <= plan.round_units <= plan.units(n)
        assert plan.split <= linear_plan.k_blocks(k)
        assert (plan.join == 0) == (plan.split == 1)
        assert 8 * plan.column_tiles * plan.passes(m) >= m


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (8192, 28672), DOWN_OF_405B, (64, MAX_K)])
def test_order_of_sums_does_not_depend_on_the_batch(n: int, k: int, gpu: Gpu) -> None:
    plans = [make_plan(n, k, m, gpu, batch_invariant=True) for m in (1, 3, 16, 40, 64, 4096)]
    assert len({p._replace(column_tiles=1, stages=2) for p in plans}) == 1
    assert plans[0].column_tiles == 1


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_unit_has_its_group(n: int, k: int, gpu: Gpu) -> None:
    """Computed as by `Place` of `linear/w4a16/gemv/loader.cuh`."""
    units = linear_plan.row_units(n)
    for m in (1, 16, 64):
        plan = make_plan(n, k, m, gpu)
        each = units // plan.groups
        more = units - plan.groups * each
        found: list[int] = []
        for group in range(plan.groups):
            first, count = group * each + min(group, more), each + (group < more)
            assert 1 <= count <= plan.units(n)
            found += range(first, first + count)
        assert found == list(range(units))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("n", "k"), [*SHAPES[:3], (4096, 4096), (8192, 8192), (57344, 8192), (151936, 4096)]
)
def test_an_h200_is_filled(n: int, k: int, batch_invariant: bool) -> None:
    """Every SM works, reads the weights once, and has enough loads in flight."""
    for m in (1, 8, 16):
        plan = make_plan(n, k, m, H200, batch_invariant)
        assert plan.groups * plan.split >= 120
        assert plan.passes(m) == 1
        assert plan.stages * plan.warps * plan.ctas >= 12
        # The busiest SM has at most a third more than the mean.
        work = plan.units(n) / linear_plan.row_units(n) * plan.groups
        assert plan.ctas > 1 or work <= 1.4


def test_a_narrow_matrix_is_split_along_k() -> None:
    """If rows are too few for all SMs."""
    assert make_plan(1024, 4096, 8, H200).split >= 4
    assert make_plan(28672, 4096, 1, H200).split == 1


def test_too_large_a_k_is_refused() -> None:
    with pytest.raises(ValueError, match="k=10000000: needs more shared memory"):
        make_plan(64, 10_000_000, 1, H200)
