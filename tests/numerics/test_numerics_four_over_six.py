"""The recipe `four_over_six`: the scale of each block, never the one with the larger error."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.numerics import nvfp4
from numerics import brute_force


def scale_of(block: list[float]) -> float:
    _, scales = nvfp4.quantize(torch.tensor(block), 1.0, "four_over_six")
    return float(scales.float())


def squared_error(block: torch.Tensor, g: np.float32, recipe: nvfp4.Recipe) -> np.float32:
    data, scales = nvfp4.quantize(block, float(g), recipe)
    codes = [nibble for byte in data.tolist() for nibble in (byte % 16, byte // 16)]
    quantized = (codes, int(scales.view(torch.uint8)))
    return brute_force.nvfp4_squared_error(brute_force.float32_scalars(block), g, quantized)


@pytest.mark.parametrize(
    ("block", "scale"),
    [
        pytest.param([6.0, 4.0, 3.0, 2.0] * 4, 1.0, id="six-is-exact"),
        pytest.param([12.0, 9.0, 6.0, 3.0] * 4, 3.0, id="four-is-exact"),
        pytest.param([6.0] + [4.5] * 15, 1.5, id="three-quarters-of-amax"),
        pytest.param([-6.0] + [0.0] * 15, 1.0, id="both-exact"),
        pytest.param([6.0] + [4.25] * 15, 1.0, id="equal-errors"),
        pytest.param([-6.0] + [-4.25] + [0.0] * 14, 1.0, id="equal-errors-negative"),
        pytest.param([6.0, float(np.nextafter(np.float32(4.25), 5))] * 8, 1.5, id="above-tie"),
        pytest.param([6.0, float(np.nextafter(np.float32(4.25), 4))] * 8, 1.0, id="below-tie"),
        pytest.param([0.0] * 16, 0.0, id="zero"),
    ],
)
def test_four_over_six_takes_the_smaller_error_and_six_on_ties(
    block: list[float], scale: float
) -> None:
    assert scale_of(block) == scale


def test_four_over_six_is_decided_for_each_block_alone() -> None:
    x = torch.tensor([[6.0, 4.0] * 8 + [6.0, 4.5] * 8, [6.0, 4.5] * 8 + [6.0, 4.0] * 8])
    _, scales = nvfp4.quantize(x, 1.0, "four_over_six")
    assert scales.float().tolist() == [[1.0, 1.5], [1.5, 1.0]]


def test_four_over_six_default_scale_leaves_headroom() -> None:
    x = torch.tensor([8.0, 6.0] * 8)
    g = nvfp4.global_scale_from_amax(8.0, "four_over_six")
    _, scales = nvfp4.quantize(x, g, "four_over_six")
    assert scales.float().tolist() == [384.0]
    assert torch.equal(nvfp4.dequantize(*nvfp4.quantize(x, g, "four_over_six"), g), x)


@settings(deadline=None, max_examples=150)
@given(
    block=st.lists(st.floats(-100, 100, width=32), min_size=16, max_size=16),
    g=st.floats(2.0**-12, 1, width=32),
)
def test_four_over_six_is_never_worse_than_amax6(block: list[float], g: float) -> None:
    x, scale = torch.tensor(block), np.float32(g)
    assert squared_error(x, scale, "four_over_six") <= squared_error(x, scale, "amax6")


def test_four_over_six_is_often_better_on_normal_values() -> None:
    x = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    g = nvfp4.global_scale_from_amax(x.abs().max(), "four_over_six")
    _, four_over_six = nvfp4.quantize(x, g, "four_over_six")
    _, amax6 = nvfp4.quantize(x, g, "amax6")
    share = (four_over_six.float() != amax6.float()).float().mean().item()
    assert 0.2 < share < 0.8


def test_four_over_six_errors_are_rounded_in_order() -> None:
    """Nearly equal errors, which another order of operations decides differently."""
    generator = np.random.default_rng(0)
    for g in generator.uniform(0.5, 2, 60).astype(np.float32):
        for scale in (1.0, 1.25, 1.5, 1.75, 3.5):
            middle = brute_force.with_neighbours([4.25 * scale * float(g)]).flatten()
            x = torch.zeros(3, 16)
            x[:, 0], x[:, 5] = 6 * scale * float(g), middle
            data, scales = nvfp4.quantize(x, float(g), "four_over_six")
            expected_data, expected_scales = brute_force.nvfp4_quantize(
                x, float(g), "four_over_six"
            )
            assert torch.equal(data, expected_data)
            assert torch.equal(scales.view(torch.uint8), expected_scales)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_pairwise_sum_adds_neighbours_first(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(9, size, generator=generator) * 10 ** torch.randn(9, size, generator=generator)
    expected = []
    for row in x.numpy():
        terms = list(row)
        while len(terms) > 1:
            terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
        expected.append(float(terms[0]))
    assert nvfp4.pairwise_sum(x).tolist() == expected


def test_pairwise_sum_order_shows() -> None:
    x = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    assert nvfp4.pairwise_sum(x).item() == 2.0**24 + 2
