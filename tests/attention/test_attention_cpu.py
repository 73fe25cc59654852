"""The C++ decode kernel on every instruction set that this CPU has."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attention.cases import DECODE_CASES, make_case
from halfbyte.attention import ATTENTION_BACKENDS, paged_attention
from halfbyte.attention import cpu as backend
from halfbyte.kernels.decode_cpu import LEVELS, library, set_level

needs_library = pytest.mark.skipif(library() is None, reason="built without a C++ compiler")
MORE_CASES: dict[str, dict[str, Any]] = {
    "d16": {"head_size": 16, "query_lens": (1, 1), "seq_lens": (33, 7)},
    "d80": {"head_size": 80, "query_lens": (1, 2), "seq_lens": (33, 700)},
    "d512-v48": {"head_size": 512, "head_size_v": 48, "query_lens": (1,), "seq_lens": (600,)},
    "page-5": {"head_size": 64, "block_size": 5, "query_lens": (3,), "seq_lens": (91,)},
}
CASES = {**DECODE_CASES, **MORE_CASES}


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    if set_level(request.param) != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    set_level("avx512")


@needs_library
@pytest.mark.parametrize("name", CASES)
def test_cpu_attention(level: str, name: str) -> None:
    case = make_case(**{**CASES[name], "query_dtype": torch.float32})
    out, lse = paged_attention(
        case.query, case.pages, backend="cpu", return_lse=True, **case.arguments()
    )
    exact, exact_lse = case.expected()
    torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cpu_attention_rounds_once(dtype: torch.dtype) -> None:
    case = make_case(**{**CASES["d128"], "query_dtype": dtype})
    out = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
    exact, _ = case.expected()
    torch.testing.assert_close(out, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@needs_library
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_cpu_attention_does_not_depend_on_threads_or_batch(level: str, threads: int) -> None:
    case = make_case(**{**CASES["ragged"], "query_dtype": torch.float32})
    arguments = case.arguments()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = paged_attention(case.query, case.pages, backend="cpu", **arguments)
    finally:
        torch.set_num_threads(before)
    for i in (0, 7, 19):
        alone: dict[str, Any] = {
            **arguments,
            "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
            "seq_lens": arguments["seq_lens"][i : i + 1],
            "block_tables": arguments["block_tables"][i : i + 1],
        }
        row = paged_attention(case.query[i : i + 1], case.pages, backend="cpu", **alone)
        assert torch.equal(row[0], together[i])


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


@needs_library
def test_selection_prefers_the_kernel_for_decoding_nvfp4() -> None:
    def run(k_dtype: str, query_lens: tuple[int, int]) -> None:
        case = make_case(k_dtype=k_dtype, query_lens=query_lens, seq_lens=(40, 20))
        paged_attention(case.query, case.pages, backend="cpu", **case.arguments())

    assert next(verdict.name for verdict in ATTENTION_BACKENDS.explain() if verdict.usable) == "cpu"
    run("nvfp4", (1, 1))
    with pytest.raises(ValueError, match="reads nvfp4, not K fp8_e4m3"):
        run("fp8", (1, 1))
    with pytest.raises(ValueError, match="a few query tokens per sequence"):
        run("nvfp4", (30, 1))


def test_without_the_library_the_reference_stands_in_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = make_case(query_dtype=torch.float32)
    monkeypatch.setattr(backend, "library", lambda: None)
    monkeypatch.setattr(backend, "current_compute_capability", lambda: 0)
    backend._log_missing_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        for _ in range(3):
            out = paged_attention(case.query, case.pages, **case.arguments())
    exact, _ = case.expected()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert caplog.text.count("the CPU kernel was not built") == 1
    with pytest.raises(ValueError, match="without a C\\+\\+ compiler"):
        paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
