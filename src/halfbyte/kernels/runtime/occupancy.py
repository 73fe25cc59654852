"""How many CTAs of a kernel share an SM."""

RESERVED_BYTES = 1024
"""Shared memory that CUDA takes for every CTA, in addition to what the kernel uses."""
_GRANULE = 128
"""Shared memory is allocated in multiples of this."""


def bytes_for_ctas(shared_bytes: int, ctas: int, sm_bytes: int) -> int:
    """Dynamic shared memory with which an SM holds at most `ctas` CTAs of a kernel.

    Args:
        shared_bytes: that a CTA uses; `ctas` CTAs fit.
        ctas: per SM.
        sm_bytes: shared memory of an SM.
    """
    too_many = sm_bytes // (ctas + 1) - RESERVED_BYTES
    return max(shared_bytes, (too_many // _GRANULE + 1) * _GRANULE)
