"""Rounding by weighted error: against float64 and brute force, and edge cases."""

import math

import pytest
import torch

from halfbyte.numerics import e2m1, e4m3, nvfp4
from halfbyte.numerics.hadamard import hadamard
from halfbyte.numerics.weighted_rounding import (
    DAMPING,
    channel_weights,
    feedback_factor,
    quantize,
)

G = 0.0137


def random_moment(size: int, heads: int = 1) -> torch.Tensor:
    """E[q q^T] of queries mostly in a few directions: float64 `[heads, size, size]`."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, 4 * size, size, generator=generator, dtype=torch.float64)
    q = q * torch.logspace(0, -2, size, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    q = q @ turn
    return q.transpose(1, 2) @ q / q.shape[1]


def damped(moment: torch.Tensor) -> torch.Tensor:
    size = moment.shape[-1]
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    return moment + DAMPING * mean[..., None, None] * torch.eye(size, dtype=torch.float64)


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_feedback_is_the_best_answer_to_an_error() -> None:
    """F[i, R] = -inv(C[R, R]) C[R, i], in float64; and weights are the diagonal."""
    moment = random_moment(48, 2)
    factor, weights = feedback_factor(1e12 * moment)
    c = damped(moment)
    for head in range(2):
        for i in range(47):
            rest = c[head, i + 1 :, i + 1 :]
            expected = -torch.linalg.solve(rest, c[head, i + 1 :, i])
            torch.testing.assert_close(
                factor[head, i, i + 1 :].double(), expected, rtol=1e-5, atol=1e-6
            )
            assert not factor[head, i, : i + 1].any()
        diagonal = c[head].diagonal()
        torch.testing.assert_close(weights[head].double(), diagonal / diagonal.mean())
    assert factor.dtype == weights.dtype == torch.float32


def test_what_is_not_known_changes_nothing() -> None:
    moment = random_moment(32, 4)
    moment[1] = 0
    moment[2, 3, 4] = math.nan
    moment[3, 5, 5] = math.inf
    factor, weights = feedback_factor(moment)
    assert torch.equal(factor[0], feedback_factor(moment[0])[0])
    assert not factor[1:].any()
    assert (weights[1:] == 1).all()
    energy = torch.rand(4, 32, dtype=torch.float64)
    energy[1], energy[2, 1], energy[3, 0] = 0, math.nan, math.inf
    weights = channel_weights(energy)
    expected = energy[0] + DAMPING * energy[0].mean()
    torch.testing.assert_close(weights[0].double(), expected / expected.mean())
    assert (weights[1:] == 1).all()


def by_hand(
    x: list[float], g: torch.Tensor, weights: torch.Tensor | None, feedback: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Codes and scales of one vector, channel by channel and candidate by candidate."""

    def f32(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32)

    y = [f32(value) for value in x]
    codes, scales = [], []
    for begin in range(0, len(y), 16):
        block = y[begin : begin + 16]
        amax = max(float(value.abs()) for value in block)
        start = int(e4m3.encode(f32(amax) / (f32(6.0) * g)))
        best, best_error = 0, f32(math.inf)
        for step in (0, -1, 1, 4):
            byte = min(max(start + step, 1), 126)
            s = e4m3.decode(torch.tensor(byte, dtype=torch.uint8))
            r = 1 / (s * g)
            squares = []
            for c, value in enumerate(block):
                t = (value * r).abs()
                off = e2m1.decode(e2m1.encode(t)) - t
                squares.append(off * off * (1.0 if weights is None else weights[begin + c]))
            while len(squares) > 1:
                squares = [a + b for a, b in zip(squares[::2], squares[1::2], strict=True)]
            error = squares[0] * s * s
            if not best or error < best_error:
                best, best_error = byte, error
        scales.append(best if amax else 0)
        d = e4m3.decode(torch.tensor(best, dtype=torch.uint8)) * g
        for i in range(begin, begin + 16):
            code = e2m1.encode(y[i] * (1 / d))
            codes.append(int(code))
            error = y[i] - e2m1.decode(code) * d
            for k in range(i + 1, len(y)):
                y[k] = y[k] - error * feedback[i, k]
    return codes, scales


@pytest.mark.parametrize("with_feedback", [False, True])
def test_quantize_is_what_its_definition_says(with_feedback: bool) -> None:
    factor, weights = feedback_factor(random_moment(48)[0])
    if not with_feedback:
        factor = torch.zeros_like(factor)
    x = values(6, 48)
    x[2, 16:32] = 0
    x[3] *= 2.0**-9
    x[4] *= 100
    data, scales = quantize(x, G, weights, factor if with_feedback else None)
    for row in range(len(x)):
        codes, expected = by_hand(x[row].tolist(), torch.tensor(G), weights, factor)
        assert scales[row].view(torch.uint8).tolist() == expected
        found = e2m1.unpack(data[row])
        values_of = e2m1.decode(found)  # a code of zero may have either sign
        assert torch.equal(values_of, e2m1.decode(torch.tensor(codes, dtype=torch.uint8)))


def test_blocks_do_not_depend_on_who_updates_them_when() -> None:
    """Gathering earlier errors before each block has the same bits as propagating them at once."""
    factor, weights = feedback_factor(random_moment(64)[0])
    x = values(200, 64)
    data, scales = quantize(x, G, weights, factor)
    codes = e2m1.decode(e2m1.unpack(data))
    d = (e4m3.decode(scales.view(torch.uint8)) * G).repeat_interleave(16, -1)
    errors = torch.zeros(200, 64)
    for begin in range(0, 64, 16):
        block = x[:, begin : begin + 16].clone()
        for i in range(begin):
            block -= errors[:, i, None] * factor[i, begin : begin + 16]
        for c in range(16):
            i = begin + c
            errors[:, i] = block[:, c] - codes[:, i] * d[:, i]
            block[:, c + 1 :] -= errors[:, i, None] * factor[i, i + 1 : begin + 16]
        end = begin + 16
        expected, _ = quantize(x[:, :end], G, weights[:end], factor[:end, :end])
        assert torch.equal(data[:, : begin // 2 + 8], expected)
        chosen = nvfp4.dequantize(data, scales, G)[:, begin : begin + 16]
        torch.testing.assert_close(chosen, codes[:, begin : begin + 16] * d[:, begin : begin + 16])


def test_it_costs_less_where_queries_look() -> None:
    """(x - y)^T C (x - y), for K that is rotated and queries that are."""
    moment = hadamard(hadamard(random_moment(128)[0]).T)
    factor, weights = feedback_factor(moment)
    x = values(500, 128)

    def cost(data: torch.Tensor, scales: torch.Tensor) -> float:
        off = nvfp4.dequantize(data, scales, G, torch.float64) - x
        return float(((off @ moment) * off).sum())

    plain = cost(*nvfp4.quantize(x, G, "four_over_six"))
    fed_back = cost(*quantize(x, G, weights, factor))
    assert fed_back < 0.25 * plain
    assert cost(*quantize(x, G, None, factor)) < 0.3 * plain
    off = [
        ((nvfp4.dequantize(*chosen, G) - x) ** 2 * weights).sum()
        for chosen in (nvfp4.quantize(x, G, "four_over_six"), quantize(x, G, weights))
    ]
    assert off[1] < 0.95 * off[0]


def test_heads_have_their_own() -> None:
    factor, weights = feedback_factor(random_moment(32, 3))
    x = values(7, 3, 32)
    data, scales = quantize(x, G, weights, factor)
    for head in range(3):
        alone = quantize(x[:, head], G, weights[head], factor[head])
        assert torch.equal(data[:, head], alone[0])
        assert torch.equal(scales[:, head].view(torch.uint8), alone[1].view(torch.uint8))


@pytest.mark.parametrize("with_feedback", [False, True])
def test_zeros_nan_and_infinities(with_feedback: bool) -> None:
    """A NaN costs its own block, an infinity saturates, and neither reaches other blocks."""
    known, weights = feedback_factor(random_moment(64)[0])
    factor = known if with_feedback else None
    x = values(5, 64)
    x[1, 20], x[2, 20], x[3, 20], x[4] = math.nan, math.inf, -math.inf, 0
    data, scales = quantize(x, G, weights, factor)
    scales = scales.view(torch.uint8)
    assert scales[1, 1] == 0x7F
    assert not data[1, 8:16].any()
    assert scales[2, 1] == scales[3, 1] == 126
    back = nvfp4.dequantize(data, scales, G)
    assert back[1, 16:32].isnan().all()
    assert back[1, :16].isfinite().all()
    assert back[1, 32:].isfinite().all()
    assert back[2, 20] == -back[3, 20] == 6 * 448 * torch.tensor(G)
    assert back[2:].isfinite().all()
    assert not scales[4].any()
    assert not data[4].any()
    quiet, _ = quantize(x[0], G, weights, factor)
    for row in (1, 2, 3):
        x[row] = torch.where(torch.arange(64) == 20, x[row], x[0])
    data, _ = quantize(x, G, weights, factor)
    assert torch.equal(data[1:4, :8], quiet[:8].expand(3, -1))


def test_ties_go_to_the_scale_of_amax6() -> None:
    """Values that several scales hold exactly."""
    x = torch.zeros(16)
    x[:2] = torch.tensor([6.0, 3.0])
    _, scales = quantize(x, 1.0, torch.ones(16))
    assert float(scales[0]) == 1.0


@pytest.mark.parametrize(
    ("block", "step"),
    [
        ([6.0, 4.0, 1.5], 0),
        ([5.81] + [3 * 0.9375] * 15, -1),  # one value is clipped, the others are exact
        ([6.3] + [3 * 1.125] * 15, 1),
        ([6.0, 4.5, 1.5, 0.75], 4),  # exact where the maximum maps to 4
    ],
)
def test_a_block_takes_the_candidate_with_the_smallest_error(block: list[float], step: int) -> None:
    x = torch.zeros(16)
    x[: len(block)] = torch.tensor(block)
    _, scales = quantize(x, 1.0, torch.ones(16))
    assert int(scales.view(torch.uint8)) == 0x38 + step  # amax6 has 1.0


def test_no_other_scales_are_chosen() -> None:
    x = values(500, 64)
    _, plain = nvfp4.quantize(x, G, "amax6")
    _, chosen = quantize(x, G, torch.rand(64, generator=torch.Generator().manual_seed(4)))
    steps = chosen.view(torch.uint8).int() - plain.view(torch.uint8).int()
    assert steps.unique().tolist() == [-1, 0, 1, 4]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize(torch.ones(8), G, torch.ones(8))
    with pytest.raises(ValueError, match="global_scale: expected a positive finite"):
        quantize(torch.ones(16), 0.0, torch.ones(16))
    with pytest.raises(ValueError, match="global_scale: expected one element"):
        quantize(torch.ones(2, 16), torch.ones(2, 1), torch.ones(16))
