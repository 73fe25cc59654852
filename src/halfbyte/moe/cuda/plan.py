"""How the CUDA kernels for few tokens per expert share their work; decided by shapes alone."""

from typing import NamedTuple

from halfbyte.linear.w4a16.gemv.plan import Machine
from halfbyte.moe.experts import BLOCK_SIZES, WeightFormat

MAX_MEAN = 8
"""Max mean number of pairs per expert. Above it Triton runs, or on SM90 the GEMM by `wgmma`, which
takes over earlier (`kernel._MAX_MEAN_BESIDE_GEMM`)."""
MAX_PAIRS = 1024
"""Max pairs: every CTA reads all expert ids."""
MAX_EXPERTS = 1024
SIZE_MULTIPLE = 32
"""H and I must be multiples of this, so that rows of codes begin at multiples of 16 bytes."""
ITEM_K = 256
_TILE_ROWS, _TILE_COLUMNS = 16, 8
_MAX_SPLIT = 4
_COLUMNS = {1: 4, 4: 8, MAX_MEAN: 16}
"""Max tokens per pass over an expert's weights, by the max mean of tokens per expert. Weights of an
expert with more tokens are read again, from L2. Shared memory holds these tokens and the rings of
weights, so more tokens leave smaller rings."""
_OPTIONS = (
    (8, 3, 2),
    (8, 2, 4),
    (8, 2, 3),
    (8, 2, 2),
    (16, 1, 3),
    (16, 1, 2),
    (8, 1, 3),
    (8, 1, 2),
)
"""Warps per CTA, CTAs per SM, and items in flight per warp, in order of preference."""
_RESERVED_BYTES = 1024
"""Shared memory that CUDA takes from every CTA."""


class Work(NamedTuple):
    """One product of a layer."""

    n: int
    """Rows of an expert's matrix."""
    k: int
    num_experts: int
    weight_format: WeightFormat
    gated: bool
    interleaved: bool = False

    @property
    def items(self) -> int:
        """Items of 256 k in a row."""
        return -(-self.k // ITEM_K)

    @property
    def split(self) -> int:
        """Warps that share k of a tile; depends on K alone, for batch invariance."""
        return max(
            range(1, min(_MAX_SPLIT, self.items) + 1),
            key=lambda split: (self.items / (-(-self.items // split) * split), split),
        )

    @property
    def item_bytes(self) -> int:
        """Bytes of 16 rows x 256 k in shared memory."""
        block = BLOCK_SIZES[self.weight_format]
        words = ITEM_K // block // 4 + (self.k // block % 4 > 0)
        return _TILE_ROWS * (ITEM_K // 2 + 4 * words)

    @property
    def x_row_bytes(self) -> int:
        """Bytes of a token in shared memory."""
        return self.items * ITEM_K * 2 + 64


class ProductPlan(NamedTuple):
    """Macros and sizes of a launch, named as in `experts.cu`."""

    columns: int
    """Max pairs of an entry: 1, 2, 4, 8 or 16."""
    split: int
    groups: int
    stages: int
    ctas: int

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
            ("MX", int(work.weight_format == "mxfp4")),
            ("GATED", int(work.gated)),
            ("INTERLEAVED", int(work.interleaved)),
            ("N", work.n),
            ("K", work.k),
            ("COLUMN_TILES", self.column_tiles),
            ("SPLIT", self.split),
            ("GROUPS", self.groups),
            ("STAGES", self.stages),
            ("CTAS", self.ctas),
        )

    def shared_bytes(self, work: Work, num_pairs: int) -> int:
        """Dynamic shared memory of a CTA: x, rings, sums, and the lists of `routing.cuh`."""
        warps = self.split * self.groups
        sums = warps * 2 * self.column_tiles * 512
        entries = max_entries(num_pairs, work.num_experts, self.columns)
        lists = 4 * (2 + 2 * self.columns + entries + work.num_experts + num_pairs)
        rings = warps * self.stages * work.item_bytes
        return self.columns * work.x_row_bytes + rings + sums + lists

    def grid(self, work: Work, num_pairs: int, num_sms: int) -> int:
        """CTAs: as many as can be resident, but no more than there can be work for."""
        units = -(-work.n // _TILE_ROWS // self.groups)
        entries = max_entries(num_pairs, work.num_experts, self.columns)
        return min(num_sms * self.ctas, entries * units)


def max_entries(num_pairs: int, num_experts: int, columns: int) -> int:
    """Max entries of any routing: every expert that is hit may have one that is not full."""
    partial = min(num_pairs, num_experts)
    return partial + (num_pairs - partial) // columns


def is_small(num_pairs: int, num_experts: int) -> bool:
    """Whether a call with so many pairs is for these kernels."""
    return num_pairs <= min(MAX_PAIRS, MAX_MEAN * num_experts)


def make_plan(work: Work, m: int, top_k: int, machine: Machine) -> ProductPlan:
    """The plan for M tokens.

    Raises:
        ValueError: a K whose tokens do not fit into shared memory.
    """
    mean = m * top_k / work.num_experts
    max_mean = next((x for x in _COLUMNS if mean <= x), MAX_MEAN)
    columns = min(_COLUMNS[max_mean], 1 << (m - 1).bit_length())
    # Not `m * top_k`, so that there are few variants to compile.
    num_pairs = min(MAX_PAIRS, max_mean * work.num_experts)
    while columns:
        for warps, ctas, stages in _OPTIONS:
            groups = warps // work.split
            ctas = warps * ctas // (work.split * groups)
            plan = ProductPlan(columns, work.split, groups, stages, ctas)
            taken = plan.shared_bytes(work, num_pairs) + _RESERVED_BYTES
            if taken * ctas <= machine.block_bytes + _RESERVED_BYTES:
                return plan
        columns //= 2
    raise ValueError(f"K = {work.k} is too large for this GPU's shared memory")


def usual_plans(work: Work, machine: Machine) -> set[ProductPlan]:
    """Plans of all calls that `is_small`."""
    plans = set()
    for mean in _COLUMNS:
        for m in (1, 2, 4, 8, 16):
            plans.add(make_plan(work, m, max(1, mean * work.num_experts // m), machine))
    return plans
