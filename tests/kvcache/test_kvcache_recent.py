"""Rings of recent tokens: their entries, and the positions that they still have."""

import pytest
import torch

from halfbyte.kvcache import FullAttentionSpec, PagedKVPool, SequenceTables, plan_kv_cache
from halfbyte.kvcache.recent import SLACK, RecentTokens, RingSlots, packed_part
from halfbyte.kvcache.recent_step import MissingTokens, _missing_places
from halfbyte.kvcache.recipe import KVRecipe
from triton_interpreter import interpreted

NVFP4 = FullAttentionSpec(16, 2, 32, kv_cache_dtype="nvfp4", dtype=torch.float32)
FP8 = FullAttentionSpec(16, 2, 32, kv_cache_dtype="fp8", dtype=torch.float32)


def make_tables(tokens: int = 20) -> SequenceTables:
    pool = PagedKVPool([NVFP4, FP8], 40)
    recent = RecentTokens.of(pool.plan, KVRecipe(recent_tokens=tokens), torch.float32, capacity=2)
    assert recent is not None
    return SequenceTables(pool, recent=recent)


def rings(recent: RecentTokens) -> tuple[torch.Tensor, torch.Tensor]:
    pair = recent[0]
    assert pair is not None
    return pair


def test_layers_without_four_bits_have_none() -> None:
    recent = make_tables().recent
    assert recent is not None
    assert recent[1] is None
    key, value = rings(recent)
    assert key.shape == value.shape == (2, 2, 20 + SLACK, 32)
    assert recent.num_bytes == 2 * key.nbytes
    assert RecentTokens.of(plan_kv_cache([FP8]), KVRecipe(recent_tokens=20), torch.float32) is None
    assert RecentTokens.of(plan_kv_cache([NVFP4]), KVRecipe(), torch.float32) is None
    for tokens in (0, 257):
        with pytest.raises(ValueError, match=f"tokens: expected 1 to 256, got {tokens}"):
            RecentTokens([NVFP4.layout], tokens, torch.float32)
    for tokens in (1, 256):
        assert RecentTokens([NVFP4.layout], tokens, torch.float32).ring == tokens + SLACK


@pytest.mark.parametrize(
    ("window", "seen"),
    [(None, range(2, 9)), (20, range(2, 9)), (8, range(3, 9)), (3, range(8, 9)), (2, range(0))],
)
def test_missing_tokens_that_a_window_reaches(window: int | None, seen: range) -> None:
    """Of ten tokens before the step's; positions from 9 on are in the ring."""
    missing = [MissingTokens(1, 5, range(2, 9), query=10)]
    places = _missing_places(missing, window, torch.device("cpu"))
    assert len(places) == bool(seen)
    for numbers, entries, positions in places:
        assert positions.tolist() == list(seen)
        assert numbers.tolist() == [1] * len(seen)
        assert entries.tolist() == [5] * len(seen)


def test_sequences_have_entries_of_their_own() -> None:
    tables = make_tables()
    recent = tables.recent
    assert recent is not None
    for seq in "abc":
        tables.add(seq)
    entries = [tables.entry(seq) for seq in "abc"]
    assert sorted(entries) == [1, 2, 3]  # 0 is reserved
    key, value = rings(recent)
    key[entries[0]], value[entries[0]] = 1.0, 2.0
    tables.append("a", 30)
    tables.fork("a", "d")
    entry = tables.entry("d")
    assert entry not in entries
    key, value = rings(recent)  # grown
    assert (key[entry] == 1).all()
    assert (value[entry] == 2).all()
    host = tables.move_out("d")
    key[entry] = 7.0
    tables.move_in("e", host)
    assert (key[tables.entry("e")] == 1).all()
    for seq in "abce":
        tables.free(seq)
    assert len(set(recent._free)) == recent.count - 1


@pytest.mark.parametrize(
    ("length", "crop", "missing"),
    [
        (30, 30, range(0)),
        (30, 25, range(0)),  # within the slack
        (100, 84, range(0)),
        (100, 83, range(64, 64)),
        (100, 82, range(63, 64)),
        (100, 60, range(41, 60)),
        (100, 3, range(3)),
        (36, 3, range(0)),
        (37, 3, range(1)),
    ],
)
def test_what_a_ring_has_overwritten_is_missing(length: int, crop: int, missing: range) -> None:
    tables = make_tables()
    tables.add("a")
    tables.append("a", length)
    assert not tables.missing_recent("a", length)
    tables.crop("a", crop)
    assert list(tables.missing_recent("a", crop)) == list(missing)
    host = tables.move_out("a")
    tables.move_in("b", host)
    assert list(tables.missing_recent("b", crop)) == list(missing)
    tables.fill_recent("b", missing.start)
    assert not tables.missing_recent("b", crop)


def test_tokens_after_a_crop_are_in_the_ring() -> None:
    tables = make_tables()
    tables.add("a")
    tables.append("a", 100)
    tables.crop("a", 0)
    tables.append("a", 50)
    assert not tables.missing_recent("a", 10)
    assert not tables.missing_recent("a", 50)


def test_a_sequence_from_a_pool_without_rings_misses_all() -> None:
    plain = SequenceTables(PagedKVPool([NVFP4, FP8], 9))
    plain.add("a")
    plain.append("a", 30)
    tables = make_tables()
    tables.move_in("a", plain.move_out("a"))
    assert tables.missing_recent("a", 30) == range(11, 30)


@pytest.mark.parametrize("tokens", [10, 40])
def test_a_sequence_from_rings_of_another_size_misses_all(tokens: int) -> None:
    other = make_tables(tokens)
    other.add("a")
    other.append("a", 50)
    tables = make_tables()
    tables.move_in("a", other.move_out("a"))
    assert tables.missing_recent("a", 50) == range(31, 50)
    tables.check_integrity()


def test_lengths_and_window_of_what_is_packed() -> None:
    lengths = torch.tensor([0, 5, 64, 65, 1000], dtype=torch.int32)
    shorter, window = packed_part(64, lengths, 0)
    assert (shorter.tolist(), window) == ([0, 0, 0, 1, 936], 0)
    shorter, window = packed_part(64, lengths, 100)
    assert (shorter.tolist(), window) == ([0, 0, 0, 1, 936], 36)
    shorter, window = packed_part(64, lengths, 64)
    assert (shorter.tolist(), window) == ([0] * 5, 0)
    assert lengths[4] == 1000


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernel_writes_what_pytorch_does(device: str) -> None:
    pytest.importorskip("triton")
    recent = RecentTokens([NVFP4.layout], 20, torch.bfloat16, device, capacity=5)
    key, value = torch.randn(2, 9, 3, 32, device=device)[:, :, :2].bfloat16()
    rows = torch.tensor([0, 2, 3, 8], device=device)
    places = torch.tensor([1, 4, 4, 2], device=device), torch.tensor([35, 0, 1, 17], device=device)
    keys, values = (ring.clone() for ring in rings(recent))
    expected = keys.clone(), values.clone()
    for ring, x in zip(expected, (key, value), strict=True):
        ring[places[0], :, places[1]] = x[rows]
    RingSlots(*rings(recent), rows, *places).write(key, value)
    if device == "cpu":
        kernel = interpreted("halfbyte.kvcache.recent_kernel").write
        kernel(keys, values, rows, *places, key, value)
        assert all(torch.equal(a, b) for a, b in zip((keys, values), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rings(recent), expected, strict=True))
