"""Triton kernel that computes `QueryPositions`, in one launch."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from halfbyte.kernels.runtime.devices import current_device

_BLOCK = 128


# Slices of a batch differ in alignment, which must not trigger recompilation.
@triton.jit(
    do_not_specialize=["query_start_loc", "seq_lens", "num_seqs", "num_tokens", "search_steps"],
)
def positions_kernel(
    query_start_loc,
    seq_lens,
    sequences,
    positions,
    num_seqs,
    num_tokens,
    search_steps,
    block: tl.constexpr,
):
    """Tokens `[program_id(0) * block, ...)`.

    Args, beside those of `find_positions`:
        sequences, positions: int32 and int64 `[num_tokens]`, written.
        search_steps: that a binary search among `num_seqs` needs.
    """
    token = tl.program_id(0) * block + tl.arange(0, block)
    ends = query_start_loc + 1
    # The first sequence that ends after the token, in the order of `torch.searchsorted`.
    low = tl.full((block,), 0, tl.int32)
    high = low + num_seqs
    for _ in tl.range(0, search_steps):
        middle = low + ((high - low) >> 1)
        is_open = low < high
        is_after = tl.load(ends + middle, mask=is_open, other=0) > token
        high = tl.where(is_open & is_after, middle, high)
        low = tl.where(is_open & ~is_after, middle + 1, low)
    is_real = low < num_seqs
    length = tl.load(seq_lens + low, mask=is_real, other=0).to(tl.int64)
    position = length - (tl.load(ends + low, mask=is_real, other=0) - token)
    is_real &= position >= 0
    inside = token < num_tokens
    tl.store(sequences + token, tl.where(is_real, low, -1), mask=inside)
    tl.store(positions + token, tl.where(is_real, position, -1), mask=inside)


def find_positions(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `QueryPositions.of` for the arguments; does not sync.

    Returns:
        Sequences and positions, int32 and int64 `[num_tokens]`.
    """
    sequences = seq_lens.new_empty(num_tokens, dtype=torch.int32)
    positions = seq_lens.new_empty(num_tokens, dtype=torch.int64)
    if not num_tokens:
        return sequences, positions
    num_seqs = seq_lens.shape[0]
    with current_device(seq_lens.get_device()):
        positions_kernel[(-(-num_tokens // _BLOCK),)](
            query_start_loc=query_start_loc.contiguous(),
            seq_lens=seq_lens.contiguous(),
            sequences=sequences,
            positions=positions,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            search_steps=num_seqs.bit_length(),
            block=_BLOCK,
        )
    return sequences, positions
