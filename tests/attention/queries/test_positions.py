"""Sequences and positions of query tokens: the kernel's equal PyTorch's bit for bit."""

from collections.abc import Callable, Sequence

import pytest
import torch

from halfbyte.attention.queries import QueryPositions

pytest.importorskip("triton")

from slow import CAPABILITIES
from triton_compiler import compile_kernel
from triton_interpreter import interpreted

KERNEL = "halfbyte.attention.queries.positions_kernel"
CASES: dict[str, tuple[Sequence[int], Sequence[int], int]] = {
    # Query tokens per sequence, lengths, tokens of padding.
    "decode": ((1,) * 5, (70, 1, 300, 64, 2), 0),
    "padded-decode": ((1, 1, 1, 0, 0), (70, 1, 300, 0, 0), 2),
    "drafts": ((4,) * 40, tuple(range(4, 164, 4)), 0),
    "mixed": ((300, 1, 0, 17, 1, 0), (300, 9, 5, 17, 700, 0), 3),
    "empty-sequences-first": ((0, 0, 3), (4, 0, 3), 1),
    "shorter-than-its-queries": ((4, 4, 4), (1, 0, 2), 0),
    "one-token": ((1,), (1,), 0),
    "one-block": ((128,), (128,), 0),
    "past-a-block": ((128, 1), (130, 1), 0),
    "no-tokens": ((0, 0), (5, 0), 0),
    "only-padding": ((0, 0), (5, 0), 4),
    "no-sequences": ((), (), 3),
    "nothing": ((), (), 0),
    "longest": ((2, 1), (2**31 - 1, 2**31 - 2), 0),
}

Arguments = tuple[torch.Tensor, torch.Tensor, int]


def arguments_of(
    counts: Sequence[int], lengths: Sequence[int], padding: int, device: str = "cpu"
) -> Arguments:
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return starts, seq_lens, sum(counts) + padding


def random_arguments(seed: int, device: str = "cpu") -> Arguments:
    """Some sequences without tokens, some shorter than their tokens, some padding."""
    torch.manual_seed(seed)
    size = int(torch.randint(1, 400, ()))
    counts = torch.randint(0, int(torch.randint(2, 9, ())), (size,))
    lengths = counts + torch.randint(-1, 90, (size,))
    padding = int(torch.randint(0, 4, ()))
    return arguments_of(counts.tolist(), lengths.clamp(min=0).tolist(), padding, device)


def assert_equal(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        assert torch.equal(a, b)


def find_positions() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    found: Callable[..., tuple[torch.Tensor, torch.Tensor]] = interpreted(KERNEL).find_positions
    return found


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_pytorch(name: str) -> None:
    arguments = arguments_of(*CASES[name])
    assert_equal(find_positions()(*arguments), QueryPositions.reference(*arguments))


@pytest.mark.parametrize("seed", range(8))
def test_kernel_equals_pytorch_on_random_batches(seed: int) -> None:
    arguments = random_arguments(seed)
    assert_equal(find_positions()(*arguments), QueryPositions.reference(*arguments))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernel_reads_strided_and_unaligned_arguments(dtype: torch.dtype) -> None:
    starts, lengths, tokens = random_arguments(9)
    expected = QueryPositions.reference(starts, lengths, tokens)
    lengths = lengths.to(dtype)
    strided = torch.stack([starts, starts + 1], 1)[:, 0], torch.stack([lengths] * 2, 1)[:, 0]
    shifted = torch.cat([starts[:1], starts])[1:], torch.cat([lengths[:1], lengths])[1:]
    for given in (strided, shifted):
        assert_equal(find_positions()(*given, tokens), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_pytorch_on_a_gpu(name: str) -> None:
    arguments = arguments_of(*CASES[name], device="cuda")
    assert_equal(QueryPositions.of(*arguments), QueryPositions.reference(*arguments))


@pytest.mark.gpu
def test_captured_kernel_follows_lengths() -> None:
    starts, lengths, tokens = arguments_of((1,) * 300, range(1, 301), 4, "cuda")
    QueryPositions.of(starts, lengths, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = QueryPositions.of(starts, lengths, tokens)
    for count in (300, 299, 17, 1, 0):  # real sequences; the others pad the graph
        starts.copy_(torch.arange(301).clamp(max=count))
        lengths.copy_(torch.randint(1, 10_000, (300,)))
        lengths[count:] = 0
        graph.replay()
        assert_equal(captured, QueryPositions.reference(starts, lengths, tokens))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiles(capability: int) -> None:
    from halfbyte.attention.queries.positions_kernel import _BLOCK, positions_kernel

    types = dict.fromkeys(("query_start_loc", "seq_lens", "sequences"), "*i32")
    usage = compile_kernel(
        positions_kernel, {**types, "positions": "*i64"}, {"block": _BLOCK}, capability
    )
    assert usage.stack == 0
