"""Random operations on sequences, compared with a model of pages and their tokens.

Shadow pages are plain objects: a fork shares them, a write into a shared partial one replaces it.
The pool is right when its pages correspond one to one to the shadow's, and when every token of
every sequence reads back byte for byte although all free pages are overwritten after each step.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halfbyte.kvcache import (
    NULL_PAGE,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HostSequence,
    KVCacheSpec,
    OutOfPagesError,
    PagedKVPool,
    SequenceTables,
    SlidingWindowSpec,
    read_tokens,
    reshape_and_cache,
)
from kvcache.page_arithmetic import Encoded, encode

NUM_TOKENS = 48
K_SCALE, V_SCALE = 0.0371, 0.0059
NAMES = "abcde"


class Page:
    """A shadow page; only its identity matters."""


@dataclass
class Sequence:
    """Token numbers, and per group the pages (None: released)."""

    tokens: list[int] = field(default_factory=list)
    tables: list[list[Page | None]] = field(default_factory=list)

    def copy(self) -> "Sequence":
        return Sequence(list(self.tokens), [list(table) for table in self.tables])


@dataclass(frozen=True)
class LayerBank:
    """The tokens that may be written to a layer, and their bytes by the oracle."""

    key: torch.Tensor
    value: torch.Tensor
    encoded: tuple[torch.Tensor, ...]

    @classmethod
    def random(cls, spec: KVCacheSpec, generator: torch.Generator) -> "LayerBank":
        shape = (NUM_TOKENS, spec.num_kv_heads)
        layout = spec.layout
        key = torch.randn(*shape, layout.head_size, generator=generator)
        value = torch.randn(*shape, layout.head_size_v, generator=generator)
        k: Encoded = encode(layout.k_dtype.value, key, K_SCALE)
        v: Encoded = encode(layout.v_dtype.value, value, V_SCALE)
        return cls(key, value, tuple(part for part in (*k, *v) if part is not None))


def attends(spec: KVCacheSpec, q: int, k: int) -> bool:
    if isinstance(spec, SlidingWindowSpec):
        return q - k < spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return k // spec.attention_chunk_size == q // spec.attention_chunk_size
    return True


class SequencesMachine(RuleBasedStateMachine):
    """Subclasses give the layers."""

    specs: ClassVar[list[KVCacheSpec]]
    num_pages: ClassVar[int] = 16
    can_grow: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.noise = generator
        pool = PagedKVPool(self.specs, self.num_pages)
        self.tables = SequenceTables(pool, can_grow=self.can_grow)
        self.banks = [LayerBank.random(spec, generator) for spec in self.specs]
        self.shadow: dict[str, Sequence] = {}
        self.hosts: list[tuple[HostSequence, Sequence]] = []
        self.next_token = 0

    @property
    def block_sizes(self) -> list[int]:
        return [group.block_size for group in self.tables.pool.plan.groups]

    def draw_name(self, data: st.DataObject, *, taken: bool) -> str:
        names = sorted(self.shadow) if taken else sorted(set(NAMES) - set(self.shadow))
        return data.draw(st.sampled_from(names))

    def holders(self, page: Page) -> int:
        return sum(page in table for s in self.shadow.values() for table in s.tables)

    def write(self, name: str, start: int) -> None:
        pool = self.tables.pool
        tokens = self.shadow[name].tokens[start:]
        for layer, bank in enumerate(self.banks):
            group, _ = pool.plan.locate(layer)
            slots = self.tables.slots(name, start, start + len(tokens), group)
            reshape_and_cache(
                bank.key[tokens],
                bank.value[tokens],
                pool.layer_pages(layer),
                slots,
                pool.layout(layer),
                K_SCALE,
                V_SCALE,
            )

    def state(self) -> tuple[object, ...]:
        groups = range(len(self.block_sizes))
        return (
            {n: [self.tables.table(n, g) for g in groups] for n in self.shadow},
            {n: self.tables.length(n) for n in self.shadow},
            self.tables.allocator.num_free,
            self.tables.pool.buffer.sum(dim=1, dtype=torch.int64).tolist(),
        )

    @precondition(lambda self: len(self.shadow) < len(NAMES))
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        name = self.draw_name(data, taken=False)
        self.tables.add(name)
        self.shadow[name] = Sequence([], [[] for _ in self.block_sizes])

    @precondition(lambda self: self.shadow)
    @rule(data=st.data(), count=st.integers(0, 13))
    def append(self, data: st.DataObject, count: int) -> None:
        name = self.draw_name(data, taken=True)
        sequence = self.shadow[name]
        length = len(sequence.tokens)
        after = sequence.copy()
        needed = 0
        for table, block_size in zip(after.tables, self.block_sizes, strict=True):
            if count and length % block_size:
                tail = table[-1]
                assert tail is not None, "the shadow lost a page that will be written"
                if self.holders(tail) > 1:
                    table[-1] = Page()
                    needed += 1
            while len(table) * block_size < length + count:
                table.append(Page())
                needed += 1
        num_free = self.tables.allocator.num_free
        if needed > num_free and not self.can_grow:
            before = self.state()
            with pytest.raises(OutOfPagesError):
                self.tables.append(name, count)
            assert self.state() == before
            return
        self.tables.append(name, count)
        if needed <= num_free:
            assert self.tables.allocator.num_free == num_free - needed
        new_tokens = [(self.next_token + i) % NUM_TOKENS for i in range(count)]
        self.next_token += count
        after.tokens += new_tokens
        self.shadow[name] = after
        self.write(name, length)

    @precondition(lambda self: 0 < len(self.shadow) < len(NAMES))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.draw_name(data, taken=True)
        child = self.draw_name(data, taken=False)
        self.tables.fork(parent, child)
        self.shadow[child] = self.shadow[parent].copy()

    @precondition(lambda self: self.shadow)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        name = self.draw_name(data, taken=True)
        sequence = self.shadow[name]
        length = data.draw(st.integers(0, len(sequence.tokens)))
        possible = True
        for group, table in zip(self.tables.pool.plan.groups, sequence.tables, strict=True):
            block_size = group.block_size
            wanted = {k // block_size for k in range(length) if attends(group.specs[0], length, k)}
            if length % block_size:
                wanted.add(length // block_size)
            possible &= all(table[i] is not None for i in wanted)
        if not possible:
            before = self.state()
            with pytest.raises(ValueError, match="released"):
                self.tables.crop(name, length)
            assert self.state() == before
            return
        self.tables.crop(name, length)
        del sequence.tokens[length:]
        for table, block_size in zip(sequence.tables, self.block_sizes, strict=True):
            del table[-(-length // block_size) :]

    @precondition(lambda self: self.shadow)
    @rule(data=st.data())
    def release_dead_pages(self, data: st.DataObject) -> None:
        name = self.draw_name(data, taken=True)
        sequence = self.shadow[name]
        computed = data.draw(st.integers(0, len(sequence.tokens)))
        self.tables.release_dead_pages(name, computed)
        horizon = computed + 40
        for group, table in zip(self.tables.pool.plan.groups, sequence.tables, strict=True):
            for i in range(len(table)):
                keys = range(i * group.block_size, (i + 1) * group.block_size)
                queries = range(computed, horizon)
                if not any(k >= q or attends(group.specs[0], q, k) for q in queries for k in keys):
                    table[i] = None

    @precondition(lambda self: self.shadow)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = self.draw_name(data, taken=True)
        self.tables.free(name)
        del self.shadow[name]

    @precondition(lambda self: self.shadow and len(self.hosts) < 2)
    @rule(data=st.data())
    def move_out(self, data: st.DataObject) -> None:
        name = self.draw_name(data, taken=True)
        host = self.tables.move_out(name)
        self.hosts.append((host, self.shadow.pop(name)))

    @precondition(lambda self: self.hosts and len(self.shadow) < len(NAMES))
    @rule(data=st.data())
    def move_in(self, data: st.DataObject) -> None:
        name = self.draw_name(data, taken=False)
        host, sequence = self.hosts[-1]
        needed = sum(page is not None for table in sequence.tables for page in table)
        if needed > self.tables.allocator.num_free and not self.can_grow:
            before = self.state()
            with pytest.raises(OutOfPagesError):
                self.tables.move_in(name, host)
            assert self.state() == before
            return
        self.hosts.pop()
        self.tables.move_in(name, host)
        # Pages are no longer shared after a swap.
        tables = [[p and Page() for p in table] for table in sequence.tables]
        self.shadow[name] = Sequence(sequence.tokens, tables)

    @precondition(lambda self: self.shadow)
    @rule(world_size=st.sampled_from([1, 2]))
    def reshard(self, world_size: int) -> None:
        pool = self.tables.pool
        owned = self.tables.pages_of_groups()
        shards = [pool.shard(rank, world_size, owned) for rank in range(world_size)]
        name = max(self.shadow, key=lambda n: len(self.shadow[n].tokens))
        for layer in range(len(self.specs)):
            group, _ = pool.plan.locate(layer)
            slots = self.tables.slots(name, 0, len(self.shadow[name].tokens), group)
            layout = pool.layout(layer)
            slots = slots[slots // layout.block_size != NULL_PAGE]
            k, v = read_tokens(pool.layer_pages(layer), slots, layout, K_SCALE, V_SCALE)
            heads = layout.num_kv_heads // world_size
            for rank, shard in enumerate(shards):
                part = slice(rank * heads, (rank + 1) * heads)
                pages, own = shard.layer_pages(layer), shard.layout(layer)
                k_own, v_own = read_tokens(pages, slots, own, K_SCALE, V_SCALE)
                torch.testing.assert_close(k_own, k[:, part], rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(v_own, v[:, part], rtol=0, atol=0, equal_nan=True)
        together = PagedKVPool.from_shards(shards, owned)
        assert together.plan == pool.plan
        for layer in range(len(self.specs)):
            size = pool.layout(layer).page_bytes
            rows = owned[pool.plan.locate(layer)[0]]
            assert torch.equal(
                together.layer_pages(layer)[rows, :size], pool.layer_pages(layer)[rows, :size]
            )
        self.tables.pool = together

    @invariant()
    def pages_correspond_to_the_shadows(self) -> None:
        self.tables.check_integrity()
        assert len(self.tables) == len(self.shadow)
        page_of: dict[Page, int] = {}
        for name, sequence in self.shadow.items():
            assert self.tables.length(name) == len(sequence.tokens)
            for group, shadow_table in enumerate(sequence.tables):
                table = self.tables.table(name, group)
                assert len(table) == len(shadow_table)
                for page, shadow_page in zip(table, shadow_table, strict=True):
                    assert (page == NULL_PAGE) == (shadow_page is None)
                    if shadow_page is not None:
                        assert page_of.setdefault(shadow_page, page) == page
        assert len(set(page_of.values())) == len(page_of)
        assert self.tables.allocator.num_used == len(page_of)

    @invariant()
    def tokens_read_back_byte_for_byte(self) -> None:
        pool = self.tables.pool
        for layer, bank in enumerate(self.banks):
            group, _ = pool.plan.locate(layer)
            block_size = self.block_sizes[group]
            tokens: list[int] = []
            slots: list[torch.Tensor] = []
            for name, sequence in self.shadow.items():
                table = sequence.tables[group]
                first = next((i for i, p in enumerate(table) if p is not None), len(table))
                start = min(first * block_size, len(sequence.tokens))
                tokens += sequence.tokens[start:]
                slots.append(self.tables.slots(name, start, len(sequence.tokens), group))
            if not tokens:
                continue
            slot = torch.cat(slots)
            views = pool.layout(layer).views(pool.layer_pages(layer))
            parts = [view.view(torch.uint8) for view in views if view is not None]
            for part, expected in zip(parts, bank.encoded, strict=True):
                assert torch.equal(part[slot // block_size, slot % block_size], expected[tokens])

    @invariant()
    def overwrite_free_pages(self) -> None:
        allocator, buffer = self.tables.allocator, self.tables.pool.buffer
        free = [page for page in range(allocator.num_pages) if not allocator.num_holders(page)]
        byte = int(torch.randint(0, 256, (), generator=self.noise))
        buffer[torch.tensor(free, dtype=torch.int64)] = byte

    def teardown(self) -> None:
        for name in list(self.shadow):
            self.tables.free(name)
        assert self.tables.allocator.num_used == 0
        self.tables.check_integrity()


class FullAttentionMachine(SequencesMachine):
    """One group; formats differ between layers and between K and V."""

    specs: ClassVar[list[KVCacheSpec]] = [
        FullAttentionSpec(4, 2, 32, 16, kv_cache_dtype="nvfp4"),
        FullAttentionSpec(4, 2, 16, kv_cache_dtype="fp8", v_cache_dtype="nvfp4_4over6"),
    ]


class WindowMachine(SequencesMachine):
    """bfloat16 windows beside nvfp4 full attention, with pages of different lengths."""

    num_pages: ClassVar[int] = 24
    specs: ClassVar[list[KVCacheSpec]] = [
        SlidingWindowSpec(4, 2, 16, kv_cache_dtype="bfloat16", sliding_window=5),
        FullAttentionSpec(4, 2, 32, kv_cache_dtype="nvfp4"),
        SlidingWindowSpec(4, 2, 16, kv_cache_dtype="nvfp4", sliding_window=5),
    ]


class GrowingChunkMachine(SequencesMachine):
    """Chunked-local attention and a window of one, in a pool that grows."""

    num_pages: ClassVar[int] = 4
    can_grow: ClassVar[bool] = True
    specs: ClassVar[list[KVCacheSpec]] = [
        ChunkedLocalAttentionSpec(4, 2, 32, kv_cache_dtype="mxfp4", attention_chunk_size=6),
        SlidingWindowSpec(4, 2, 32, kv_cache_dtype="fp4_block16", sliding_window=1),
    ]


# Shrinking a failure takes minutes; the steps that led to it are printed as they were.
BOUNDED = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TestFullAttention = FullAttentionMachine.TestCase
TestFullAttention.settings = BOUNDED
TestWindow = WindowMachine.TestCase
TestWindow.settings = BOUNDED
TestGrowingChunk = GrowingChunkMachine.TestCase
TestGrowingChunk.settings = BOUNDED
