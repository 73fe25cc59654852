"""The Hadamard transform against its matrix, and the order of its operations."""

import pytest
import torch

from halfbyte.numerics.hadamard import block_size, hadamard


def sylvester(n: int) -> torch.Tensor:
    """The matrix as Sylvester constructs it, in float64 and without its factor."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize(
    ("head_size", "block"), [(1, 1), (16, 16), (64, 64), (80, 16), (96, 32), (128, 128), (7, 1)]
)
def test_hadamard_is_the_matrix_in_equal_blocks(head_size: int, block: int) -> None:
    assert block_size(head_size) == block
    matrix = torch.block_diag(*[sylvester(block) / block**0.5] * (head_size // block))
    x = torch.randn(5, 3, head_size, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x), x @ matrix, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-12, atol=1e-12)
    result = hadamard(x.bfloat16())
    assert result.dtype == torch.float32
    exact = x.bfloat16().double() @ matrix
    torch.testing.assert_close(result.double(), exact, rtol=1e-6, atol=1e-6)


def test_hadamard_adds_neighbours_first() -> None:
    """In float32 the order shows: 2^24 + 1 rounds to 2^24."""
    big = 2.0**24
    x = torch.tensor([big, 1.0, -big, 0.0])
    # Neighbours: (big, big - 1), (-big, -big); then those two apart; then the factor 0.5.
    expected = [0.0, -0.5, big, (2 * big - 1) * 0.5]
    assert hadamard(x).tolist() == [torch.tensor(e).item() for e in expected]


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 32)])
def test_hadamard_of_nothing(shape: tuple[int, ...]) -> None:
    assert hadamard(torch.empty(shape)).shape == shape
