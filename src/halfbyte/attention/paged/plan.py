"""Launch plans of the Triton attention kernel: operand dtypes, tile sizes, splits.

Needs neither Triton nor a GPU; plans do not depend on values of tensors.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from halfbyte.attention.base import AttentionConfig
from halfbyte.kernels.formats import FORMATS
from halfbyte.layouts import KVCacheDType, PageLayout

MAX_HEAD_SIZE = 512
_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Shared memory of a program (CUDA C++ Programming Guide, "Technical Specifications").
_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 101: 227, 103: 227, 110: 227}
_MIN_SHARED_KIB = 99
_RESIDENT_PROGRAMS = 3
"""Resident programs per SM, limited by registers (about 150 per thread, 128 threads)."""
_MIN_TOKENS_PER_SPLIT = 512
_MAX_SPLITS = 256
_PARTIAL_BYTES = 256 * 2**20
"""Bound on the partial results of one launch; more query tokens take several launches."""
_BATCH_INVARIANT_SPLIT = 1024
_SMALL_WINDOW = 512
"""Max window for the small tile: most key tiles of such a window need a mask."""


@dataclass(frozen=True)
class TritonTarget:
    """What Triton's kernels run on: a GPU, or the interpreter on a CPU. Plans depend on it.

    Plans of CUDA C++ kernels depend on more (`linear.w4a16.gemv.plan.Gpu`).
    """

    compute_capability: int
    """90 for SM90; 0 for Triton's interpreter."""
    num_sms: int

    @property
    def shared_bytes(self) -> int:
        """Max shared memory per program, in bytes."""
        return _SHARED_KIB.get(self.compute_capability, _MIN_SHARED_KIB) * 1024


@lru_cache(maxsize=8)
def triton_target(device: torch.device) -> TritonTarget:
    """Properties of a device; for the CPU, constants for Triton's interpreter."""
    if device.type == "cpu":
        return TritonTarget(compute_capability=0, num_sms=2)
    properties = torch.cuda.get_device_properties(device)
    return TritonTarget(10 * properties.major + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True)
class Tiles:
    """`block_m` query rows, `block_n` keys, and Triton's launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def tokens(self, group: int) -> int:
        """Query tokens per tile, given `group` query heads per KV head."""
        return max(1, self.block_m // group)


@dataclass(frozen=True)
class PagedPlan:
    """One launch, or several over consecutive query tokens."""

    tiles: Tiles
    num_splits: int
    """Programs that split the keys of a row; their results are merged."""
    split_length: int
    """Fixed keys per split if batch-invariant; 0 splits each sequence evenly."""
    tokens_per_launch: int

    @property
    def merges(self) -> bool:
        """Whether partial results are written and merged."""
        return self.num_splits > 1 or self.split_length > 0


def exponent_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """`score_scale` and `cap` of the kernels.

    Without a soft-cap, `score_scale` converts dot products to logits in base 2. With one, it
    converts them to the exponent that `soft_cap` in `kernels.py` needs for tanh, and `cap` is the
    soft-cap in base 2.
    """
    log2e = math.log2(math.e)
    return scale * (2.0 / softcap if softcap else 1.0) * log2e, (softcap or 0.0) * log2e


def unsupported_reason(layout: PageLayout, query_dtype: torch.dtype) -> str | None:
    """Why the kernel cannot read a layout; None if it can."""
    if reason := layout.unknown_format(FORMATS):
        return reason
    for head_size in (layout.head_size, layout.head_size_v):
        if head_size % 16 or head_size > MAX_HEAD_SIZE:
            return f"head sizes that are multiples of 16 up to {MAX_HEAD_SIZE}, not {head_size}"
    if query_dtype not in _QUERY_DTYPES:
        return f"query in bfloat16, float16 or float32, not {query_dtype}"
    return None


def operand_dtype(cache: KVCacheDType, query_dtype: torch.dtype) -> torch.dtype:
    """Operand dtype of a matmul of K with queries, or of V with weights.

    float32 if either is float32; float16 if it represents the cache's values exactly, because it
    has more mantissa bits than bfloat16 for queries and weights; else bfloat16 for its range.
    """
    if torch.float32 in (query_dtype, cache.storage_dtype):
        return torch.float32
    return torch.float16 if cache.kv_format.exact_in_float16 else torch.bfloat16


def choose_tiles(
    layout: PageLayout,
    query_dtype: torch.dtype,
    rows: int,
    target: TritonTarget,
    batch_invariant: bool,
) -> Tiles:
    """Tile sizes for sequences that have `rows` query rows per KV head (tokens times the group).

    Chosen by compiling for SM80, SM90, SM100 and SM120, such that (almost) no registers spill and
    shared memory suffices (99 KiB on SM86, SM89 and SM120).
    """
    padded = max(32, *(1 << (d - 1).bit_length() for d in (layout.head_size, layout.head_size_v)))
    large = target.shared_bytes >= 160 * 1024
    sides = (layout.k_dtype, layout.v_dtype)
    if torch.float32 in (operand_dtype(side, query_dtype) for side in sides):
        # Head size 512 spills anyway, and has no room for a second tile of keys.
        return Tiles(
            16, max(16, min(64, 4096 // padded)), 8 if padded == 256 else 4, min(2, 512 // padded)
        )

    # wgmma (SM90) needs fewer registers for 64 rows than mma does. SM100 keeps to mma, at most 32
    # rows: Triton's path to tcgen05 does not compile with pinned operands (`kv_tiles.pinned`).
    is_sm90 = target.compute_capability == 90
    max_block_m = 16 if padded > 256 else 128 if padded <= 128 else 64 if is_sm90 else 32
    if 100 <= target.compute_capability < 120:
        max_block_m = min(max_block_m, 32)
    block_m = min(max_block_m, max(32 if batch_invariant else 16, 1 << (rows - 1).bit_length()))
    if block_m == 128:
        return Tiles(128, 64, 8, 3)
    if block_m == 64:
        if padded > 128:
            return Tiles(64, 32, 8, 3)
        return Tiles(64, 64, 4 if is_sm90 or padded <= 64 else 8, 3)
    if block_m == 32:
        return Tiles(32, 64, 4 if padded <= 128 else 8, 3)
    # Decode: a tile of packed keys takes few registers, and a longer one hides more latency.
    # Two of five stages prefetch the block table, the other three keep two tiles of keys in flight.
    fp4 = all(side.scale_block_size for side in sides)
    block_n = (16384 if fp4 and large else 8192) // padded
    return Tiles(16, max(16, min(128, block_n)), 4, 5 if large and block_n * padded <= 8192 else 3)


def choose_row_tiles(
    head_size: int, head_size_v: int, sliding_window: int | None, target: TritonTarget
) -> Tiles:
    """Tile sizes for unpacked rows (`run_rows`) of head sizes up to 256.

    Measured on an H200; elsewhere chosen as in `choose_tiles`.
    """
    padded = max(16, *(1 << (d - 1).bit_length() for d in (head_size, head_size_v)))
    small_window = sliding_window is not None and sliding_window <= _SMALL_WINDOW
    if padded <= 64:
        return Tiles(64, 32, 4, 3) if small_window else Tiles(128, 64, 8, 3)
    if padded <= 128:
        return Tiles(64, 64, 4, 3)
    if target.shared_bytes < 160 * 1024:
        return Tiles(64, 32, 8, 2)
    if head_size_v > 128 and target.compute_capability < 90:
        # 128 rows of accumulators would spill.
        return Tiles(64, 64, 8, 2)
    return Tiles(128, 64, 8, 3 if head_size_v <= 128 else 2)


def make_plan(config: AttentionConfig, max_length: int, target: TritonTarget) -> PagedPlan:
    """The launches for a batch.

    With `config.batch_invariant`, rows depend on nothing but their own sequence: tile sizes depend
    on the layout, the group and the GPU alone, and splits have a fixed length.

    Args:
        config: with at least one sequence.
        max_length: capacity of the block table in tokens; at least the longest sequence.
        target: as of `triton_target`.
    """
    layout, group = config.layout, config.num_heads // config.layout.num_kv_heads
    if config.batch_invariant:
        tiles = choose_tiles(layout, config.query_dtype, group, target, True)
        split_length = _BATCH_INVARIANT_SPLIT
        num_splits = max(1, -(-max_length // split_length))
    else:
        rows = -(-config.num_tokens // config.num_seqs) * group
        tiles = choose_tiles(layout, config.query_dtype, rows, target, False)
        split_length = 0
        num_splits = _num_splits(config, tiles, max_length, target)
    tokens_per_launch = config.num_tokens
    if split_length or num_splits > 1:
        bytes_per_token = 4 * num_splits * config.num_heads * (layout.head_size_v + 2)
        tokens_per_launch = min(config.num_tokens, max(1, _PARTIAL_BYTES // bytes_per_token))
    return PagedPlan(tiles, num_splits, split_length, tokens_per_launch)


def _num_splits(
    config: AttentionConfig, tiles: Tiles, max_length: int, target: TritonTarget
) -> int:
    """Splits of a row's keys, so that programs fill the GPU."""
    kv_heads, num_seqs = config.layout.num_kv_heads, config.num_seqs
    group = config.num_heads // kv_heads
    heads_per_tile = min(group, tiles.block_m)
    tokens_per_tile = tiles.block_m // heads_per_tile
    programs = max(num_seqs, -(-config.num_tokens // tokens_per_tile)) * kv_heads
    programs *= -(-group // heads_per_tile)
    resident = target.num_sms * _RESIDENT_PROGRAMS * 4 // tiles.num_warps
    # Several short programs per resident slot balance sequences of different lengths. Prompts
    # have many programs already, and their partial results would be large.
    if tiles.block_m > 32:
        wanted = resident // programs
    else:
        wanted = -(-resident * (2 if num_seqs == 1 else 4) // programs)
    if config.sliding_window is not None:
        max_length = min(max_length, config.sliding_window + tokens_per_tile)
    longest = min(_MAX_SPLITS, max_length // _MIN_TOKENS_PER_SPLIT)
    return max(1, min(wanted, longest))
