"""The batches that compile attention's kernels at start reach all of them."""

import pytest
import torch

from halfbyte.attention.prefill.plan import MAX_DECODE_QUERIES, MAX_KEYS_PER_QUERY, MIN_CHUNK
from halfbyte.kvcache.recent import packed_part
from halfbyte.plugins.vllm.warmup import _BATCHES


def parts_of(batch: tuple[tuple[int, int], ...], recent: int) -> tuple[set[int], set[int]]:
    """Query tokens of sequences that prefill leaves to the decode kernel: of decode steps, and of
    prompts with many cached tokens per token."""
    few, many = set(), set()
    lengths, _ = packed_part(recent, torch.tensor([sum(x) for x in batch], dtype=torch.int32), 0)
    for (new, _cached), length in zip(batch, lengths.tolist(), strict=True):
        queries = min(new, length)  # the others see nothing in the pages
        if 0 < queries <= MAX_DECODE_QUERIES:
            few.add(queries)
        elif queries < MIN_CHUNK and length - queries > queries * MAX_KEYS_PER_QUERY:
            many.add(queries)
    return few, many


@pytest.mark.parametrize("recent", [0, 64])
def test_batches_reach_every_kernel_of_mixed_batches(recent: int) -> None:
    few, many = set[int](), set[int]()
    for batch in _BATCHES:
        if sum(new for new, _ in batch) > MAX_DECODE_QUERIES * len(batch):  # prefill takes it
            parts = parts_of(batch, recent)
            few |= parts[0]
            many |= parts[1]
    assert few == set(range(1, MAX_DECODE_QUERIES + 1))
    assert {9, 17, 30} <= many  # one, two and more tiles of queries


@pytest.mark.parametrize("queries", range(1, MAX_DECODE_QUERIES + 1))
def test_batches_of_decode_steps_have_every_number_of_queries(queries: int) -> None:
    assert any(all(new == queries and cached >= new for new, cached in batch) for batch in _BATCHES)
