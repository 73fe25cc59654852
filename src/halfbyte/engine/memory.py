"""Memory budget of the cache, and out-of-memory errors that name the options to change."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from halfbyte.kvcache import KVCachePlan, PagedKVPool

logger = logging.getLogger("halfbyte")

_GPU_MEMORY_SHARE = 0.8
_CPU_POOL_BYTES = 2 * 2**30
_GIB = 2**30


@contextmanager
def name_memory_options(options: str) -> Iterator[None]:
    """Name the options to reduce in out-of-memory errors, the CPU's included.

    Raises:
        torch.OutOfMemoryError: in place of torch's error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_ours = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_ours and "can't allocate memory" not in str(error):  # torch's message on the CPU
            raise
        reason = str(error).split("\n")[0].split("If reserved")[0].strip() or "no memory left"
        raise torch.OutOfMemoryError(f"out of memory: {options} ({reason})") from error


def make_pool(plan: KVCachePlan, num_pages: int, device: torch.device) -> PagedKVPool:
    """Allocate a pool of `num_pages` pages.

    Raises:
        torch.OutOfMemoryError: not enough memory; names the options.
    """
    size = num_pages * plan.page_bytes
    advice = (
        f"{num_pages:,} pages of {plan.page_bytes:,} bytes are {size / _GIB:,.1f} GiB; give a "
        "smaller num_pages, gpu_memory_utilization, max_model_len or max_num_seqs"
    )
    if size >= 2**63:
        raise torch.OutOfMemoryError(f"out of memory: {advice}")
    with name_memory_options(advice):
        return PagedKVPool(plan, num_pages, device)


def default_num_pages(
    plan: KVCachePlan,
    max_model_len: int,
    max_num_seqs: int,
    device: torch.device,
    gpu_memory_utilization: float | None = None,
) -> int:
    """Pages for `max_num_seqs` sequences of full length, limited by the memory available.

    Args:
        gpu_memory_utilization: max share of the GPU's memory in use, weights included; None for
            80 % of the free memory.

    Raises:
        torch.OutOfMemoryError: not even one page fits.
    """
    per_sequence = sum(
        max(spec.max_live_pages(max_model_len, max_chunk=max_model_len) for spec in group.specs)
        for group in plan.groups
    )
    budget = _CPU_POOL_BYTES
    if device.type == "cuda":
        budget = gpu_budget(*torch.cuda.mem_get_info(device), gpu_memory_utilization)
    affordable = max(1, budget // plan.page_bytes)
    if affordable < per_sequence:
        logger.warning(
            "the KV cache has room for %.0f %% of a sequence of max_model_len %d; longer ones will "
            "end with an error: give a smaller max_model_len, or num_pages (%d for one sequence)",
            *(100 * affordable / per_sequence, max_model_len, 1 + per_sequence),
        )
    return 1 + min(max_num_seqs * per_sequence, affordable)


def gpu_budget(free: int, total: int, gpu_memory_utilization: float | None) -> int:
    """Bytes for the cache on a GPU with `free` of `total` bytes free.

    Raises:
        torch.OutOfMemoryError: more than that share is already in use.
    """
    if gpu_memory_utilization is None:
        return int(_GPU_MEMORY_SHARE * free)
    budget = int(gpu_memory_utilization * total) - (total - free)
    if budget <= 0:
        raise torch.OutOfMemoryError(
            f"gpu_memory_utilization: {gpu_memory_utilization} of {total / _GIB:.1f} GiB leaves no "
            f"room for the KV cache: {(total - free) / _GIB:.1f} GiB are in use; give more"
        )
    return budget
