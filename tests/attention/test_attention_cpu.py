"""C++ attention on every instruction set that this CPU has."""

import logging
import math
from typing import Any

import pytest
import torch

from attention.cases import (
    DECODE_CASES,
    RECENT_CASES,
    TRANSFORM_CASES,
    Case,
    assert_close_to_exact,
    make_case,
)
from attention.cpu_formats import FORMATS
from halfbyte.attention import ATTENTION_BACKENDS, paged_attention
from halfbyte.attention import cpu as backend
from halfbyte.dispatch import CPU
from halfbyte.kernels.cpu import library as cpu_library
from halfbyte.kernels.cpu.library import library
from halfbyte.kvcache import (
    read_tokens,
    reshape_and_cache,
)
from halfbyte.kvcache.store.registry import select_store
from halfbyte.layouts import PageLayout

needs_library = pytest.mark.skipif(library() is None, reason="built without a C++ compiler")
MORE_CASES: dict[str, dict[str, Any]] = {
    "d16": {"head_size": 16, "query_lens": (1, 1), "seq_lens": (33, 7)},
    "d80": {"head_size": 80, "query_lens": (1, 2), "seq_lens": (33, 700)},
    "d192-v96": {"head_size": 192, "head_size_v": 96, "query_lens": (1,), "seq_lens": (77,)},
    "d512-v48": {"head_size": 512, "head_size_v": 48, "query_lens": (1,), "seq_lens": (600,)},
    "page-5": {"head_size": 64, "block_size": 5, "query_lens": (3,), "seq_lens": (91,)},
    "heads-128": {
        "head_size": 64,
        "kv_heads": 1,
        "group": 128,
        "query_lens": (1, 2),
        "seq_lens": (1100, 30),
    },
    "prefill": {"head_size": 64, "query_lens": (150, 1, 70), "seq_lens": (150, 600, 1030)},
    "prefill-window-softcap-sinks": {
        "head_size": 96,
        "group": 3,
        "sliding_window": 50,
        "softcap": 2.0,
        "sinks": True,
        "query_lens": (131, 40),
        "seq_lens": (700, 40),
    },
    "more-queries-than-tokens": {"head_size": 32, "query_lens": (90,), "seq_lens": (35,)},
    "rows-17": {"head_size": 128, "group": 17, "query_lens": (1,), "seq_lens": (300,)},
    "sm100": {
        "head_size": 128,
        "v_scale_layout": "sm100",
        "query_lens": (1, 30),
        "seq_lens": (600, 70),
    },
}
CASES = {**DECODE_CASES, **MORE_CASES}


def assert_exact(case: Case, atol: float = 2e-6, backend: str = "cpu", **arguments: Any) -> None:
    out, lse = paged_attention(
        case.query, case.pages, backend=backend, return_lse=True, **case.arguments(), **arguments
    )
    exact, exact_lse = case.expected()
    torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=atol)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@needs_library
@pytest.mark.parametrize("name", CASES)
def test_cpu_attention(level: str, name: str) -> None:
    assert_exact(make_case(**{**CASES[name], "query_dtype": torch.float32}))


@needs_library
@pytest.mark.parametrize("name", TRANSFORM_CASES)
def test_cpu_attention_to_k_that_a_recipe_changed(level: str, name: str) -> None:
    case = make_case(**{**TRANSFORM_CASES[name], "query_dtype": torch.float32})
    assert_exact(case, atol=1e-5)  # means are large, and cancel


@needs_library
@pytest.mark.parametrize("name", RECENT_CASES)
def test_cpu_attention_to_the_last_tokens_as_they_are(level: str, name: str) -> None:
    case = make_case(**{**RECENT_CASES[name], "query_dtype": torch.float32})
    assert_exact(case, atol=1e-5)
    case = make_case(**RECENT_CASES[name])
    out = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
    assert_close_to_exact(out, case)


@pytest.mark.parametrize("name", RECENT_CASES)
def test_reference_to_the_last_tokens_as_they_are(name: str) -> None:
    case = make_case(**{**RECENT_CASES[name], "query_dtype": torch.float32})
    assert_exact(case, atol=1e-5, backend="reference")


@needs_library
@pytest.mark.parametrize("name", TRANSFORM_CASES)
def test_cpu_attention_by_a_recipe_of_bfloat16_queries(level: str, name: str) -> None:
    """bfloat16 queries are rounded again after the rotation."""
    case = make_case(**{**TRANSFORM_CASES[name], "query_dtype": torch.bfloat16})
    out = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
    assert_close_to_exact(out, case)


@needs_library
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("name", FORMATS)
def test_cpu_attention_on_every_format(level: str, name: str, order: str) -> None:
    lengths = {"query_lens": (1, 40, 5, 1), "seq_lens": (600, 40, 77, 17)}
    assert_exact(make_case(**{**FORMATS[name], **lengths}, order=order, query_dtype=torch.float32))


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["d128", "d80", "rows-17", "k64-v128", "prefill", "page-5"])
def test_cpu_attention_rounds_once(level: str, name: str, dtype: torch.dtype) -> None:
    case = make_case(**{**CASES[name], "query_dtype": dtype})
    out = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
    exact, _ = case.expected()
    torch.testing.assert_close(out, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    # Into float32, the queries being exact: as close as with float32 queries.
    assert_exact(case, out=torch.empty(exact.shape))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("octaves", [4, 12, 40, 140])
@pytest.mark.parametrize(("head_size", "group"), [(16, 1), (80, 6), (128, 3), (272, 4)])
def test_cpu_attention_of_small_elements_beside_large_ones(
    level: str, head_size: int, group: int, octaves: int, dtype: torch.dtype
) -> None:
    # The LSE of one token is its score.
    case = make_case(
        head_size=head_size,
        group=group,
        query_lens=(1,) * 40,
        seq_lens=(1,) * 40,
        query_dtype=torch.float32,
    )
    case.query *= torch.exp2(-octaves * torch.rand(case.query.shape))
    case.query[3] = 0
    case.query[4:8, :, 5:] = 0
    case.query = case.query.to(dtype)
    _, lse = paged_attention(
        case.query, case.pages, backend="cpu", return_lse=True, **case.arguments()
    )
    _, exact = case.expected()
    key, _ = read_tokens(
        case.pages, torch.cat(case.slots), case.layout, case.k_scale, case.v_scale, torch.float64
    )
    products = case.query.double() * key.repeat_interleave(group, 1)
    rounding = 4 * torch.finfo(torch.float32).eps * products.abs().sum(-1) * head_size**-0.5
    assert (lse.double() - exact).abs().le(rounding + 1e-37).all()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_cpu_attention_keeps_what_is_not_finite_in_its_row(
    level: str, dtype: torch.dtype, value: float
) -> None:
    case = make_case(head_size=128, query_lens=(2,), seq_lens=(70,), query_dtype=dtype)
    before = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
    case.query[1, 2, 100] = value
    after = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
    assert after[1, 2].isnan().all()
    after[1, 2] = before[1, 2]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@needs_library
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_attention_takes_any_strides(level: str, query_dtype: torch.dtype) -> None:
    case = make_case(query_lens=(30, 1), seq_lens=(40, 90), query_dtype=query_dtype)
    exact, _ = case.expected()
    before, query = case.query, case.query.transpose(0, 1).contiguous().transpose(0, 1)
    outs = {
        "token stride": torch.full((*exact.shape[:2], 100), 7.0)[:, :, 9:73],
        "element stride": torch.full((*exact.shape, 2), 7.0)[..., 1],
        "float64": torch.full(exact.shape, 7.0, dtype=torch.float64),
    }
    for out in outs.values():
        for q in (before, query, query.double(), query.repeat_interleave(2, dim=-1)[..., ::2]):
            case.query = q
            assert_exact(case, out=out.zero_())
    assert outs["token stride"]._base is not None
    assert (outs["token stride"]._base[:, :, 73:] == 7).all()


@needs_library
@pytest.mark.parametrize("head_size", [64, 128])
def test_cpu_attention_reads_every_code_and_scale(level: str, head_size: int) -> None:
    # A sequence of one token gives back its V, whatever the score.
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 1, 1)
    pages = torch.zeros(256 * 16, layout.page_bytes, dtype=torch.uint8)
    views = layout.views(pages)
    assert views.v_scale is not None
    assert views.k_scale is not None
    numbers = torch.arange(len(pages))
    views.v_data[:] = ((numbers // 256) * 17)[:, None, None, None].byte()
    views.v_data[..., ::3] ^= 0x5A
    views.v_scale[:] = ((numbers[:, None] + torch.arange(head_size // 16)) % 256)[:, None, None]
    arguments: dict[str, Any] = {
        "layout": layout,
        "query_start_loc": torch.arange(len(pages) + 1, dtype=torch.int32),
        "seq_lens": torch.ones(len(pages), dtype=torch.int32),
        "block_tables": numbers[:, None].int(),
        "scale": 1.0,
        "k_scale": 0.37,
        "v_scale": 0.37,
    }
    query = torch.zeros(len(pages), 3, head_size)
    out = paged_attention(query, pages, backend="cpu", **arguments)
    _, value = read_tokens(pages, numbers, layout, 0.37, 0.37)
    torch.testing.assert_close(out, value.expand(-1, 3, -1), rtol=0, atol=0, equal_nan=True)
    # The same bytes as K: with a query of one element, the score is that element.
    views.k_data.copy_(views.v_data)
    views.k_scale.copy_(views.v_scale)
    views.v_data.zero_()
    for element in (0, 1, 17, head_size - 1):
        query.zero_()
        query[..., element] = 1
        for dtype in (torch.float32, torch.bfloat16):
            _, lse = paged_attention(
                query.to(dtype), pages, backend="cpu", return_lse=True, **arguments
            )
            clean = ~value.isnan().any(-1)
            expected = value[..., element].expand(-1, 3)
            torch.testing.assert_close(lse[clean[:, 0]], expected[clean[:, 0]], rtol=1e-6, atol=0)
            assert lse[~clean[:, 0]].isnan().all()


@needs_library
def test_cpu_attention_marks_nan_blocks(level: str) -> None:
    case = make_case(head_size=128, query_lens=(1, 1), seq_lens=(40, 40))
    slot = int(case.slots[1][3])
    v_scale = case.layout.views(case.pages).v_scale
    assert v_scale is not None
    v_scale[slot // 16, slot % 16, 0, 0] = 0x7F
    out = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
    assert not out[0].isnan().any()
    assert out[1, :4, :16].isnan().all()
    assert not out[1, :4, 16:].isnan().any()
    assert not out[1, 4:].isnan().any()
    k_scale = case.layout.views(case.pages).k_scale
    assert k_scale is not None
    k_scale[slot // 16, slot % 16, 1, 3] = 0xFF
    out, lse = paged_attention(
        case.query, case.pages, backend="cpu", return_lse=True, **case.arguments()
    )
    assert not out[0].isnan().any()
    assert out[1, 4:].isnan().all()
    assert lse[1, 4:].isnan().all()
    assert not lse[1, :4].isnan().any()


@needs_library
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("length", [2**31 - 1, 2**31 - 512, 2**31 - 600])
def test_cpu_attention_at_lengths_up_to_the_largest_int(length: int, queries: int) -> None:
    """A window at the end of a sequence whose table repeats one page; likewise a short sequence."""
    layout = PageLayout("nvfp4", "nvfp4", 32, None, 1, 4096)
    pages = torch.randint(
        0, 120, (1, layout.page_bytes), generator=torch.Generator().manual_seed(0)
    ).byte()
    query = torch.randn(queries, 2, 32, generator=torch.Generator().manual_seed(1))
    results = []
    for tokens in (length, 8192 + length % 4096):
        results.append(
            paged_attention(
                query,
                pages,
                layout=layout,
                query_start_loc=torch.tensor([0, queries], dtype=torch.int32),
                seq_lens=torch.tensor([tokens], dtype=torch.int32),
                block_tables=torch.zeros(1, -(-tokens // 4096), dtype=torch.int32),
                scale=0.2,
                k_scale=0.01,
                v_scale=0.01,
                sliding_window=20,
                backend="cpu",
            )
        )
    assert results[0].isfinite().all()
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


@needs_library
def test_the_kernel_is_chosen_for_all_work_on_the_cpu() -> None:
    verdicts = ATTENTION_BACKENDS.explain(compute_capability=CPU)
    assert next(verdict.name for verdict in verdicts if verdict.usable) == "cpu"
    for k_dtype, query_lens in (("nvfp4", (1, 1)), ("fp8", (30, 1)), ("mxfp4", (1, 20))):
        case = make_case(k_dtype=k_dtype, query_lens=query_lens, seq_lens=(40, 20))
        chosen = paged_attention(case.query, case.pages, **case.arguments())
        asked = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
        assert torch.equal(chosen, asked)


def test_without_the_library_the_reference_runs_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = make_case(query_dtype=torch.float32)
    for module in (backend, cpu_library):
        monkeypatch.setattr(module, "library", lambda: None)
    monkeypatch.setattr(cpu_library, "current_compute_capability", lambda: 0)
    cpu_library.warn_not_built.cache_clear()
    select_store.cache_clear()
    with caplog.at_level(logging.INFO, logger="halfbyte"):
        for block_size in (8, 16):
            layout = PageLayout("nvfp4", "nvfp4", 16, None, 1, block_size)
            pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
            key, slots = torch.zeros(1, 1, 16), torch.zeros(1, dtype=torch.int64)
            reshape_and_cache(key, key, pages, slots, layout, 1.0, 1.0)
            out = paged_attention(case.query, case.pages, **case.arguments())
    select_store.cache_clear()
    exact, _ = case.expected()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert [record.message for record in caplog.records] == [
        "the CPU kernels were not built (no C++ compiler?): the reference runs instead"
    ]
    with pytest.raises(ValueError, match="without a C\\+\\+ compiler"):
        paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
