"""Pairs of a token and one of its experts, numbered `token * top_k + j`: grouping and summing.

For kernels whose loop over experts runs on the CPU; `triton_routing.py` groups on the GPU.
"""

from collections.abc import Iterator

import torch


def hit_experts(topk_ids: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(expert, its pairs in ascending order, int64) of all experts with a token.

    Args:
        topk_ids: int32 or int64 `[M, top_k]`; ids outside `0 .. num_experts - 1` are skipped.
        num_experts: E.
    """
    ids = topk_ids.flatten()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    by_expert = ids.argsort(stable=True)
    counts = ids.bincount(minlength=num_experts + 1)[:num_experts].tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, by_expert[start : start + count]
        start += count


def weighted_sum(
    results: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """`[M, H]`: each token's results times their weights, added in the order of j.

    In float32 (float64 for float64 results), one product and one sum per step: the bits do not
    depend on M.

    Args:
        results: `[M * top_k, H]`, by pairs; zeros for skipped ids.
        topk_weights: `[M, top_k]`; those of skipped ids do not matter.
        topk_ids, num_experts: as for `hit_experts`.
    """
    compute = torch.float64 if results.dtype == torch.float64 else torch.float32
    is_skipped = (topk_ids < 0) | (topk_ids >= num_experts)
    weights = topk_weights.to(compute).masked_fill(is_skipped, 0)
    by_token = results.unflatten(0, topk_weights.shape)
    total = by_token.new_zeros((by_token.shape[0], by_token.shape[2]), dtype=compute)
    for j in range(topk_weights.shape[1]):
        total += by_token[:, j].to(compute) * weights[:, j, None]
    return total
