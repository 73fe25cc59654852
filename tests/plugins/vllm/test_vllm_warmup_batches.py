"""The batches that compile attention's kernels at start reach all of them."""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.cases import config as attention_config
from halfbyte.attention.base import AttentionInputs, AttentionPlans
from halfbyte.attention.paged.plan import Tiles, TritonTarget, choose_tiles, make_plan
from halfbyte.attention.prefill import combine, dense
from halfbyte.attention.prefill import plan as dense_plan
from halfbyte.attention.prefill.plan import (
    MAX_DECODE_QUERIES,
    MAX_KEYS_PER_QUERY,
    MAX_PARTS,
    MIN_CHUNK,
    MIN_QUERIES,
    Prompt,
    _suits_pytorch,
    key_blocks,
)
from halfbyte.kvcache.recent import packed_part
from halfbyte.kvcache.recent_step import may_write_first
from halfbyte.kvcache.store.cuda import store
from halfbyte.kvcache.store.cuda.variant import StoreVariant
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout
from halfbyte.plugins.vllm.warmup import _BATCHES, Tokens, batches


def parts_of(batch: Sequence[tuple[int, int]], recent: int) -> tuple[set[int], set[int]]:
    """Query tokens per sequence that `dense` splits off a batch: of decode steps, and of prompts
    with many cached tokens per new one."""
    few, many = set(), set()
    lengths, _ = packed_part(recent, torch.tensor([sum(x) for x in batch], dtype=torch.int32), 0)
    for (new, _cached), length in zip(batch, lengths.tolist(), strict=True):
        queries = min(new, length)  # the others see nothing in the pages
        if 0 < queries <= MAX_DECODE_QUERIES:
            few.add(queries)
        elif queries < MIN_CHUNK and length - queries > queries * MAX_KEYS_PER_QUERY:
            many.add(queries)
    return few, many


def rows_of(tokens: int, group: int = 4) -> int:
    """Rows of a tile of the `triton` backend for so many query tokens per sequence."""
    layout = PageLayout("nvfp4", "nvfp4", 128, None, 8, 16)
    target = TritonTarget(90, 132)
    return choose_tiles(layout, torch.bfloat16, tokens * group, target, False).block_m


@pytest.mark.parametrize("recent", [0, 64])
def test_batches_reach_every_kernel_of_mixed_batches(recent: int) -> None:
    few, many = set[int](), set[int]()
    for batch in engine_batches(8320):
        if sum(new for new, _ in batch) > MAX_DECODE_QUERIES * len(batch):  # prefill takes it
            parts = parts_of(batch, recent)
            few |= parts[0]
            many |= parts[1]
    assert few == set(range(1, MAX_DECODE_QUERIES + 1))
    # Of four query heads each, all numbers of rows per tile that so few tokens can have.
    assert {rows_of(n) for n in many} == {rows_of(n) for n in range(9, MIN_CHUNK)} == {64, 128}


@pytest.mark.parametrize("queries", range(1, MAX_DECODE_QUERIES + 1))
def test_batches_of_decode_steps_have_every_number_of_queries(queries: int) -> None:
    assert any(all(new == queries and cached >= new for new, cached in batch) for batch in _BATCHES)


@pytest.mark.parametrize("max_new", [512, 2048, 8192])
@pytest.mark.parametrize("max_model_len", [4096, 8320, 131072])
def test_batches_merge_every_number_of_results(max_model_len: int, max_new: int) -> None:
    """A kernel for each number of blocks of cached tokens."""
    layout, rng = PageLayout("nvfp4", "nvfp4", 128, None, 8, 16), random.Random(0)

    def merged(new: int, cached: int) -> int | None:
        """Blocks of cached tokens; None if PyTorch's attention does not take the prompt."""
        prompt = Prompt(0, new, new + cached, 0)
        return len(key_blocks(cached, 2**17)) if _suits_pytorch(prompt, 1, layout) else None

    reached = {merged(*x) for x, *more in engine_batches(max_model_len, max_new) if not more}
    for _ in range(2000):
        new = rng.randint(1, min(max_new, max_model_len))
        cached = rng.randint(0, max_model_len - new)
        assert merged(new, cached) in reached, (new, cached)


class Launches:
    """In place of `combine_kernel`: variants of the kernel by what they are compiled for."""

    def __init__(self) -> None:
        self.variants: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*, out: torch.Tensor, num_parts: int, wants_lse: bool, **given: Any) -> None:
            dtypes = [given[f"o{i}"].dtype for i in range(MAX_PARTS)]
            self.variants.add((out.dtype, num_parts, wants_lse, *dtypes))

        return launch


def merges_of(
    batch: Sequence[tuple[int, int]],
    recent: int,
    monkeypatch: pytest.MonkeyPatch,
    kv_heads: int = 1,
) -> set[tuple[Any, ...]]:
    """Variants of `combine_kernel` that a batch's prompts need, without decode steps."""
    launches, heads, head_size = Launches(), 2 * kv_heads, 128

    def run_block(inputs: Any, block: Any, query: torch.Tensor, *, causal: bool) -> Any:
        return query, torch.empty((len(query), heads, query.shape[1]), device="meta")

    monkeypatch.setattr(combine, "combine_kernel", launches)
    monkeypatch.setattr(dense, "_run_block", run_block)
    monkeypatch.setattr(dense, "run_chunks", lambda *_: None)
    monkeypatch.setattr(dense, "_tiles", lambda _: Tiles(128, 64, 4, 2))
    counts = [new for new, _ in batch]
    lengths = torch.tensor([sum(x) for x in batch], dtype=torch.int32)
    if recent:
        lengths, _ = packed_part(recent, lengths, 0)
    query = torch.empty((sum(counts), heads, head_size), dtype=torch.bfloat16)
    inputs = AttentionInputs(
        query,
        torch.empty(0),
        PageLayout("nvfp4", "nvfp4", head_size, None, kv_heads, 16),
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        lengths,
        torch.empty(0),
        *(1.0, 1.0, 1.0),
        *(None, None, None),
        False,
        None,
        torch.empty(query.shape[:2]) if recent else None,
        AttentionPlans(),
    )
    if not recent or dense.DenseAttention.forward_by_sequence(inputs) is None:
        dense.DenseAttention.forward(inputs)
    return launches.variants


@pytest.mark.parametrize("recent", [0, 64])
@pytest.mark.parametrize("max_new", [256, 512, 1024, 2048, 8192])
def test_random_batches_merge_by_compiled_kernels(
    max_new: int, recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts alone, beside each other, beside short ones and beside decode steps."""
    compiled, rng = set(), random.Random(0)
    for batch in engine_batches(16384, max_new):
        compiled |= merges_of(batch, recent, monkeypatch)
    needed = set()
    for _ in range(1500):
        batch, left = [], max_new
        while left > 0 and (not batch or rng.random() < 0.5):
            new = min(left, rng.choice([1, 20, 300, 1300, 2048, rng.randint(1, max_new)]))
            batch.append(Tokens(new, rng.choice([0, 0, 40, rng.randint(0, 16384 - new)])))
            left -= new
        variants = merges_of(batch, recent, monkeypatch)
        assert variants <= compiled, batch
        needed |= variants
    assert (len(needed) >= 3) == (max_new >= MIN_QUERIES)


@pytest.mark.parametrize("recent", [0, 64])
def test_long_prompts_merge_by_compiled_kernels_on_sm90(
    recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There only keys that the workspace cannot hold are in blocks."""
    monkeypatch.setattr(dense.sm90, "supports", lambda inputs: True)
    workspace, rng = 65536, random.Random(0)

    def merges(batch: list[Tokens]) -> set[tuple[Any, ...]]:
        # Those with last tokens are split off the others.
        long = [x for x in batch if x.length - recent > workspace] if recent else batch
        return merges_of(long, recent, monkeypatch, kv_heads=8) if long else set()

    compiled = set().union(*(merges(batch) for batch in engine_batches(262144)))
    needed = set()
    for _ in range(200):
        new = rng.choice([512, 2048, 8192, rng.randint(MIN_CHUNK, 8192)])
        batch = [Tokens(new, rng.randint(workspace - 8192, 250_000))]
        variants = merges(batch)
        assert variants <= compiled, batch
        needed |= variants
    assert len(needed) >= 3


@pytest.mark.parametrize("max_new", [2048, 8192])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size"), [(1, 8, 128), (2, 4, 64), (2, 2, 128), (8, 4, 128)]
)
def test_batches_reach_the_kernel_of_sm90(
    kv_heads: int, group: int, head_size: int, max_new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If any batch of prompts does. Without last tokens it runs only for many tiles."""
    monkeypatch.setattr(dense.sm90, "supports", lambda inputs: True)
    layout, rng = PageLayout("nvfp4", "nvfp4", head_size, None, kv_heads, 16), random.Random(0)

    def reaches(batch: Sequence[Tokens]) -> bool:
        counts = [x.new for x in batch]
        query = torch.empty((sum(counts), kv_heads * group, head_size), dtype=torch.bfloat16)
        inputs = AttentionInputs(
            query,
            torch.empty(0),
            layout,
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            torch.tensor([x.length for x in batch], dtype=torch.int32),
            torch.zeros((len(batch), 1), dtype=torch.int32),
            *(1.0, 1.0, 1.0),
            *(None, None, None),
            False,
            None,
            None,
            AttentionPlans(),
        )
        plan = dense_plan.make_plan(inputs, 32, True)
        return plan.on_sm90 and bool(plan.chunks)

    if not any(reaches(batch) for batch in engine_batches(4096, max_new, group)):
        for _ in range(100):
            new = rng.choice([15, 40, 150, 1000])
            assert not reaches([Tokens(new, 0)] * min(256, max_new // new))


@pytest.mark.parametrize("max_model_len", [1000, 131072])
def test_batches_store_as_many_tokens_as_a_step_can_have(max_model_len: int) -> None:
    """Stores of many tokens have a kernel of their own. With few KV heads, "many" is more than any
    batch of `_BATCHES` has."""
    most = max(sum(x.new for x in batch) for batch in engine_batches(max_model_len, 8192))
    assert 8192 - 1000 < most <= 8192


def store_variant(tokens: int, ring: bool, heads: int, accurate: bool) -> StoreVariant:
    """Of a step with a recipe, on a GPU with 132 SMs as on an H200."""
    layout = PageLayout("nvfp4_4over6", "nvfp4_4over6", 128, None, heads, 16)
    weights = torch.ones(heads, 128)
    feedback = torch.ones(heads, 128, 128) if accurate else None
    transform = KVTransform(True, 0, k_weights=weights, v_weights=weights, feedback=feedback)
    few = store._blocks(layout, tokens) < store._BLOCKS_PER_SM * 132
    by = store._unit(transform, tokens * heads, 0, few)
    dtype = torch.bfloat16
    variant = StoreVariant(dtype, dtype, None, True, 0, True, True, by, ring, True, few)
    return variant._replace(left_out=store._leaves_out(variant, layout, tokens, 0))


@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize(
    ("max_model_len", "max_tokens", "max_seqs"),
    [(10000, 8192, 256), (40960, 16384, 256), (16384, 16384, 1), (4096, 8192, 2), (1000, 2048, 64)],
)
def test_batches_have_all_kernels_that_store(
    monkeypatch: pytest.MonkeyPatch,
    max_model_len: int,
    max_tokens: int,
    max_seqs: int,
    heads: int,
    accurate: bool,
) -> None:
    """Prompts without earlier tokens write their rings in the store's launch, others do not."""
    monkeypatch.setattr(store, "num_sms", lambda device: 132)
    monkeypatch.setattr(store, "shared_bytes_of_sm", lambda device: 228 * 1024)
    recent = 64
    config = engine(max_model_len, max_tokens, max_seqs)
    warm = set()
    for batch in batches(config, 16, 10**6, 4):
        starts, counts = np.array([(x.cached, x.new) for x in batch]).T
        ring = may_write_first(starts, counts, recent, recent)
        warm.add(store_variant(sum(counts), ring, heads, accurate))
    reached = set()
    for tokens in range(1, max_tokens + 1):
        if tokens <= max_seqs * max_model_len:
            reached.add(store_variant(tokens, True, heads, accurate))
        if 1 < tokens <= max_seqs * (max_model_len - 16):
            reached.add(store_variant(tokens, False, heads, accurate))
    assert reached <= warm


def test_engines_with_room_for_one_token() -> None:
    assert list(batches(engine(1, 16, 4), 16, 100, 4))


@pytest.mark.parametrize("recent", [0, 64])
def test_batches_have_a_padded_prompt_without_cached_tokens(recent: int) -> None:
    """Its result is copied, that of one that fits a size is not."""
    layout = PageLayout("nvfp4", "nvfp4", 128, None, 8, 16)
    prompts = [
        Prompt(0, new - recent, new - recent, recent)
        for (new, cached), *more in engine_batches(8320)
        if not more and not cached and new > recent
    ]
    by_pytorch = [prompt for prompt in prompts if _suits_pytorch(prompt, 1, layout)]
    assert {prompt.is_exact for prompt in by_pytorch} == {True, False}


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("num_sms", [108, 132])
def test_batches_split_keys_and_do_not(num_sms: int, kv_heads: int, group: int) -> None:
    """Random batches need no other variants than the compiled ones. All sequences have 9 or more
    new tokens, so that the general Triton kernel runs."""
    target, rng = TritonTarget(90, num_sms), random.Random(0)

    def variant(count: int, tokens: int) -> tuple[int, bool]:
        layout = PageLayout("nvfp4", "nvfp4", 128, None, kv_heads, 16)
        config = attention_config(
            layout=layout, num_heads=group * kv_heads, num_tokens=tokens, num_seqs=count
        )
        plan = make_plan(config, 8320, target)
        return plan.tiles.block_m, plan.merges

    compiled = set()
    for batch in engine_batches(8320, group=group):
        many = [x.new for x in batch if MAX_DECODE_QUERIES < x.new < MIN_CHUNK]
        if many and len(many) == len(batch):
            compiled.add(variant(len(many), sum(many)))
    for _ in range(2000):
        counts = [rng.randint(9, MIN_CHUNK - 1) for _ in range(rng.randint(1, 256))]
        if rng.random() < 0.5:
            counts = [rng.randint(9, 16)] * len(counts)
        if sum(counts) <= 8192:
            assert variant(len(counts), sum(counts)) in compiled, counts


def engine_batches(max_model_len: int, max_new: int = 8192, group: int = 4) -> list[list[Tokens]]:
    """Of an engine with vLLM's defaults and 2 million tokens."""
    return list(batches(engine(max_model_len, max_new), 16, 2**17, group))


def engine(max_model_len: int, max_new: int, max_seqs: int = 256) -> Any:
    """Limits of vLLM's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=max_seqs, max_num_batched_tokens=max_new),
    )


def test_batches_are_cut_to_the_engine_s_limits() -> None:
    found = list(batches(engine(300, 100, 2), 16, 30, 4))
    assert [Tokens(100, 200)] in found
    assert len({tuple(batch) for batch in found}) == len(found)
    for batch in found:
        assert 1 <= len(batch) <= 2
        assert sum(x.new for x in batch) <= 100
        assert all(x.pages(16) <= 30 for x in batch)
        assert all(x.length <= 300 for x in batch)
