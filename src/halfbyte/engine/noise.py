"""Counter-based random numbers: those of a row depend only on its seed and position.

Sampling a token is an argmax over log probabilities plus Gumbel noise (the Gumbel-max trick, Gumbel
1954; Maddison et al. 2014, arXiv:1411.0030). The noise of vocabulary entry i is a hash of the
row's two keys and i, in the manner of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011). So there is no state to restore after a failed step, and no loop over the rows of a
batch. The hash is the same on all devices; the noise differs between devices only by their
logarithms, in the last bits of float32.
"""

import torch

from halfbyte.dispatch import missing_module

_MASK64 = 2**64 - 1
# lowbias32, a bijection of 32-bit words found by search: Wellons, "Prospecting for hash functions"
# (2018), https://nullprogram.com/blog/2018/07/31/. Signed here; products wrap to the same bits.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
_SHIFTS = (16, 15, 16)


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit keys for a position in a seeded sequence.

    SplitMix64 (Steele, Lea and Flood 2014) of the mixed seed, so that neighbouring seeds give
    unrelated sequences.
    """
    mixed = _splitmix64(_splitmix64(seed) + position)
    return _signed(mixed & 0xFFFFFFFF), _signed(mixed >> 32)


def gumbel_noise(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 `[rows, count]`.

    Args:
        keys: int32 `[rows, 2]`, see `noise_keys`.
        count: entries of a row.
    """
    numbers = torch.arange(count, dtype=torch.int32, device=keys.device)
    hashed = _hash(_hash(numbers ^ keys[:, :1]).bitwise_xor_(keys[:, 1:]))
    # 31 bits, uniform in (0, 1). Small values are exact; they become the largest noise.
    uniform = hashed.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    exponential = uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def add_gumbel_noise(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Add the noise to scores in place; one Triton launch on a GPU.

    Args:
        scores: float32 `[rows, count]`, contiguous.
        keys: int32 `[rows, 2]`, see `noise_keys`.
    """
    if scores.is_cuda and not missing_module("triton", ""):
        # Here, because the import needs Triton.
        from halfbyte.engine.noise_kernel import add_gumbel_noise as in_one_launch

        return in_one_launch(scores, keys)
    # On a CPU row by row: temporaries stay in cache, and results do not depend on the row's index.
    count = 1 if scores.device.type == "cpu" else len(scores)
    for chunk, chunk_keys in zip(scores.split(count), keys.split(count), strict=True):
        chunk += gumbel_noise(chunk_keys, scores.shape[-1])
    return scores


def _hash(words: torch.Tensor) -> torch.Tensor:
    """Mix int32 words in place."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        # Logical shift: torch's shift of signed words copies the sign bit.
        words ^= (words >> shift).bitwise_and_(2 ** (32 - shift) - 1)
        if multiplier is not None:
            words *= multiplier
    return words


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
