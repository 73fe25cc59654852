"""What is measured of linear layers: shapes of weights, and numbers of rows of x."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, int]
"""N output and K input features."""

GPU_SHAPES: tuple[Shape, ...] = ((6144, 4096), (28672, 4096), (4096, 14336))
"""q, k and v, gate and up, and down of Llama-3.1-8B."""
GPU_ROWS = (
    *(1, 2, 4, 8, 16, 32, 64, 128, 256, 257, 300, 384, 512, 513, 640, 768, 1024),
    *(1536, 2048, 3072, 4096, 8192),
)
"""Powers of two, one more than that, and some between them."""
CPU_SHAPES: tuple[Shape, ...] = ((2048, 2048), (1024, 4096))
CPU_ROWS = (1, 4, 16, 64)
MOST_ROWS = {"reference": 16}
"""Backends that are too slow for more, unless they are asked for."""


@dataclass(frozen=True)
class LinearCase:
    """`x [m, k] @ weight [n, k]^T`; `dataclasses.asdict` of it begins its row in a report."""

    n: int
    k: int
    m: int

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 16 or self.k % 16:
            raise ValueError(
                f"shapes: expected N x K with K a multiple of 16, got {self.n}x{self.k}"
            )
        if self.m < 1:
            raise ValueError(f"m: expected at least 1, got {self.m}")

    @property
    def shape(self) -> str:
        """`6144x4096`: N x K."""
        return shape_name((self.n, self.k))

    @property
    def weight_bytes(self) -> int:
        """Codes and block scales."""
        return self.n * self.k // 2 + self.n * self.k // 16


def shape_name(shape: Shape) -> str:
    """`6144x4096`."""
    return f"{shape[0]}x{shape[1]}"


def parse_shapes(text: str) -> list[Shape]:
    """Shapes of `6144x4096,4096x14336`.

    Raises:
        ValueError: it is something else.
    """
    parts = [re.fullmatch(r"\s*(\d+)\s*[xX]\s*(\d+)\s*", part) for part in text.split(",")]
    shapes = [(int(part[1]), int(part[2])) for part in parts if part]
    if len(shapes) != len(parts):
        raise ValueError(f"shapes: expected N x K such as 6144x4096,4096x14336, got {text!r}")
    return shapes


def linear_cases(shapes: Sequence[Shape], rows: Sequence[int]) -> list[LinearCase]:
    """Every combination once, shape by shape.

    Raises:
        ValueError: an impossible shape or number of rows.
    """
    return list(dict.fromkeys(LinearCase(n, k, m) for n, k in shapes for m in rows))
