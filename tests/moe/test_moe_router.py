"""`route` in PyTorch, and its kernel on a GPU."""

import pytest
import torch

from halfbyte.moe import route, route_reference
from halfbyte.moe.cuda.router import MAX_TOKENS
from moe.routers import SHAPES, assert_routes, exact_case


@pytest.mark.parametrize("renormalize", [True, False])
def test_reference(renormalize: bool) -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    gate = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [-1.0, 0.0]])
    weights, ids = route(x, gate, 2, renormalize=renormalize)
    assert ids.tolist() == [[1, 2], [0, 1]]  # equal ones in ascending order
    logits = torch.tensor([[0, 1, 1, -1], [2, 2, 0, 0]], dtype=torch.float64)
    expected = logits.softmax(-1).gather(1, ids.long())
    if renormalize:
        expected = torch.full((2, 2), 0.5, dtype=torch.float64)
    torch.testing.assert_close(weights.double(), expected)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


def test_padding_gets_no_experts() -> None:
    x, gate = torch.ones(2, 4), torch.ones(3, 4)
    weights, ids = route(x, gate, 2, padding=torch.tensor([False, True]))
    assert ids.tolist() == [[0, 1], [-1, -1]]
    assert weights.tolist() == [[0.5, 0.5], [0.0, 0.0]]


def test_bias_and_no_tokens() -> None:
    gate, bias = torch.ones(3, 4), torch.tensor([0.0, 2.0, 1.0])
    assert route(torch.zeros(1, 4), gate, 3, bias=bias).ids.tolist() == [[1, 2, 0]]
    weights, ids = route(torch.zeros(0, 4), gate, 3)
    assert weights.shape == ids.shape == (0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4)}, r"x: expected floating point \[M, H\]"),
        ({"gate": torch.zeros(3, 5)}, r"gate: expected torch.float32 \[3, 4\]"),
        ({"gate": torch.zeros(3, 4).half()}, "gate: expected torch.float32"),
        ({"bias": torch.zeros(4)}, r"bias: expected torch.float32 \[3\]"),
        ({"padding": torch.zeros(3).bool()}, r"padding: expected torch.bool \[2\]"),
        ({"top_k": 4}, "top_k: expected 1 to 3"),
        ({"top_k": 0}, "top_k: expected 1 to 3"),
    ],
)
def test_errors(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"x": torch.zeros(2, 4), "gate": torch.zeros(3, 4), "top_k": 1}
    with pytest.raises(ValueError, match=message):
        route(**{**arguments, **changes})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("m", [1, 7, 64, MAX_TOKENS, MAX_TOKENS + 1])
def test_on_a_gpu(shape: tuple[int, int, int, torch.dtype], m: int) -> None:
    """Also in a CUDA graph, behind a kernel that writes x."""
    x, gate, bias = (t.cuda() for t in exact_case(shape, m))
    for renormalize in (True, False):
        given = torch.zeros_like(x)
        route(given, gate, shape[2], bias=bias, renormalize=renormalize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = route(given * 2, gate, shape[2], bias=bias, renormalize=renormalize)
        given.copy_(x / 2)
        graph.replay()
        expected = route_reference(x, gate, shape[2], bias=bias, renormalize=renormalize)
        assert_routes(found, expected)
