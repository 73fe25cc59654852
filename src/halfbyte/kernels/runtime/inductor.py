"""Options of Inductor for the code around halfbyte's kernels."""

OVERLAP = "triton.enable_pdl"
"""Inductor's option for programmatic dependent launch (PDL): a kernel may start before the
previous one has ended. halfbyte's kernels use PDL as well. A step of a small batch is some 350
kernels of a few µs each, and launch overhead takes a tenth of its time. PDL hides that, and lets
the next layer's weights be prefetched (docs/numbers/vllm.md has figures).

Inductor lets kernels that only fill memory start without waiting for the previous kernel. Dense
models have none; mixtures of experts may. A kernel of Inductor's waits before it reads what the
previous one wrote, and, behind an operator that is not Inductor's, as all of halfbyte's, before it
reads anything. So it may stand behind one that lets it start early (`basics.cuh`)."""

_MEASURED = 90


def can_overlap(compute_capability: int) -> bool:
    """Whether `OVERLAP` helps: on Hopper, where it was measured, if this PyTorch has it.

    Args:
        compute_capability: of the GPU, such as 90.
    """
    if compute_capability != _MEASURED:
        return False
    from torch._inductor import config

    return hasattr(config.triton, OVERLAP.partition(".")[2])
