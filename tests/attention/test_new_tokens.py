"""`paged_attention` that stores the step's tokens first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from attention.cases import Case, assert_close_to_exact, make_case
from halfbyte.attention import AttentionPlans, paged_attention
from halfbyte.elementwise import rotary_embedding
from halfbyte.kvcache import NewTokens
from halfbyte.kvcache.recent import RecentInputs, RingSlots

RECIPE: dict[str, Any] = {"transform": {"segment": 64}}


class Step(NamedTuple):
    """A case whose new tokens are not in the pages yet."""

    case: Case
    new: NewTokens
    pages: torch.Tensor
    """Of the case, with NaN in the new tokens' slots."""


def make_step(**options: Any) -> Step:
    """The queries' tokens are the new ones."""
    case = make_case(**options)
    rows, slots, positions, begin = [], [], [], 0
    for queries, length, own in zip(case.query_lens, case.seq_lens, case.slots, strict=True):
        rows.append(torch.arange(begin + length - queries, begin + length))
        slots.append(own[length - queries :])
        positions.append(torch.arange(length - queries, length))
        begin += length
    at = torch.cat(slots)
    new = NewTokens(
        case.key[torch.cat(rows)].to(case.query.dtype),
        case.value[torch.cat(rows)].to(case.query.dtype),
        at,
        torch.cat(positions) if "transform" in case.options else None,
    )
    # Rounded to the query's dtype, which a model's K and V have.
    new.store(case.pages, case.layout, case.k_scale, case.v_scale, case.options.get("transform"))
    pages = case.pages.clone()
    for view in case.layout.views(pages):
        if view is not None:
            nan = 0xFF if view.dtype == torch.uint8 else torch.nan
            view[at // case.layout.block_size, at % case.layout.block_size] = nan
    return Step(case, new, pages)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    "options",
    [{}, {"k_dtype": "fp8", "query_lens": (1, 1), "seq_lens": (9, 40)}, RECIPE],
    ids=["prompts-and-decode", "fp8", "recipe"],
)
def test_new_tokens_are_stored_first(options: dict[str, Any], backend: str | None) -> None:
    case, new, pages = make_step(**options)
    arguments = {**case.arguments(), "backend": backend}
    expected = paged_attention(case.query, case.pages, **arguments)
    out = paged_attention(case.query, pages, new=new, **arguments)
    assert torch.equal(out, expected)
    assert torch.equal(pages, case.pages)


def test_no_new_tokens() -> None:
    case, new, _ = make_step()
    none = NewTokens(new.key[:0], new.value[:0], new.slot_mapping[:0])
    expected = paged_attention(case.query, case.pages, **case.arguments())
    assert torch.equal(
        paged_attention(case.query, case.pages, new=none, **case.arguments()), expected
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: {"query": step.case.query[:, :3]}, "query: 3 heads"),
        (lambda step: {"new": step.new._replace(key=step.new.key[:, :1])}, "key: expected"),
    ],
    ids=["query", "key"],
)
def test_what_does_not_fit_changes_no_page(
    change: Callable[[Step], dict[str, Any]], message: str
) -> None:
    step = make_step()
    before = step.pages.clone()
    arguments = {"query": step.case.query, "new": step.new, **step.case.arguments(), **change(step)}
    with pytest.raises(ValueError, match=message):
        paged_attention(pages=step.pages, **arguments)
    assert torch.equal(step.pages, before)


_LONG: dict[str, Any] = {
    "kv_heads": 4,
    "query_lens": (1,) * 24,
    "seq_lens": tuple(range(66, 1266, 50)),
}
_DRAFTS = {**_LONG, "query_lens": (4,) * 24}
ON_GPU: dict[str, dict[str, Any]] = {
    "plain": {"head_size": 128, **_LONG},
    "drafts": {"head_size": 128, **_DRAFTS},
    "fp8": {"k_dtype": "fp8", "head_size": 128, **_LONG},
    "bfloat16": {"k_dtype": "bfloat16", "head_size": 64, **_LONG},
    "recipe": {"head_size": 128, **RECIPE, **_LONG},
    "recent": {"head_size": 128, "recent": 64, **RECIPE, **_LONG},
    "recent-drafts": {"head_size": 128, "recent": 64, **RECIPE, **_DRAFTS},
    "recent-of-64": {"head_size": 64, "group": 8, "recent": 64, **RECIPE, **_LONG},
    "recent-of-256": {"head_size": 256, "recent": 64, **RECIPE, **_LONG},
    "recent-and-many-queries": {
        "head_size": 128,
        "recent": 64,
        **RECIPE,
        "kv_heads": 4,
        "query_lens": (70, *(1,) * 60, 70),
        "seq_lens": (300, *range(66, 666, 10), 700),
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_graphs_read_no_token_that_is_still_being_stored(name: str) -> None:
    """Layers of a captured step, whose new slots have NaN before every replay.

    As in a model, layers get q, K and V in memory that others use, too, and q and K come from a
    kernel that lets the store start early: a rotary embedding, here by angles of 0.
    """
    case, new, pages = make_step(**ON_GPU[name])
    arguments = case.arguments("cuda")
    for side in ("k_scale", "v_scale"):
        arguments[side] = torch.tensor(arguments[side], device="cuda")
    recent = arguments.pop("recent", None)
    before = pages.cuda()
    slots = new.slot_mapping.cuda()
    positions = None if new.positions is None else new.positions.cuda()
    kept = None if recent is None else ring_places(case, new, recent.keys.shape[2])
    layers = [Layer.of(case, new, before, recent, seed) for seed in range(6)]
    unrotated, first_key, value = (torch.empty_like(x) for x in layers[0].inputs)
    size = case.layout.head_size
    angles = torch.cat([torch.ones(1, size // 2), torch.zeros(1, size // 2)], dim=1).to(unrotated)
    origin = torch.zeros(len(unrotated), dtype=torch.int64, device="cuda")

    def tokens(layer: Layer, key: torch.Tensor) -> NewTokens:
        ring = None if kept is None or layer.rings is None else RingSlots(*layer.rings, *kept)
        return NewTokens(key, value, slots, positions, ring)

    def options(layer: Layer, key: torch.Tensor) -> dict[str, Any]:
        if layer.rings is None:
            return arguments
        own = RecentInputs(recent.tokens, *layer.rings, recent.entries, key, value)
        return {**arguments, "recent": own}

    def query_and_key(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        for buffer, x in zip((unrotated, first_key, value), layer.inputs, strict=True):
            buffer.copy_(x)
        rotated = rotary_embedding(
            origin, unrotated.flatten(1), first_key.flatten(1), angles, size, False
        )
        return rotated[0].view_as(unrotated), rotated[1].view_as(first_key)

    expected = []
    for layer in layers:
        query, key = query_and_key(layer)
        more = options(layer, key)
        tokens(layer, key).store(
            layer.pages, case.layout, more["k_scale"], more["v_scale"], more.get("transform")
        )
        out = paged_attention(query, layer.pages, backend="cuda", **more)
        expected.append([out, layer.pages.clone(), *(x.clone() for x in layer.rings or ())])
    assert_close_to_exact(expected[0][0].cpu(), case)

    def run() -> None:
        plans = AttentionPlans()
        for layer in layers:
            query, key = query_and_key(layer)
            paged_attention(
                *(query, layer.pages),
                new=tokens(layer, key),
                out=layer.out,
                plans=plans,
                backend="cuda",
                **options(layer, key),
            )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(30):
        for layer in layers:
            layer.forget(before)
        graph.replay()
        for layer, wanted in zip(layers, expected, strict=True):
            for x, y in zip((layer.out, layer.pages, *(layer.rings or ())), wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


class Layer(NamedTuple):
    """A layer of the test above, with values of its own."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """q, K and V of the step."""
    pages: torch.Tensor
    out: torch.Tensor
    rings: tuple[torch.Tensor, torch.Tensor] | None
    rings_before: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(
        cls, case: Case, new: NewTokens, before: torch.Tensor, recent: Any, seed: int
    ) -> "Layer":
        """The first layer has the case's values, others scaled ones."""
        factor = 1.0 + seed / 8
        inputs = tuple((factor * x).cuda() for x in (case.query, new.key, new.value))
        rings = None if recent is None else tuple(x.clone() for x in (recent.keys, recent.values))
        copies = None if rings is None else tuple(x.clone() for x in rings)
        shape = (*case.query.shape[:2], case.layout.head_size_v)
        out = torch.zeros(shape, dtype=case.query.dtype, device="cuda")
        return cls(inputs, before.clone(), out, rings, copies)  # type: ignore[arg-type]

    def forget(self, before: torch.Tensor) -> None:
        """As before the step."""
        self.pages.copy_(before)
        self.out.zero_()
        for ring, x in zip(self.rings or (), self.rings_before or (), strict=True):
            ring.copy_(x)


def ring_places(case: Case, new: NewTokens, ring: int) -> tuple[torch.Tensor, ...] | None:
    """Rows, entries and slots of the new tokens in rings; None if there are too many of them."""
    recent = case.options["recent"]
    if max(case.query_lens) > ring - recent.tokens + 1:
        return None
    assert new.positions is not None
    owners = recent.entries.long().repeat_interleave(torch.tensor(case.query_lens))
    rows = torch.arange(len(owners))
    return rows.cuda(), owners.cuda(), (new.positions % ring).cuda()
