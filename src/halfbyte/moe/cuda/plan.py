"""How the CUDA kernels for few tokens per expert share their work; decided by shapes alone.

A pair is a token and one of its experts; an entry, up to `columns` pairs of one expert. An item is
what a warp loads at a time: one or two parts of a tile (`packed.py`), 128 k each. A unit is
`groups` tiles of 16 rows for one entry, each computed by `split` warps that split its k.
"""

from functools import lru_cache
from math import ceil, exp, inf
from typing import NamedTuple

from halfbyte.kernels.runtime.occupancy import RESERVED_BYTES
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.moe.cuda.packed import CHUNK_BYTES, PART_K, SCALE_BYTES, num_tiles
from halfbyte.moe.experts import WeightFormat

MAX_MEAN = 8
"""Max mean number of pairs per expert. Above it Triton runs, or on SM90 the GEMM by `wgmma`, which
takes over earlier (`kernel._MAX_MEAN_BESIDE_GEMM`)."""
MAX_PAIRS = 1024
"""Max pairs: every CTA reads all expert ids."""
_FEW_PAIRS = 32
"""Max pairs of `few.cuh`."""
MAX_EXPERTS = 1024
SIZE_MULTIPLE = 32
"""H and I must be multiples of this, so that each token begins at a multiple of 16 bytes."""
_TILE_COLUMNS = 8
_MAX_SPLIT = 4
_COLUMNS = {1: 4, 6: 8, MAX_MEAN: 16}
"""Max tokens per pass over an expert's weights, by the max mean of tokens per expert. Weights of an
expert with more tokens are read again, from L2. Shared memory holds these tokens and the rings of
weights, so more tokens leave smaller rings."""


class _Option(NamedTuple):
    """How a plan may use an SM."""

    warps: int
    """Warps per CTA."""
    ctas: int
    """CTAs per SM."""
    stages: int
    """Items in flight, per warp."""
    parts: int
    """Parts of 128 k per item."""


_SMALLER = (_Option(8, 2, 2, 2), _Option(8, 1, 3, 2), _Option(8, 1, 2, 2), _Option(8, 1, 2, 1))
_OPTIONS = ((_Option(12, 2, 2, 2), *_SMALLER), _SMALLER)
_OPTIONS_OF_MANY = ((_Option(24, 1, 2, 2), _Option(16, 1, 2, 2), *_SMALLER),)
"""For every split of k, the first option of each list that fits into shared memory is a candidate.
One CTA per SM, whose warps share the tokens, is faster with many columns and a large K: by times
of up to 90 options for both products of Qwen3-30B-A3B and GPT-OSS-20B on one H200
(`benchmarks/results/moe_plans_packed.json`)."""
_MANY_COLUMNS, _LARGE_K = 8, 1024
_UNIT_PARTS, _SHARED_UNIT_PARTS = 0.2, 1.0
"""Fixed cost of a unit, in units of the time of one part: if one warp has all of k, and if several
warps split it."""
_WAITING_WARPS = 4
"""Memory latency of a round, in units of the time in which a warp issues the round's instructions.
Fitted to the same measurements: on average the plan with the lowest `StreamingPlan.cost` takes 3 %
longer than the fastest option."""


class Work(NamedTuple):
    """One product of a layer."""

    n: int
    """Rows of an expert's matrix."""
    k: int
    num_experts: int
    weight_format: WeightFormat
    gated: bool
    interleaved: bool = False

    def macros(self) -> tuple[tuple[str, int], ...]:
        """Macros of the sources that tell it."""
        return (
            ("MX", int(self.weight_format == "mxfp4")),
            ("GATED", int(self.gated)),
            ("INTERLEAVED", int(self.interleaved)),
            ("N", self.n),
            ("K", self.k),
        )

    def items(self, parts: int) -> int:
        """Items of a tile, each of so many parts."""
        return -(-self.k // (parts * PART_K))

    def item_bytes(self, parts: int) -> int:
        """Bytes of an item in shared memory."""
        return parts * (SCALE_BYTES[self.weight_format] + 2 * CHUNK_BYTES)

    @property
    def tiles(self) -> int:
        """Tiles of an expert's matrix."""
        return num_tiles(self.n, self.gated)

    @property
    def x_row_bytes(self) -> int:
        """Bytes of a token in shared memory."""
        return self.items(1) * PART_K * 2 + 64


class StreamingPlan(NamedTuple):
    """Macros and sizes of a launch, named as in `experts.cu`."""

    columns: int
    """Max pairs of an entry: 1, 2, 4, 8 or 16."""
    split: int
    groups: int
    stages: int
    ctas: int
    parts: int = 2
    """Parts of 128 k per item."""
    few: bool = False
    """Whether there are at most 32 pairs."""
    resident: bool = False
    """Whether shared memory holds x of all tokens, in `down` of all entries that a CTA has."""

    @property
    def column_tiles(self) -> int:
        """Tiles of 8 columns."""
        return -(-self.columns // _TILE_COLUMNS)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.split * self.groups

    def macros(self, work: Work) -> tuple[tuple[str, int], ...]:
        """Macros of the source except those of the dtype."""
        return (
            *work.macros(),
            ("COLUMN_TILES", self.column_tiles),
            ("SPLIT", self.split),
            ("GROUPS", self.groups),
            ("PARTS", self.parts),
            ("STAGES", self.stages),
            ("CTAS", self.ctas),
            ("FEW", int(self.few)),
            ("RESIDENT", int(self.resident)),
            ("SINGLE", int(self.is_single(work))),
        )

    def shared_bytes(self, work: Work, num_pairs: int, num_sms: int) -> int:
        """Dynamic shared memory of a CTA: x, rings, sums, and the lists of `routing.cuh`."""
        warps = self.split * self.groups
        sums = warps * 2 * self.column_tiles * 512 if self.split > 1 else 0
        entries = max_entries(num_pairs, work.num_experts, self.columns)
        own = entries // self.grid(work, num_pairs, num_sms) + 2
        lists = 4 * (1 + own * (1 + self.columns) + entries + work.num_experts + 2 * num_pairs)
        rings = warps * self.stages * work.item_bytes(self.parts)
        zeros = 128 if self.is_single(work) else 0
        rows = self.columns * (own if self.resident and not work.gated else 1)
        return rows * (work.x_row_bytes + zeros) + rings + sums + lists

    def is_single(self, work: Work) -> bool:
        """Whether the matmul's columns are blocks of k instead of tokens (`single.cuh`)."""
        return work.weight_format == "mxfp4" and self.columns == 1 and self.parts == 2

    def grid(self, work: Work, num_pairs: int, num_sms: int) -> int:
        """CTAs: as many as can be resident, but no more than there can be work for."""
        entries = max_entries(num_pairs, work.num_experts, self.columns)
        return min(num_sms * self.ctas, entries * self.units(work))

    def units(self, work: Work) -> int:
        """Units of an entry."""
        return -(-work.tiles // self.groups)

    def cost(self, work: Work, num_pairs: int, num_sms: int) -> float:
        """Estimated time of a launch, in arbitrary units: the warps of an SM issue instructions one
        after another, and their waits for memory overlap."""
        units = mean_entries(num_pairs, work.num_experts, self.columns) * self.units(work)
        rounds = ceil(units / (num_sms * self.ctas))
        parts = work.items(self.parts) // self.split * self.parts
        overhead = _UNIT_PARTS if self.split == 1 else _SHARED_UNIT_PARTS
        warps = self.ctas * self.groups * self.split
        return rounds * (parts + overhead) * (warps + _WAITING_WARPS)


_FASTER = {
    (True, StreamingPlan(4, 2, 6, 2, 2)): (1.0, StreamingPlan(4, 2, 4, 2, 2)),
    (True, StreamingPlan(8, 1, 24, 2, 1)): (0.0, StreamingPlan(8, 1, 16, 2, 1)),
    (True, StreamingPlan(8, 3, 8, 2, 1)): (0.0, StreamingPlan(8, 3, 4, 2, 2)),
    (False, StreamingPlan(8, 3, 8, 2, 1)): (0.0, StreamingPlan(8, 3, 4, 2, 2)),
    (False, StreamingPlan(4, 1, 8, 2, 2)): (0.5, StreamingPlan(4, 1, 8, 2, 2, 3)),
    (False, StreamingPlan(8, 1, 8, 2, 2)): (0.0, StreamingPlan(8, 1, 16, 2, 1, 3)),
}
"""What the same measurements found 0.4 to 1.9 µs faster than the plan with the lowest cost, by
whether the product is gated and from which mean number of tokens per expert on: with 16 and 64
tokens of Qwen3-30B-A3B gate_up takes 42.4 and 62.6 µs instead of 43.6 and 63.8, down 21.7 and 33.8
instead of 22.8 and 35.7, with 16 of GPT-OSS-20B 67.5 instead of 67.9 and 36.4 instead of 37.6."""


def max_entries(num_pairs: int, num_experts: int, columns: int) -> int:
    """Max entries of any routing: every expert that is hit may have one partly filled entry."""
    partial = min(num_pairs, num_experts)
    return partial + (num_pairs - partial) // columns


@lru_cache(maxsize=2**14)
def mean_entries(num_pairs: int, num_experts: int, columns: int) -> float:
    """Mean number of entries if every pair has a random expert (Poisson)."""
    mean = num_pairs / num_experts
    chance, entries = exp(-mean), 0.0
    for pairs in range(1, int(4 * mean) + 16):
        chance *= mean / pairs
        entries += chance * -(-pairs // columns)
    return num_experts * entries


def is_small(num_pairs: int, num_experts: int) -> bool:
    """Whether these kernels take a call with so many pairs."""
    return num_pairs <= min(MAX_PAIRS, MAX_MEAN * num_experts)


def make_plan(work: Work, m: int, top_k: int, gpu: Gpu) -> StreamingPlan:
    """The plan for M tokens.

    Raises:
        ValueError: a K whose tokens do not fit into shared memory.
    """
    return _plan_of(work, 1 << (m - 1).bit_length(), m * top_k, gpu)


@lru_cache(maxsize=256)
def usual_plans(work: Work, gpu: Gpu) -> set[StreamingPlan]:
    """Plans of all calls that `is_small`."""
    return {
        _plan_of(work, columns, num_pairs, gpu)
        for columns in (1, 2, 4, 8, 16)
        for num_pairs in range(1, min(MAX_PAIRS, MAX_MEAN * work.num_experts) + 1)
    }


def _plan_of(work: Work, columns: int, num_pairs: int, gpu: Gpu) -> StreamingPlan:
    """The plan for so many pairs; no entry has more than `columns`."""
    plan = _fastest(work, columns, num_pairs, gpu)
    if num_pairs > _FEW_PAIRS:
        return plan
    plan = plan._replace(few=True)
    resident = plan._replace(resident=True)
    is_resident = plan.columns >= columns and _fits(work, resident, _FEW_PAIRS, gpu)
    return resident if is_resident else plan


def _fastest(work: Work, columns: int, num_pairs: int, gpu: Gpu) -> StreamingPlan:
    """The plan with the least estimated time."""
    mean = num_pairs / work.num_experts
    max_mean = next((x for x in _COLUMNS if mean <= x), MAX_MEAN)
    plans = _possible_plans(work, min(columns, _COLUMNS[max_mean]), max_mean, gpu)
    plan = min(plans, key=lambda plan: plan.cost(work, num_pairs, gpu.num_sms))
    min_mean, faster = _FASTER.get((work.gated, plan), (inf, plan))
    return faster if mean >= min_mean and _fits(work, faster, num_pairs, gpu) else plan


@lru_cache(maxsize=4096)
def _possible_plans(work: Work, columns: int, max_mean: int, gpu: Gpu) -> list[StreamingPlan]:
    """Candidates: one for each number of warps that split k and each list of options."""
    # Not the call's number of pairs, so that there are few variants to compile.
    num_pairs = min(MAX_PAIRS, max_mean * work.num_experts)
    while columns:
        plans: list[StreamingPlan] = []
        is_large = columns >= _MANY_COLUMNS and work.k > _LARGE_K
        for split in range(1, _MAX_SPLIT + 1):
            for options in _OPTIONS_OF_MANY if is_large else _OPTIONS:
                fitting = (
                    _fitting(work, columns, split, option, num_pairs, gpu) for option in options
                )
                plans += [plan for plan in fitting if plan is not None][:1]
        if plans:
            return plans
        columns //= 2
    raise ValueError(f"K = {work.k} is too large for this GPU's shared memory")


def _fitting(
    work: Work,
    columns: int,
    split: int,
    option: _Option,
    num_pairs: int,
    gpu: Gpu,
) -> StreamingPlan | None:
    """The plan of an option; None if it does not fit into shared memory, or if the warps that split
    k would have different numbers of items, so that some would wait."""
    groups = option.warps // split
    ctas = option.warps * option.ctas // (split * groups)
    plan = StreamingPlan(columns, split, groups, option.stages, ctas, option.parts)
    fits = _fits(work, plan, num_pairs, gpu)
    return plan if fits and work.items(option.parts) % split == 0 else None


def _fits(work: Work, plan: StreamingPlan, num_pairs: int, gpu: Gpu) -> bool:
    """Whether an SM has shared memory for its CTAs."""
    taken = plan.shared_bytes(work, num_pairs, gpu.num_sms) + RESERVED_BYTES
    return taken * plan.ctas <= gpu.block_bytes + RESERVED_BYTES
