"""The router's kernel, run on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

import cuda_on_host
from halfbyte.kernels.runtime import nvrtc
from halfbyte.moe.cuda import router
from halfbyte.moe.router import Routing, route_reference
from moe.on_host import moved
from moe.routers import BF16, FP16, assert_routes, exact_case

pytestmark = cuda_on_host.needs_compiler

Shape = tuple[int, int, int, torch.dtype]


@contextmanager
def on_host(x: torch.Tensor) -> Iterator[None]:
    """Let the kernel run on the CPU, where it starts before `x` is written."""

    def launch(kernel: Any, grid: int, threads: int, arguments: Any, *, overlap: bool) -> None:
        assert overlap
        cuda_on_host.launch(
            *(kernel.function, grid, threads, *arguments),
            shared_bytes=kernel.shared_bytes,
            late=(x, torch.full_like(x, torch.nan)),
        )

    router.compile_router.cache_clear()
    with (
        cuda_on_host.overlapping_kernels(90),
        patch.object(nvrtc, "launch", launch),
        patch.object(router, "allocate", cuda_on_host.allocate),
    ):
        yield
    router.compile_router.cache_clear()


def run(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool = True,
    padding: torch.Tensor | None = None,
) -> Routing:
    """Run the launcher; memory after all tensors is unmapped."""
    late = moved(x)
    with on_host(late):
        bias, padding = (None if t is None else moved(t) for t in (bias, padding))
        return Routing(*router.route_few(late, moved(gate), top_k, bias, renormalize, padding))


@pytest.mark.parametrize(
    ("shape", "m"),
    [
        ((128, 256, 8, BF16), 11),  # whole steps
        ((32, 744, 4, FP16), 8),
        ((60, 136, 4, BF16), 1),  # the last tile has no row g + 8, some lanes have no k
        ((200, 2600, 32, BF16), 9),  # more steps than registers hold, more tiles than 8 warps
        ((4, 8, 4, BF16), 3),
    ],
    ids=str,
)
def test_ranks_and_weights(shape: Shape, m: int) -> None:
    x, gate, bias = exact_case(shape, m)
    for renormalize, own_bias, padding in (
        (True, None, None),
        (False, bias, torch.arange(m) % 3 == 2),
    ):
        found = run(x, gate, own_bias, shape[2], renormalize, padding)
        options: Any = {"bias": own_bias, "renormalize": renormalize, "padding": padding}
        assert_routes(found, route_reference(x, gate, shape[2], **options))


def test_logits_are_rounded_to_the_dtype_of_x() -> None:
    """1 + 2^-9 and 1 are equal in bfloat16, so that the lower number is first."""
    x = torch.ones(1, 8, dtype=BF16)
    gate = torch.zeros(3, 8, dtype=BF16)
    gate[:, 0] = 1
    gate[2, 1], gate[0, 1] = 2**-9, -(2**-7)
    assert run(x, gate, None, 3).ids.tolist() == [[1, 2, 0]]


def test_zeros_of_both_signs_are_equal() -> None:
    x = torch.full((1, 8), 1e-30, dtype=BF16)
    gate = torch.zeros(3, 8, dtype=BF16)
    gate[0], gate[1] = -1e-30, 1e-30  # products underflow
    weights, ids = run(x, gate, None, 3)
    assert ids.tolist() == [[0, 1, 2]]
    assert weights.tolist() == [[pytest.approx(1 / 3)] * 3]


def test_a_token_s_bits_do_not_depend_on_others() -> None:
    x, gate = torch.randn(19, 264).to(BF16), torch.randn(128, 264).to(BF16)
    all_weights, all_ids = run(x, gate, None, 8)
    for first, last in ((0, 1), (3, 9), (10, 19)):
        weights, ids = run(x[first:last], gate, None, 8)
        assert torch.equal(weights, all_weights[first:last])
        assert torch.equal(ids, all_ids[first:last])
    logits = torch.nn.functional.linear(x.double(), gate.double())
    chosen = logits.gather(1, all_ids.long())
    assert (chosen[:, 1:] - chosen[:, :-1]).max() < 0.25  # up to rounding of logits of some 30
    assert len({*all_ids[0].tolist()}) == 8


@pytest.mark.parametrize(
    "shape", [(257, 64, 8, BF16), (64, 60, 8, BF16), (64, 64, 33, BF16), (64, 64, 8, torch.float32)]
)
def test_what_is_not_supported(shape: Shape) -> None:
    assert not router.RouterShape(*shape).is_supported
