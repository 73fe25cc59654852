"""Which keys are unpacked, and where to."""

from typing import NamedTuple

import torch

from halfbyte.kernels.formats import FORMATS
from halfbyte.layouts import PageLayout

_MAX_HEAD_SIZE = 256


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
    """int32 `[sequences]`: row of the workspace of its first key; for rings, of slot 0."""
    ring: int = 0
    """Rows of a ring: the key at position p goes p % ring rows after `rows`. 0: keys of a range go
    to consecutive rows."""


def unknown_to_unpack(layout: PageLayout) -> str | None:
    """What of a layout the kernel that unpacks pages does not support; None if it supports it."""
    for size in (layout.head_size, layout.head_size_v):
        if size % 16 or size > _MAX_HEAD_SIZE:
            return f"head sizes up to {_MAX_HEAD_SIZE} that 16 divides, not {size}"
    return layout.unknown_format(FORMATS)
