"""Attention in CUDA graphs, the same for all backends that can be captured."""

from typing import Any

import torch

from attention.cases import Case
from halfbyte.attention import paged_attention


def assert_graph_follows_lengths(case: Case, scales_on: str = "cuda", **options: Any) -> None:
    """Replays of a captured call equal eager calls bit for bit, also after lengths change.

    Args:
        case: of head size 128; its lengths, shorter ones and no tokens at all are replayed.
        scales_on: device of the global scales.
        options: of `paged_attention`.
    """
    arguments = case.arguments("cuda")
    for name in ("k_scale", "v_scale"):
        arguments[name] = torch.tensor(arguments[name], device=scales_on)
    query, pages = case.query.cuda(), case.pages.cuda()
    out = torch.zeros(*query.shape[:2], 128, dtype=query.dtype, device="cuda")

    def step() -> None:
        paged_attention(query, pages, out=out, **options, **arguments)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in (
        case.seq_lens,
        [max(1, n - 1) for n in case.seq_lens],
        [min(5, n) for n in case.seq_lens],
        [0] * len(case.seq_lens),
    ):
        arguments["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(out, replayed)
    assert not out.any()
