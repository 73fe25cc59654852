"""E[x x^T] of vectors that come in parts."""

import torch


class SecondMoment:
    """A sum of x x^T in float64, on the device of x.

    Vectors with a NaN or infinity do not count.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | float = 0.0
        self._count: torch.Tensor | float = 0.0

    def add(self, x: torch.Tensor) -> None:
        """Add n vectors `[..., n, D]`; leading dimensions have separate sums."""
        x = x.detach().double()
        known = x.isfinite().all(-1)
        x = torch.where(known[..., None], x, 0.0)
        self._sum += x.transpose(-2, -1) @ x
        self._count += known.sum(-1)

    def mean(self) -> torch.Tensor:
        """float64 `[..., D, D]`; zeros where no vector counted."""
        assert isinstance(self._sum, torch.Tensor)
        assert isinstance(self._count, torch.Tensor)
        return self._sum / self._count.clamp(min=1)[..., None, None]
