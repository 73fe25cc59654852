"""Other projects' schemes as they are published, on values that can be worked out by hand."""

import json
from typing import Any

import pytest
import torch

from benchmarks import kv_peers
from benchmarks.peers import kv_schemes as peers

NONE = peers.Calibration(1.0, torch.zeros(1, 1, 1))


def test_nf4_levels_are_the_published_ones() -> None:
    """QLoRA, appendix E."""
    published = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
    published += [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    published += [0.07958029955625534, 0.16093020141124725, 0.24611230194568634]
    published += [0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
    published += [0.7229568362236023, 1.0]
    torch.testing.assert_close(
        peers.normal_float_levels(), torch.tensor(published), atol=1e-6, rtol=0
    )


def test_q4_0_keeps_the_largest_value_and_rounds_halves_up() -> None:
    x = torch.zeros(1, 1, 32)
    x[0, 0, :5] = torch.tensor([-8.0, 7.0, 7.9, 0.5, -0.5])
    found = peers.to_q4_0(x, NONE)[0, 0]
    assert found[:5].tolist() == [-8.0, 7.0, 7.0, 1.0, 0.0]
    assert not found[5:].any()


@pytest.mark.parametrize("by_channel", [False, True])
def test_int4_has_15_steps_between_a_group_s_ends(by_channel: bool) -> None:
    x = torch.linspace(-1, 14, 32).round()
    x = x[None, :, None].expand(1, 32, 3) if by_channel else x[None, None]
    rounding = (peers.to_int4_by_channel if by_channel else peers.to_int4)(32)
    torch.testing.assert_close(rounding(x, NONE), x, atol=0, rtol=0)
    halfway = rounding(x + torch.where(x == 7, 0.4, 0.0), NONE)
    torch.testing.assert_close(halfway, x, atol=0, rtol=0)


def test_channels_of_a_broken_group_end_where_the_tokens_do() -> None:
    x = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    found = peers.to_int4_by_channel(32)(x, NONE)
    assert found.shape == x.shape
    step = (x[:, :32].amax(1) - x[:, :32].amin(1)) / 15
    assert ((found - x)[:, :32].abs() <= 0.51 * step[:, None]).all()


@pytest.mark.parametrize("scheme", peers.SCHEMES, ids=lambda scheme: scheme.name)
def test_schemes_lose_little_of_normal_values(scheme: Any) -> None:
    x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(1))
    calibration = peers.Calibration(2 * float(x.abs().max()), x.mean(1, keepdim=True))
    for rounding in (scheme.k, scheme.v):
        found = rounding(x, calibration)
        assert found.shape == x.shape
        error = float((found - x).square().mean() / x.square().mean())
        # 4 bits: 16 levels of N(0, 1) at best leave 0.0095 of its energy (Lloyd and Max).
        assert (0.005 if scheme.bits < 8 else 1e-4) < error < (0.03 if scheme.bits < 8 else 2e-3)


def test_the_committed_run_has_all_schemes() -> None:
    report = json.loads(kv_peers.RESULT.read_text())
    (rows,) = report["models"].values()
    assert [row["scheme"] for row in rows] == [scheme.name for scheme in peers.SCHEMES]
