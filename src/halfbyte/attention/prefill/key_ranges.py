"""Which keys are unpacked, and where to."""

from typing import NamedTuple

import torch


class KeyRanges(NamedTuple):
    """One range of keys for each of some sequences, and its rows in the workspace."""

    sequences: torch.Tensor | slice
    """Numbers of the sequences in the batch."""
    num_rows: int
    """Rows of the workspace."""
    max_keys: int
    """Bound on the keys of a range; keys past it may be skipped."""
    begins: torch.Tensor
    """int32 `[sequences]`: position of the first key of each range."""
    ends: torch.Tensor
    """int32 `[sequences]`: the position after the last key."""
    rows: torch.Tensor
    """int32 `[sequences]`: row of the workspace for the first key."""
