"""Token counts of a request, for its penalties."""

from array import array
from collections.abc import Iterable

import numpy as np
import torch


class TokenCounts:
    """Distinct tokens of prompt and output, and how often each occurs in the output.

    One entry per distinct token, so that the cost of a step does not grow with the text.

    Args:
        prompt: token ids.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._entries = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self._ids = array("q", self._entries)
        self._counts = array("q", bytes(8 * len(self._ids)))

    def add(self, token: int) -> None:
        """Count a token of the output."""
        entry = self._entries.setdefault(token, len(self._ids))
        if entry == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[entry] += 1

    @property
    def ids(self) -> torch.Tensor:
        """int64 `[distinct]`: tokens of prompt and output."""
        return torch.from_numpy(np.array(self._ids))

    @property
    def output(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 `[n]` and `[n]`: distinct tokens of the output, and their counts."""
        counts = np.array(self._counts)
        used = counts > 0
        ids = np.array(self._ids)[used]
        return torch.from_numpy(ids), torch.from_numpy(counts[used])
