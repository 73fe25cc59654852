"""The CUDA kernels for many tokens per expert on SM90, run on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

import cuda_on_host
from halfbyte.linear.w4a16.gemv.plan import Machine
from halfbyte.moe import PackedExperts
from halfbyte.moe.cuda import sums
from halfbyte.moe.cuda.gemm_sm90 import launcher
from moe.cases import assert_close_enough, random_hidden, random_routing
from moe.on_host import BF16, KINDS, Kind, experts_of, moved, moved_matrices
from slow import slow

pytestmark = cuda_on_host.needs_compiler

GPU = Machine(90, 232448, 4, 2)


@contextmanager
def on_host() -> Iterator[None]:
    """Let the launcher's kernels run on the CPU; memory that it allocates begins as NaN."""
    caches = (launcher._gemm_kernel, launcher._map, launcher._weight_map)
    for cached in caches:
        cached.cache_clear()
    with (
        cuda_on_host.overlapping_kernels(GPU.capability),
        cuda_on_host.tensor_maps_on_host(),
        patch.object(launcher, "machine_of", lambda device: GPU),
        patch.object(launcher, "allocate", cuda_on_host.allocate),
        patch.object(sums, "allocate", cuda_on_host.allocate),
    ):
        yield
    for cached in caches:
        cached.cache_clear()


def run(
    hidden: torch.Tensor,
    experts: PackedExperts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    tokens: int | None = None,
) -> torch.Tensor:
    """Run the launcher; memory after all tensors is unmapped."""
    matrices = moved_matrices(experts.gate_up), moved_matrices(experts.down)
    with on_host():
        return launcher.moe_gemm(
            moved(hidden), *matrices, experts.activation, moved(ids), moved(weights), tokens
        )


HIDDEN, INTERMEDIATE = 608, 96
"""HIDDEN ends within a step, and rows of MXFP4's scales begin at odd bytes."""


@pytest.mark.parametrize("tokens", [64, slow(96)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_error(kind: Kind, tokens: int) -> None:
    experts = experts_of(kind, 5, HIDDEN, INTERMEDIATE)
    ids, weights = random_routing(40, 3, 5)
    hidden = random_hidden(40, HIDDEN, kind[3])
    out = run(hidden, experts, ids, weights, tokens)
    assert_close_enough(out, hidden, experts, ids, weights)
