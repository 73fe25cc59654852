"""Plans of decode steps, made on the CPU by `make_plan` itself, and the work in them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

import cuda_on_host
from halfbyte.attention import AttentionInputs, AttentionPlans
from halfbyte.attention.decode import cuda
from halfbyte.attention.decode import plan as plans
from halfbyte.attention.decode.plan import DecodePlan
from halfbyte.attention.decode.recipe import NO_RECIPE, RecipeVariant
from halfbyte.kernels.runtime import nvrtc
from halfbyte.layouts import PageLayout

_MERGE_MACROS = ("HEAD_SIZE_V", "KV_HEADS", "GROUP", "COLS", "Q_BF16", "Q_FP16")
"""Macros given to the compiler; those of the attention kernel would compile equal libraries."""


@dataclass(frozen=True)
class Step:
    """A decode step: sequences, and the model and the GPU that decide how it is cut."""

    lengths: Sequence[int]
    queries: Sequence[int]
    """Query tokens per sequence."""
    group: int = 4
    kv_heads: int = 2
    head_size: int = 128
    dtype: str = "nvfp4"
    block_size: int = 16
    order: Literal["HND", "NHD"] = "HND"
    window: int | None = None
    batch_invariant: bool = False
    capability: int = 90
    multiprocessors: int = 132
    padding: int = 0
    """Query tokens after the last sequence's, as in a captured graph."""

    @property
    def layout(self) -> PageLayout:
        return PageLayout(
            *(self.dtype, self.dtype, self.head_size, None, self.kv_heads),
            *(self.block_size, self.order),
        )

    @property
    def starts(self) -> list[int]:
        """First query token of every sequence, and their number."""
        return np.cumsum([0, *self.queries]).tolist()


class Share(NamedTuple):
    """Tiles `first` up to `stop` of a work item, which one unit works on."""

    unit: int
    item: int
    first: int
    stop: int


def random_step(seed: int, max_sequences: int = 300, max_tokens: int = 40_000) -> Step:
    """A random step with sequences of very different lengths."""
    rng = Random(seed)
    count = rng.choice((1, 2, rng.randint(3, 20), rng.randint(3, max_sequences)))
    longest = max(2, max_tokens // count)
    lengths = [
        rng.choice((0, 1, rng.randint(1, 200), rng.randint(1, longest))) for _ in range(count)
    ]
    lengths[rng.randrange(count)] = rng.randint(1, max_tokens)
    max_queries = rng.choice((1, 1, 3, 8))
    queries = [rng.randint(rng.choice((0, 1)), max_queries) for _ in range(count)]
    queries[-1] = max_queries
    return Step(
        lengths,
        queries,
        group=rng.choice((1, 3, 4, 7, 8, 16, 32, 40)),
        kv_heads=rng.choice((1, 2, 8)),
        head_size=rng.choice((64, 128, 256)),
        dtype=rng.choice(("nvfp4", "nvfp4", "fp8")),
        window=rng.choice((None, None, 1, rng.randint(2, 300), rng.randint(300, 5000))),
        batch_invariant=rng.random() < 0.2,
        capability=rng.choice((80, 89, 90, 100)),
        multiprocessors=rng.choice((1, 3, 16, 82, 132)),
    )


@contextmanager
def on_host(
    step: Step,
    attention: bool = False,
    late: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Iterator[list[tuple[str, Any]]]:
    """Let the launcher's kernels run on the CPU.

    Args:
        step: gives the GPU that the launcher finds.
        attention: whether the attention kernel runs, too.
        late: memory that the kernel before it is still writing, see `cuda_on_host.launch`.

    Yields:
        What is launched: names of kernels and their parameters.
    """
    launched: list[tuple[str, Any]] = []

    def load(name: str, options: Any, functions: Any, device: Any) -> dict[str, Any]:
        if not name.endswith(("/decode.cu", "/decode_wgmma.cu")):
            library = cuda_on_host.build(name, {k: v for k, v in options if k in _MERGE_MACROS})
        elif attention:
            library = cuda_on_host.build(name, dict(options), capability=step.capability)
        else:
            return {"decode": ("decode", None, 0)}
        return {entry: (entry, getattr(library, entry), size) for entry, size in functions}

    def launch(kernel: Any, grid: int, threads: int, arguments: Any, **_: Any) -> None:
        name, function, size = kernel
        launched.append((name, arguments[0]))
        if function is not None:
            own = late if name == "decode" else None
            cuda_on_host.launch(function, grid, threads, *arguments, shared_bytes=size, late=own)

    cuda._kernels.cache_clear()
    with (
        patch.object(nvrtc, "load", load),
        patch.object(nvrtc, "launch", launch),
        patch.object(plans, "compute_capability_of_gpu", lambda device: step.capability),
        patch.object(plans, "num_sms", lambda device: step.multiprocessors),
        cuda_on_host.tensor_maps_on_host(),
    ):
        yield launched
    cuda._kernels.cache_clear()


def inputs_of(step: Step, **changes: Any) -> AttentionInputs:
    """Inputs for a plan of the step; tensors that plans do not read are on the meta device."""
    heads, max_pages = step.kv_heads * step.group, -(-max(step.lengths) // step.block_size)
    fields: dict[str, Any] = {
        "query": torch.zeros(step.starts[-1] + step.padding, heads, step.head_size, device="meta"),
        "pages": torch.zeros(1, step.layout.page_bytes, dtype=torch.uint8),
        "layout": step.layout,
        "query_start_loc": torch.tensor(step.starts, dtype=torch.int32),
        "seq_lens": torch.tensor(step.lengths, dtype=torch.int32),
        "block_tables": torch.zeros(len(step.lengths), max_pages, dtype=torch.int32, device="meta"),
        "scale": 1.0,
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
        "sliding_window": step.window,
        "sinks": None,
        "softcap": None,
        "batch_invariant": step.batch_invariant,
        "given_out": None,
        "lse": None,
        "plans": AttentionPlans(),
    }
    return AttentionInputs(**{**fields, **changes})


def make_plan(step: Step, recipe: RecipeVariant = NO_RECIPE) -> DecodePlan:
    """The plan by the launcher."""
    return plans.make_plan(inputs_of(step), recipe)


class Table(NamedTuple):
    """The parts of `DecodePlan.data` (`attention/decode/work.cuh`)."""

    span: int
    units: int
    lead: int
    """Positions before a work item's tiles."""
    aligned: bool
    items: int
    token_records: np.ndarray
    """`[tokens, 8]`: first item of its sequence, where that begins, positions from one of them to
    the next, number of tiles, first query token, and three ints of padding."""
    unit_records: np.ndarray
    """`[units that fit, 12]`: a work item, its index, and three ints of padding."""
    item_records: np.ndarray
    """`[items that fit, 8]`: begin, sequence, column tile, first tile, number of tiles, length,
    first query token, number of query tokens."""


def read(plan: DecodePlan, num_tokens: int) -> Table:
    data, view = plan.data.numpy(), plan.view
    units = data[view.units_offset : view.items_offset]
    span, number_of_units, signed_lead, items = data[:4].tolist()
    return Table(
        span,
        number_of_units,
        abs(signed_lead),
        signed_lead <= 0,
        items,
        data[4 : 4 + 8 * num_tokens].reshape(-1, 8),
        units[: len(units) // 12 * 12].reshape(-1, 12),
        data[view.items_offset :].reshape(-1, 8),
    )


def shares(table: Table) -> list[Share]:
    """The shares of all units: each starts in its work item and follows the line."""
    found = []
    items = table.item_records.tolist()
    for unit in range(table.units):
        begin, end = unit * table.span, (unit + 1) * table.span
        index = int(table.unit_records[unit, 8])
        while True:
            start, _, _, first_tile, num_tiles = items[index][:5]
            start += table.lead
            first, stop = max(0, begin - start), min(num_tiles, end - start)
            if first < stop:
                found.append(Share(unit, index, first_tile + first, first_tile + stop))
            index += 1
            # Aligned plans give a unit one work item.
            if table.aligned or index == table.items or items[index][0] >= end:
                break
    return found


def alone(step: Step, seq: int) -> Step:
    """The step with one of its sequences only."""
    return replace(step, lengths=[step.lengths[seq]], queries=[step.queries[seq]])
