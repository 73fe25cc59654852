from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from attention.cases import Case, assert_close_to_exact, make_case
from halfbyte.attention import (
    ATTENTION_BACKENDS,
    paged_attention,
)
from halfbyte.kvcache import KV_CACHE_QUANT_REGISTRY, reshape_and_cache

OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "window-longer-than-sequences": {"sliding_window": 1000},
    "window-of-one": {"sliding_window": 1},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "window-sinks-softcap": {"sliding_window": 20, "sinks": True, "softcap": 3.0},
}


@pytest.mark.parametrize("k_dtype", list(KV_CACHE_QUANT_REGISTRY))
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_paged_attention_every_dtype(k_dtype: str, query_dtype: torch.dtype) -> None:
    case = make_case(k_dtype=k_dtype, query_dtype=query_dtype)
    assert_close_to_exact(paged_attention(case.query, case.pages, **case.arguments()), case)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_paged_attention_options(options: dict) -> None:
    case = make_case(**options, query_dtype=torch.float32)
    out, lse = paged_attention(case.query, case.pages, **case.arguments(), return_lse=True)
    exact, exact_lse = case.expected()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        {"head_size": 128, "group": 1},
        {"head_size": 64, "group": 8, "kv_heads": 1},
        {"head_size": 96, "head_size_v": 32},
        {"head_size": 32, "head_size_v": 64, "order": "NHD"},
        {"head_size": 128, "v_scale_layout": "sm100"},
        {"head_size": 16, "block_size": 32},
        {"k_dtype": "fp8", "v_dtype": "nvfp4"},
        {"k_dtype": "nvfp4", "v_dtype": "bfloat16", "order": "NHD"},
        {"k_dtype": "bfloat16", "v_dtype": "mxfp4", "head_size_v": 128},
    ],
    ids=lambda shape: "-".join(f"{k}={v}" for k, v in shape.items()),
)
def test_paged_attention_shapes(shape: dict) -> None:
    case = make_case(**shape, query_dtype=torch.float32)
    out = paged_attention(case.query, case.pages, **case.arguments())
    exact, _ = case.expected()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_paged_attention_scale_as_tensor_equals_float() -> None:
    case = make_case()
    arguments = case.arguments()
    expected = paged_attention(case.query, case.pages, **arguments)
    arguments["k_scale"] = torch.tensor(arguments["k_scale"])
    arguments["v_scale"] = torch.tensor([arguments["v_scale"]])
    assert torch.equal(paged_attention(case.query, case.pages, **arguments), expected)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [((), ()), ((0, 2), (5, 2)), ((1, 1), (0, 3)), ((3,), (1,))],
    ids=["no-sequences", "no-queries-in-one", "empty-sequence", "more-queries-than-tokens"],
)
def test_paged_attention_edges(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
    case = make_case(query_lens=query_lens, seq_lens=seq_lens, query_dtype=torch.float32)
    out, lse = paged_attention(case.query, case.pages, **case.arguments(), return_lse=True)
    if not seq_lens:
        assert out.shape == (0, 8, 64)
        return
    exact, exact_lse = case.expected()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_paged_attention_row_does_not_depend_on_the_batch() -> None:
    case = make_case()
    arguments = case.arguments()
    together = paged_attention(case.query, case.pages, **arguments, batch_invariant=True)
    begin = 0
    for i, n in enumerate(case.query_lens):
        alone = paged_attention(
            case.query[begin : begin + n],
            case.pages,
            **{
                **arguments,
                "query_start_loc": torch.tensor([0, n], dtype=torch.int32),
                "seq_lens": arguments["seq_lens"][i : i + 1],
                "block_tables": arguments["block_tables"][i : i + 1],
            },
            batch_invariant=True,
        )
        assert torch.equal(alone, together[begin : begin + n])
        begin += n


def last_queries(case: Case, count: int, **options: Any) -> torch.Tensor:
    """The rows of a sequence's last queries only."""
    arguments = {
        **case.arguments(),
        "query_start_loc": torch.tensor([0, count], dtype=torch.int32),
        **options,
    }
    return paged_attention(case.query[-count:], case.pages, **arguments)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_do_not_depend_on_the_queries_that_come_with_them(backend: str) -> None:
    if not ATTENTION_BACKENDS.get(backend).is_supported()[0]:
        pytest.skip("was not built")
    case = make_case(query_lens=(20,), seq_lens=(77,), sliding_window=30)
    rows = {n: last_queries(case, n, backend=backend, batch_invariant=True) for n in (20, 7, 1)}
    for count, out in rows.items():
        assert torch.equal(out, rows[20][-count:])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_reference_does_not_see_a_hidden_nan(batch_invariant: bool) -> None:
    """NaN in later tokens, or before the window, has no effect."""
    case = make_case(k_dtype="bfloat16", query_lens=(20,), seq_lens=(40,), sliding_window=5)
    options = {"backend": "reference", "batch_invariant": batch_invariant}
    clean = last_queries(case, 20, **options)
    value = case.layout.views(case.pages).v_data
    page, offset = case.block_tables[0, 30 // 16], 30 % 16
    value[page, offset] = torch.nan
    found = last_queries(case, 20, **options)
    sees = [30 <= position < 30 + 5 for position in range(20, 40)]
    assert found.isnan().flatten(1).all(1).tolist() == sees
    assert found.isnan().flatten(1).any(1).tolist() == sees
    torch.testing.assert_close(found.nan_to_num(), clean * ~torch.tensor(sees)[:, None, None])


def test_paged_attention_reads_the_cache_and_only_the_cache() -> None:
    case = make_case()
    before = paged_attention(case.query, case.pages, **case.arguments())
    case.key.fill_(float("nan"))
    case.value.fill_(float("nan"))
    assert torch.equal(paged_attention(case.query, case.pages, **case.arguments()), before)


@pytest.mark.parametrize("region", ["k_data", "k_scale", "v_data", "v_scale"])
def test_paged_attention_sees_a_flipped_byte(region: str) -> None:
    case = make_case()
    before = paged_attention(case.query, case.pages, **case.arguments())
    slot = int(case.slots[1][20])
    view = getattr(case.layout.views(case.pages), region)
    view[slot // 16, slot % 16, 0, 0] ^= 0x12
    changed = paged_attention(case.query, case.pages, **case.arguments()) != before
    rows = changed.flatten(1).any(1)
    # Sequence 1 owns rows 1 to 5; other rows must not change.
    assert rows.tolist() == [False] + [True] * 5 + [False] * 18


def test_paged_attention_reads_the_current_chunk_from_pages() -> None:
    case = make_case(query_lens=(4,), seq_lens=(4,), query_dtype=torch.float32)
    before = paged_attention(case.query, case.pages, **case.arguments())
    reshape_and_cache(
        torch.zeros(1, 2, 64),
        torch.zeros(1, 2, 64),
        case.pages,
        case.slots[0][3:],
        case.layout,
        case.k_scale,
        case.v_scale,
    )
    after = paged_attention(case.query, case.pages, **case.arguments())
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3], after[3])


def test_paged_attention_writes_to_out() -> None:
    case = make_case()
    out = torch.empty(24, 8, 64, dtype=torch.bfloat16)
    result = paged_attention(case.query, case.pages, **case.arguments(), out=out)
    assert result is out
    assert torch.equal(out, paged_attention(case.query, case.pages, **case.arguments()))


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("window", [2**24, 2**31 - 2, 2**31 - 1, 2**32 + 5])
def test_windows_longer_than_any_sequence_hide_nothing(window: int, backend: str | None) -> None:
    case = make_case()
    arguments = {**case.arguments(), "backend": backend}
    whole = paged_attention(case.query, case.pages, **arguments)
    seen = paged_attention(case.query, case.pages, **arguments, sliding_window=window)
    torch.testing.assert_close(seen, whole)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_windows_on_a_sequence_shorter_than_its_queries(backend: str | None) -> None:
    case = make_case(query_lens=(8,), seq_lens=(8,))
    arguments = {**case.arguments(), "backend": backend}
    arguments["seq_lens"] = torch.tensor([1], dtype=torch.int32)
    whole = paged_attention(case.query, case.pages, **arguments)
    for window in (2**20, 2**31 - 8, 2**31 - 2):
        seen = paged_attention(case.query, case.pages, **arguments, sliding_window=window)
        assert torch.equal(seen, whole)


def test_paged_attention_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(query_dtype=torch.float32)
    whole = paged_attention(case.query, case.pages, **case.arguments())
    monkeypatch.setattr("halfbyte.attention.reference._MAX_SCORES", 8 * 40 * 2)
    blocks = paged_attention(case.query, case.pages, **case.arguments())
    torch.testing.assert_close(blocks, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tables": torch.zeros(4, 5)}, "block_tables: expected int32"),
        ({"block_tables": torch.zeros(4, 2, dtype=torch.int32)}, "pages needed"),
        ({"block_tables": torch.full((4, 5), 99, dtype=torch.int32)}, "page numbers"),
        ({"seq_lens": torch.tensor([1, 2, 3], dtype=torch.int32)}, "query_start_loc: expected"),
        ({"seq_lens": torch.tensor([1, -2, 3, 4], dtype=torch.int32)}, "seq_lens: expected"),
        ({"seq_lens": torch.tensor([1, 40, 77, 17])}, "seq_lens: expected int32"),
        ({"query_start_loc": torch.tensor([0, 1, 6, 7, 9], dtype=torch.int32)}, "to ascend"),
        ({"sinks": torch.zeros(3)}, "sinks: expected"),
        ({"sinks": torch.full((8,), torch.nan)}, "sinks: expected logits or -inf, got NaN"),
        ({"block_tables": torch.zeros((), dtype=torch.int32)}, "block_tables: expected int32"),
        ({"seq_lens": torch.ones(4, 1, dtype=torch.int32)}, "seq_lens: expected one dimension"),
        ({"sliding_window": 0}, "sliding_window: expected"),
        ({"sliding_window": 1.5}, "sliding_window: expected an integer"),
        ({"softcap": -1.0}, "softcap: expected"),
        ({"softcap": torch.inf}, "softcap: expected"),
        ({"softcap": torch.nan}, "softcap: expected"),
        ({"softcap": 1e-40}, "softcap: expected a number from 1e-30 to 1e30"),
        ({"softcap": 1e-300}, "softcap: expected a number from 1e-30 to 1e30"),
        ({"softcap": 3e38}, "softcap: expected a number from 1e-30 to 1e30"),
        ({"scale": torch.nan}, "scale: expected a finite number"),
        ({"k_scale": 0.0}, "k_scale: expected a positive finite number"),
        ({"v_scale": torch.inf}, "v_scale: expected a positive finite number"),
        ({"v_scale": None}, "v_scale: expected a positive finite number in float32, got None"),
        ({"k_scale": 1e-50}, "k_scale: expected a positive finite number"),
        ({"k_scale": torch.tensor(0.0)}, "k_scale: expected a positive finite number"),
        ({"v_scale": torch.tensor(-0.1)}, "v_scale: expected a positive finite number"),
        ({"v_scale": torch.tensor(torch.nan)}, "v_scale: expected a positive finite number"),
        ({"v_scale": torch.tensor(1)}, "v_scale: expected float32, got torch.int64"),
        ({"k_scale": torch.tensor(1.0).bfloat16()}, "k_scale: expected float32"),
        ({"scale": None}, "scale: expected a finite number in float32, got None"),
        ({"scale": 1e300}, "scale: expected a finite number in float32, got 1e"),
        ({"softcap": "50"}, "softcap: expected a finite number in float32, got '50'"),
        ({"softcap": 1e300}, "softcap: expected a finite number in float32, got 1e"),
        ({"softcap": 10**400}, "softcap: expected a finite number in float32, got 1000"),
        ({"layout": None}, "layout: expected a PageLayout, got NoneType"),
        ({"layout": "nvfp4"}, "layout: expected a PageLayout, got str"),
        ({"block_tables": [[0]]}, "block_tables: expected a tensor, got list"),
        ({"sinks": [0.0] * 8}, "sinks: expected a tensor, got list"),
        ({"seq_lens": None}, "seq_lens: expected a tensor, got NoneType"),
        ({"k_scale": torch.ones(2)}, r"k_scale: expected one element, got \(2,\)"),
        ({"out": torch.zeros(24, 8, 32)}, "out: expected"),
        ({"out": torch.zeros(1, 8, 64).expand(24, 8, 64)}, "out: expected elements that share"),
        ({"backend": "nonsense"}, "unknown 'nonsense'"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_paged_attention_refuses(change: dict, message: str) -> None:
    case = make_case()
    with pytest.raises(ValueError, match=message):
        paged_attention(case.query, case.pages, **{**case.arguments(), **change})


@pytest.mark.parametrize("backend", [None, "reference"])
def test_formats_without_a_global_scale_ignore_what_is_given(backend: str | None) -> None:
    case = make_case(k_dtype="bfloat16", v_dtype="mxfp4")
    arguments = {**case.arguments(), "backend": backend}
    plain = paged_attention(case.query, case.pages, **arguments)
    for scale in (None, 0.0, torch.ones(2)):
        given = {**arguments, "k_scale": scale, "v_scale": scale}
        assert torch.equal(paged_attention(case.query, case.pages, **given), plain)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_global_scale_may_be_any_number_or_scalar(backend: str | None) -> None:
    case = make_case()
    arguments = {**case.arguments(), "backend": backend}
    plain = paged_attention(case.query, case.pages, **arguments)
    for kind in (np.float32, np.array, Decimal, torch.tensor, lambda x: torch.tensor([x])):
        given = {**arguments, "k_scale": kind(case.k_scale), "v_scale": kind(case.v_scale)}
        assert torch.equal(paged_attention(case.query, case.pages, **given), plain)
    scales = {"scale": torch.tensor(0.25), "softcap": np.float32(30)}
    given = paged_attention(case.query, case.pages, **{**arguments, **scales})
    floats = {"scale": 0.25, "softcap": 30.0}
    assert torch.equal(given, paged_attention(case.query, case.pages, **{**arguments, **floats}))


def test_paged_attention_refuses_another_layout() -> None:
    case = make_case()
    with pytest.raises(ValueError, match="query: expected"):
        paged_attention(case.query[..., :32], case.pages, **case.arguments())
    with pytest.raises(ValueError, match=r"query: expected float .* got torch.float8"):
        paged_attention(case.query.to(torch.float8_e4m3fn), case.pages, **case.arguments())
    with pytest.raises(ValueError, match="not a multiple of 2 KV heads"):
        paged_attention(case.query[:, :7], case.pages, **case.arguments())
    with pytest.raises(ValueError, match="cannot hold"):
        paged_attention(case.query, case.pages[:, :100], **case.arguments())
