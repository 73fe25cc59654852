"""`paged_attention` that stores the step's tokens first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from attention.cases import Case, assert_close_to_exact, make_case
from halfbyte.attention import AttentionPlans, paged_attention
from halfbyte.kvcache import NewTokens

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
    """Layers of a captured step, whose new slots have NaN before every replay."""
    case, new, pages = make_step(**ON_GPU[name])
    arguments = case.arguments("cuda")
    for side in ("k_scale", "v_scale"):
        arguments[side] = torch.tensor(arguments[side], device="cuda")
    positions = None if new.positions is None else new.positions.cuda()
    new = NewTokens(new.key.cuda(), new.value.cuda(), new.slot_mapping.cuda(), positions)
    query, before = case.query.cuda(), pages.cuda()
    expected = paged_attention(query, case.pages.cuda(), backend="cuda", **arguments)
    assert_close_to_exact(expected.cpu(), case)
    layers = [before.clone() for _ in range(6)]
    outs = [torch.zeros_like(expected) for _ in layers]

    def run() -> None:
        plans = AttentionPlans()
        for own, out in zip(layers, outs, strict=True):
            paged_attention(
                *(query, own), new=new, out=out, plans=plans, backend="cuda", **arguments
            )

    def forget() -> None:
        for own, out in zip(layers, outs, strict=True):
            own.copy_(before)
            out.zero_()

    forget()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(30):
        forget()
        graph.replay()
        for own, out in zip(layers, outs, strict=True):
            assert torch.equal(out, expected)
            assert torch.equal(own, case.pages.cuda())
