"""Transformed queries for recipes: interpreted on a CPU, compiled, run on a GPU."""

from typing import Any

import pytest
import torch

from attention.cases import TRANSFORM_CASES, Case, make_case
from attention.prefill.dense_cases import inputs_of
from halfbyte.attention.queries import QueryPositions
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout
from halfbyte.numerics.hadamard import hadamard
from kvcache.transforms import on

pytest.importorskip("triton")

from slow import CAPABILITIES
from triton_compiler import SHARED_BYTES, compile_kernel
from triton_interpreter import interpreted

NAMES = ["d128", "d96", "several-queries", "window", "sinks-softcap", "mqa-32", "float32"]


def test_positions_of_queries() -> None:
    """Two kinds of padding: a sequence shorter than its queries, tokens after the last sequence."""
    starts = torch.tensor([0, 1, 1, 4, 6], dtype=torch.int32)
    lengths = torch.tensor([7, 3, 3, 1], dtype=torch.int32)
    sequences, positions = QueryPositions.of(starts, lengths, 8)
    assert sequences.tolist() == [0, 2, 2, 2, -1, 3, -1, -1]
    assert positions.tolist() == [6, 0, 1, 2, -1, 0, -1, -1]
    assert QueryPositions.of(starts[:1], lengths[:0], 2).sequences.tolist() == [-1, -1]


def assert_transformed(transform_queries: Any, case: Case, device: str) -> None:
    """Compare with float64.

    Args:
        transform_queries: as that of `queries.launcher`; called with the scale 0.25.
    """
    transform: KVTransform = case.options["transform"]
    inputs = inputs_of(case, device)
    query, bias, scores, indices, values, segment = (
        x.cpu() if isinstance(x, torch.Tensor) else x for x in transform_queries(inputs, 0.25)
    )
    assert segment == transform.segment
    assert transform.first_values is not None
    assert torch.equal(values, transform.first_values)
    # Tensor cores may round sums differently.
    last_place = torch.finfo(query.dtype).eps * hadamard(case.query.float()).abs().amax()
    distance = (query.float() - hadamard(case.query.float())).abs().max()
    assert distance <= max(float(last_place), 1e-5)
    kv_heads = case.layout.num_kv_heads
    heads = torch.arange(case.query.shape[1]) // (case.query.shape[1] // kv_heads)
    window = case.options.get("sliding_window") or 10**9
    token = 0
    for i, (n, length, slots) in enumerate(
        zip(case.query_lens, case.seq_lens, case.slots, strict=True)
    ):
        knows = i % 2 == 0  # as `make_case` writes them, sequences of no token left out
        for position in range(length - n, length):
            if position < 0:  # a sequence shorter than its queries
                assert (scores[token] == -torch.inf).all()
                token += 1
                continue
            q = case.query[token].double()
            first = max(0, position - window + 1)
            means = transform.means(torch.arange(first, position + 1))
            assert means is not None
            expected = 0.25 * torch.einsum("hd,thd->ht", q, means[:, heads].double())
            found = bias[token][:, torch.arange(first, position + 1) // segment]
            sizes = torch.einsum("hd,thd->ht", q.abs(), means[:, heads].double().abs())
            assert ((found - expected).abs() <= 2.0**-18 * 0.25 * sizes).all()
            sees = first == 0 and _is_marked(case, slots)
            assert (indices[token] >= 0).all() == sees
            if sees:
                assert knows
                keys = transform.first_keys[indices[token].long(), heads]  # type: ignore[index]
                score = (q * keys.double()).sum(1) * case.layout.head_size**-0.5
                if cap := case.options.get("softcap"):
                    score = cap * torch.tanh(score / cap)
                logits = scores[token].double() * torch.log(torch.tensor(2.0)).double()
                torch.testing.assert_close(logits, score, rtol=1e-5, atol=1e-5)
            else:
                assert (scores[token] == -torch.inf).all()
            token += 1


def _is_marked(case: Any, slots: torch.Tensor) -> bool:
    views = case.layout.views(case.pages)
    page, offset = slots[0] // case.layout.block_size, slots[0] % case.layout.block_size
    return bool((views.k_scale[page, offset, :, 0] == 0xFF).all())


@pytest.mark.parametrize("name", NAMES)
def test_queries_in_the_interpreter(name: str) -> None:
    transform_queries = interpreted("halfbyte.attention.queries.launcher").transform_queries
    assert_transformed(transform_queries, make_case(**TRANSFORM_CASES[name]), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_queries_on_a_gpu(name: str) -> None:
    from halfbyte.attention.queries.launcher import transform_queries

    assert_transformed(transform_queries, make_case(**TRANSFORM_CASES[name]), "cuda")


@pytest.mark.gpu
def test_rows_past_the_large_tile_on_a_gpu() -> None:
    """A batch large enough for the large tile has the results of single tokens."""
    from halfbyte.attention.queries.launcher import transform_queries

    lengths = tuple(range(3, 403, 4))
    case = make_case(head_size=128, transform={}, query_lens=(1,) * 100, seq_lens=lengths, group=8)
    inputs = inputs_of(case, "cuda")
    whole = transform_queries(inputs, 1.0)
    for token in (0, 57, 99):
        alone = transform_queries(inputs, 1.0, slice(token, token + 1))
        assert torch.equal(alone.query[0], whole.query[token])
        segments = lengths[token] // alone.segment + 1
        assert alone.bias is not None
        assert whole.bias is not None
        torch.testing.assert_close(alone.bias[0, :, :segments], whole.bias[token, :, :segments])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_kernel_compiles(head_size: int, capability: int) -> None:
    import triton.language as tl

    from halfbyte.attention.queries import launcher
    from halfbyte.attention.queries.kernel import transform_kernel
    from halfbyte.kernels.formats.kv_tiles import side_geometry

    rows, segments, warps = launcher._LARGE_TILE
    layout = PageLayout("nvfp4_4over6", "nvfp4", head_size, None, 8, 16)
    floats = ("cos", "sin", "low_mean", "high_mean", "bias", "first_scores")
    usage = compile_kernel(
        transform_kernel,
        {
            **dict.fromkeys(("query", "first_keys", "rotated"), "*bf16"),
            **dict.fromkeys(("sequences", "tables", "low", "high", "first_indices"), "*i32"),
            **dict.fromkeys(floats, "*fp32"),
            **dict.fromkeys(("scale", "bias_scale", "cap"), "fp32"),
            "positions": "*i64",
            "pages": "*u8",
        },
        {
            "k": side_geometry(layout, "k"),
            "heads": 32,
            "group": 4,
            "padded": head_size,
            "block": head_size,
            "norm": 0.125,
            "operand": tl.bfloat16,
            "pairs": head_size // 2,
            "segment": 64,
            "knows_first": True,
            "mark": 255,
            "windowed": True,
            "capped": True,
            "rows": rows,
            "segments": segments,
        },
        capability,
        num_warps=warps,
        num_stages=launcher._STAGES,
    )
    assert usage.shared <= SHARED_BYTES[capability] // 2
    assert usage.stack <= 128


def test_a_transform_on_another_device_has_its_tables_there() -> None:
    transform = make_case(head_size=64, transform={}).options["transform"]
    assert on(transform, "cpu").pair_tables.low.device == transform.mean.device
