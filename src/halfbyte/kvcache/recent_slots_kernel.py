"""Triton kernel that computes `recent_slots.TokenSlots`, in one launch."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from halfbyte.kernels.runtime.devices import current_device
from halfbyte.kvcache.recent import PADDING_ENTRY

_BLOCK = 128


# Slices of a batch differ in alignment, which must not trigger recompilation.
@triton.jit(do_not_specialize=["sequences", "positions", "entries", "rows", "count"])
def slots_kernel(
    sequences,
    positions,
    entries,
    rows,
    owners,
    slots,
    count,
    ring: tl.constexpr,
    padding: tl.constexpr,
    has_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Rows `[program_id(0) * block, ...)` of `count`.

    Args, beside those of `find_slots`:
        rows: int64 `[count]`; written unless `has_rows`.
        owners, slots: int64 `[count]`, written.
        padding: entry of rows that pad a captured graph.
    """
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < count
    if has_rows:
        row = tl.load(rows + i, mask=inside, other=0)
    else:
        row = i.to(tl.int64)
        tl.store(rows + i, row, mask=inside)
    position = tl.load(positions + row, mask=inside, other=-1)
    is_real = position >= 0
    sequence = tl.load(sequences + row, mask=is_real, other=0)
    owner = tl.load(entries + tl.maximum(sequence, 0), mask=is_real, other=padding)
    tl.store(owners + i, owner.to(tl.int64), mask=inside)
    tl.store(slots + i, tl.maximum(position, 0) % ring, mask=inside)


def find_slots(
    sequences: torch.Tensor,
    positions: torch.Tensor,
    entries: torch.Tensor,
    ring: int,
    rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `TokenSlots.of` for the arguments; does not sync.

    Returns:
        Rows, owners and slots, int64 `[n]` each.
    """
    has_rows = rows is not None
    if rows is None:
        rows = torch.empty(len(positions), dtype=torch.int64, device=positions.device)
    owners, slots = torch.empty_like(rows), torch.empty_like(rows)
    count = len(rows)
    if not count:
        return rows, owners, slots
    with current_device(positions.get_device()):
        slots_kernel[(-(-count // _BLOCK),)](
            sequences=sequences.contiguous(),
            positions=positions.contiguous(),
            entries=entries.contiguous(),
            rows=rows.contiguous(),
            owners=owners,
            slots=slots,
            count=count,
            ring=ring,
            padding=PADDING_ENTRY,
            has_rows=has_rows,
            block=_BLOCK,
        )
    return rows, owners, slots
