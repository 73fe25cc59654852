"""Assigns sequences and ranges of keys to the programs of `kernels.py`.

Every sequence gets at least as many tiles of query tokens as it needs. The total number of tiles
depends on shapes only, so that there is no sync.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def first_tile(
    starts,
    sequence,
    first_token,
    last_token,
    tokens_per_tile: tl.constexpr,
):
    """First tile of a sequence."""
    start = tl.minimum(tl.maximum(tl.load(starts + sequence), first_token), last_token)
    return (start - first_token) // tokens_per_tile + sequence


@triton.jit
def find_sequence(
    starts,
    tile,
    num_seqs,
    first_token,
    last_token,
    tokens_per_tile: tl.constexpr,
):
    """The last sequence whose first tile is not after `tile`, by bisection."""
    # Where every sequence has one token, sequence s has first tile s + s // tokens_per_tile.
    guess = ((tile + 1) * tokens_per_tile - 1) // (tokens_per_tile + 1)
    guess = tl.minimum(guess, num_seqs - 1)
    here = first_tile(starts, guess, first_token, last_token, tokens_per_tile) <= tile
    after = first_tile(starts, guess + 1, first_token, last_token, tokens_per_tile) <= tile
    low = tl.where(here, tl.where(after, guess + 1, guess), 0)
    high = tl.where(here, tl.where(after, num_seqs, guess + 1), guess)
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile(starts, middle, first_token, last_token, tokens_per_tile) <= tile:
            low = middle
        else:
            high = middle
    return tl.minimum(low, num_seqs - 1)


@triton.jit
def key_range(
    key_begin,
    key_end,
    chunk,
    num_splits,
    split: tl.constexpr,
    split_length: tl.constexpr,
    block_n: tl.constexpr,
):
    """Start of a program's first key tile, and end of its keys."""
    begin = key_begin // block_n * block_n
    if split_length > 0:
        begin = tl.maximum(begin, chunk * split_length)
        end = tl.minimum(key_end, (chunk + 1) * split_length)
    elif split:
        tiles = tl.maximum(key_end - begin + block_n - 1, 0) // block_n
        tiles = (tiles + num_splits - 1) // num_splits
        begin += chunk * tiles * block_n
        end = tl.minimum(key_end, begin + tiles * block_n)
    else:
        end = key_end
    return begin, end
