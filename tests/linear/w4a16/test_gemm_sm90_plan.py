"""Plans of the W4A16 GEMM kernel."""

from itertools import pairwise

import pytest

from halfbyte.linear.w4a16.gemm_sm90.plan import TILES, GemmPlan, make_plan
from linear.gpus import H200
from linear.w4a16.gemm_tiles import tile_named

NUM_SMS = H200.num_sms
WEIGHTS = [(6144, 4096), (28672, 4096), (4096, 14336), (200, 144), (48, 16), (128256, 4096)]


@pytest.mark.parametrize("m", [1, 33, 64, 128, 129, 300, 1024, 4096])
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_plans_cover_all_tiles(n: int, k: int, m: int) -> None:
    plan = make_plan(n, k, m, NUM_SMS)
    tiles = plan.tile.pairs(n, m)
    assert 0 <= plan.tiles - tiles < plan.clusters
    # Full waves of all clusters after the cut tiles.
    assert (plan.tiles - plan.cut_tiles) % plan.clusters == 0
    assert plan.cut_tiles <= tiles
    assert plan.cut_tiles == 0 or plan.cut_tiles * plan.steps(k) >= plan.clusters
    assert max(plan.sharers(plan.steps(k)), default=0) <= 32


def test_tiles_are_not_cut_where_x_outgrows_the_cache() -> None:
    """Clusters at different k do not share x through L2; see `GemmPlan.microseconds`."""
    plan = make_plan(4096, 14336, 4096, 132)
    assert plan.cut_tiles == 0
    tiles = 16 * 16
    cut = GemmPlan(tile_named("128x256"), tiles, 66, 66 + tiles % 66, 2)
    assert cut.microseconds(14336, 4096) > 1.05 * plan.microseconds(14336, 4096)
    # With fewer tokens the same split would be faster.
    assert cut.microseconds(14336, 1024) < plan.microseconds(14336, 1024)
    assert make_plan(28672, 4096, 512, 132).cut_tiles > 0


def test_prompts_of_about_a_length_share_a_plan() -> None:
    """In serving, every prompt may have a new length."""
    plans = {make_plan(6144, 4096, m, NUM_SMS) for m in range(993, 1009)}
    assert len(plans) == 1
    (plan,) = plans
    assert plan is make_plan(6144, 4096, 1000, NUM_SMS)


@pytest.mark.parametrize("crossing", [0, 1, 2])
@pytest.mark.parametrize(("cut_tiles", "clusters"), [(1, 1), (4, 3), (4, 32), (24, 66), (112, 66)])
def test_sharers_are_clusters_with_steps(cut_tiles: int, clusters: int, crossing: int) -> None:
    steps = 9
    line = steps + crossing
    spans = [cut_tiles * line * i // clusters for i in range(clusters + 1)]
    wanted = tuple(
        sum(a < (tile + 1) * line and b > tile * line + crossing for a, b in pairwise(spans))
        for tile in range(cut_tiles)
    )
    assert GemmPlan(TILES[0], cut_tiles, clusters, cut_tiles, crossing).sharers(steps) == wanted


def test_tiles_leave_few_rows_idle() -> None:
    """Little padding of tiles, and few idle clusters in the last wave."""
    for m in range(64, 1025, 16):
        plan = make_plan(28672, 4096, m, NUM_SMS)
        tile = plan.tile
        idle = plan.tiles * tile.values_of_pair / (28672 * m) - 1
        assert idle <= 0.1, (m, tile)


def test_the_fastest_of_all_plans_is_found() -> None:
    """Tiles are skipped only if none of their plans can be faster."""
    for n, k in WEIGHTS:
        for m in (16, 80, 272, 1040, 4096):
            plan = make_plan(n, k, m, NUM_SMS)
            fastest = min(make_plan(n, k, m, NUM_SMS, tile).microseconds(k, m) for tile in TILES)
            assert plan.microseconds(k, m) == fastest
