"""How the CUDA kernels for one token share their work (`token.cu`); decided by shapes alone.

A group of warps has tasks one after another: tiles of the first product, a tile's experts in the
second. A task's k is split among the group's warps.
"""

from functools import lru_cache
from typing import NamedTuple

from halfbyte.kernels.runtime.occupancy import RESERVED_BYTES, bytes_for_ctas
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.moe.cuda.packed import TILE_ROWS
from halfbyte.moe.cuda.plan import Work

MAX_TOP_K = 16
"""Max experts of the token; the kernel takes 32, a lane of a warp for each."""
_MAX_WARPS = {True: 12, False: 16}
"""Of a CTA of the first product and of the second: registers of both fit on an SM."""
_MAX_TILES_PER_SM = 8
"""Of the first product. On an H200 GPT-OSS-20B has 11: a layer took 29.2 µs
(`moe_streaming_variants.json` in `benchmarks/results`), and takes 22.3 with `experts.cu`
(`moe.json`)."""
_MAX_STAGES, _PARTS = 6, 2
_TASK_PARTS, _SHARED_TASK_PARTS = 0.2, 1.0
"""Fixed cost of a task, in units of the time of one part; `plan.py` has the same for its units. In
the second product only a tile's sums are added, not a task's."""


class TokenPlan(NamedTuple):
    """Macros and sizes of a launch, named as in `token.cu`."""

    split: int
    groups: int
    stages: int
    parts: int = _PARTS
    """Parts of 128 k per item."""

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.split * self.groups

    def macros(self, work: Work) -> tuple[tuple[str, int], ...]:
        """Macros of the source except those of the dtype."""
        return (
            *work.macros(),
            ("COLUMN_TILES", 1),
            ("SPLIT", self.split),
            ("GROUPS", self.groups),
            ("PARTS", self.parts),
            ("STAGES", self.stages),
            ("CTAS", 1024 // self.threads),
        )

    def shared_bytes(self, work: Work, top_k: int) -> int:
        """Dynamic shared memory of a CTA: x, rings, and two sets of sums."""
        warps = self.split * self.groups
        ring = self.stages * work.item_bytes(self.parts)
        if work.gated:
            return work.x_row_bytes + warps * (ring + (2 * 512 if self.split > 1 else 0))
        return top_k * work.x_row_bytes + warps * (ring + 2 * 4 * TILE_ROWS)

    def grid(self, work: Work, top_k: int, num_sms: int) -> int:
        """CTAs: one per SM, but no more than there is work for."""
        return min(num_sms, work.tiles * (top_k if work.gated else 1))


def ctas_per_sm(work: Work) -> int:
    """Max CTAs of a launch per SM, by its shared memory. A CTA of the first product takes more
    than half of it; beside that one of the second fits, but not two."""
    return 1 if work.gated else 3


def make_token_plan(work: Work, top_k: int, gpu: Gpu) -> TokenPlan | None:
    """The plan for one token; None if it has too many experts or does not fit."""
    if top_k > MAX_TOP_K:
        return None
    # The next power of two, so that there are few variants to compile.
    return _plan_of(work, 1 << (top_k - 1).bit_length(), gpu)


def is_faster_for_a_token(gate_up: Work, top_k: int, gpu: Gpu) -> bool:
    """Whether `token.cu` takes less time than `experts.cu`, which has more warps."""
    return gate_up.tiles * top_k <= _MAX_TILES_PER_SM * gpu.num_sms


def usual_token_plans(work: Work, gpu: Gpu) -> set[TokenPlan]:
    """Plans for any number of experts."""
    plans = (make_token_plan(work, top_k, gpu) for top_k in range(1, MAX_TOP_K + 1))
    return {plan for plan in plans if plan is not None}


@lru_cache(maxsize=1024)
def _plan_of(work: Work, top_k: int, gpu: Gpu) -> TokenPlan | None:
    """The plan with the least time per warp."""
    tiles = -(-work.tiles * (top_k if work.gated else 1) // gpu.num_sms)
    tasks, repeats = (tiles, 1) if work.gated else (top_k, tiles)

    def cost(share: tuple[int, int]) -> float:
        """Of the tasks of a group."""
        split, groups = share
        is_shared = work.gated and split > 1
        parts = work.items(_PARTS) // split * _PARTS
        return -(-tasks // groups) * (parts + (_SHARED_TASK_PARTS if is_shared else _TASK_PARTS))

    shares = [
        (split, groups)
        for groups in range(1, min(tasks, _MAX_WARPS[work.gated]) + 1)
        for split in range(1, _MAX_WARPS[work.gated] // groups + 1)
        if work.items(_PARTS) % split == 0
    ]
    split, groups = min(shares, key=cost)
    items = -(-tasks // groups) * (work.items(_PARTS) // split) * repeats
    for stages in range(min(items, _MAX_STAGES), 0, -1):
        plan = TokenPlan(split, groups, stages)
        if plan.shared_bytes(work, top_k) <= _available_bytes(work, gpu):
            return plan
    return None


def _available_bytes(work: Work, gpu: Gpu) -> int:
    """Shared memory for a CTA. Where launches overlap it leaves room for the other product's."""
    if gpu.compute_capability < 90:
        return gpu.block_bytes
    of_sm = gpu.block_bytes + RESERVED_BYTES
    half = bytes_for_ctas(0, 1, of_sm)
    return half if work.gated else of_sm - half - 2 * RESERVED_BYTES
