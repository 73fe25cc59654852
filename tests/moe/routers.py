"""Routers whose logits are exact, so that ranks do not depend on the order of sums."""

import torch

from halfbyte.moe.router import Routing

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [(128, 2048, 8, BF16), (32, 2880, 4, BF16), (60, 136, 4, FP16), (200, 5000, 10, BF16)]
"""Experts, hidden size, experts per token, dtype."""


def exact_case(
    shape: tuple[int, int, int, torch.dtype], m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, gate and bias. Many logits are equal: they are multiples of 1 / 4 up to 16 or so."""
    experts, hidden, _, dtype = shape
    x = torch.randint(-1, 2, (m, hidden)) * (torch.rand(m, hidden) < 64 / hidden)
    gate = torch.randint(-2, 3, (experts, hidden)) / 4
    bias = torch.randint(-2, 3, (experts,)) / 4
    return x.to(dtype), gate.to(dtype), bias.to(dtype)


def assert_routes(found: Routing, expected: Routing) -> None:
    """Equal ids, and weights within the errors of float32 exponentials."""
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-6, atol=1e-9)
