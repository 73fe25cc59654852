"""Slots of a step's tokens in the rings: the kernel's equal PyTorch's bit for bit."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from halfbyte.kvcache.recent import PADDING_ENTRY
from halfbyte.kvcache.recent_slots import TokenSlots

pytest.importorskip("triton")

from slow import CAPABILITIES
from triton_compiler import compile_kernel
from triton_interpreter import interpreted

KERNEL = "halfbyte.kvcache.recent_slots_kernel"
RINGS = [1, 64, 70]


class Arguments(NamedTuple):
    """Those of `TokenSlots.of` without the ring's size."""

    sequences: torch.Tensor
    positions: torch.Tensor
    entries: torch.Tensor


def arguments_of(num_seqs: int, num_tokens: int, padding: int, device: str = "cpu") -> Arguments:
    """Tokens of random sequences and positions, and then some without."""
    torch.manual_seed(num_tokens)
    nothing = torch.full((padding,), -1)
    sequences = torch.cat([torch.randint(0, num_seqs, (num_tokens,)), nothing]).int()
    positions = torch.cat([torch.randint(0, 2**40, (num_tokens,)), nothing])
    entries = (torch.randperm(num_seqs) + 1).int()
    return Arguments(*(x.to(device) for x in (sequences, positions, entries)))


def assert_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        assert torch.equal(a, b)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "padding"),
    [(1, 1, 0), (5, 5, 3), (9, 128, 0), (300, 300, 1), (4, 0, 6), (4, 0, 0)],
)
def test_kernel_equals_pytorch(num_seqs: int, num_tokens: int, padding: int, ring: int) -> None:
    find_slots = interpreted(KERNEL).find_slots
    arguments = arguments_of(num_seqs, num_tokens, padding)
    assert_equal(find_slots(*arguments, ring, None), TokenSlots.reference(*arguments, ring))
    rows = torch.arange(num_tokens + padding)
    for some in (rows[rows % 3 > 0], rows[1::2], rows[:0]):  # the second is strided
        found = find_slots(*arguments, ring, some)
        assert found[0] is some
        assert_equal(found, TokenSlots.reference(*arguments, ring, some))


def test_kernel_reads_strided_and_unaligned_arguments() -> None:
    arguments = arguments_of(7, 200, 2)
    expected = TokenSlots.reference(*arguments, 70)
    strided = Arguments(*(torch.stack([x, x + 1], 1)[:, 0] for x in arguments))
    shifted = Arguments(*(torch.cat([x[:1], x])[1:] for x in arguments))
    for given in (strided, shifted):
        assert_equal(interpreted(KERNEL).find_slots(*given, 70, None), expected)


def test_padding_of_a_step_without_sequences() -> None:
    sequences = torch.full((3,), -1, dtype=torch.int32)
    nothing = torch.empty(0, dtype=torch.int32)
    found = interpreted(KERNEL).find_slots(sequences, sequences.long(), nothing, 64, None)
    rows, owners, slots = (x.tolist() for x in found)
    assert (rows, owners, slots) == ([0, 1, 2], [PADDING_ENTRY] * 3, [0] * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("ring", RINGS)
def test_kernel_equals_pytorch_on_a_gpu(ring: int) -> None:
    arguments = arguments_of(300, 2000, 7, "cuda")
    assert_equal(TokenSlots.of(*arguments, ring), TokenSlots.reference(*arguments, ring))
    rows = torch.arange(0, 2000, 3, device="cuda")
    found, expected = (f(*arguments, ring, rows) for f in (TokenSlots.of, TokenSlots.reference))
    assert_equal(found, expected)


@pytest.mark.gpu
def test_captured_kernel_follows_positions() -> None:
    arguments = arguments_of(256, 256, 4, "cuda")
    TokenSlots.of(*arguments, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = TokenSlots.of(*arguments, 64)
    for num_tokens in (260, 255, 1, 0):
        for own, new in zip(
            arguments, arguments_of(256, num_tokens, 260 - num_tokens), strict=True
        ):
            own.copy_(new)
        graph.replay()
        assert_equal(captured, TokenSlots.reference(*arguments, 64))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("has_rows", [False, True])
def test_kernel_compiles(has_rows: bool, capability: int) -> None:
    from halfbyte.kvcache.recent_slots_kernel import _BLOCK, slots_kernel

    types = dict.fromkeys(("sequences", "entries"), "*i32")
    types |= dict.fromkeys(("positions", "rows", "owners", "slots"), "*i64")
    constants = {"ring": 64, "padding": PADDING_ENTRY, "has_rows": has_rows, "block": _BLOCK}
    assert compile_kernel(slots_kernel, types, constants, capability).stack == 0
