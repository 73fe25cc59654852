"""C++ attention: rows are bitwise the same whatever the batch, the threads and the chunks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attention.cases import DECODE_CASES, make_case
from attention.cpu_formats import FORMATS
from halfbyte.attention import paged_attention
from halfbyte.kernels.cpu import library as cpu_library
from halfbyte.kernels.cpu.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="built without a C++ compiler")


@pytest.fixture(params=["openmp", "own threads"])
def _threads_of(request: pytest.FixtureRequest) -> Iterator[None]:
    loaded = library()
    assert loaded is not None
    if request.param == "own threads":
        loaded.halfbyte_use_openmp(None)
    yield
    loaded.halfbyte_use_openmp(cpu_library._openmp_of_torch())


@pytest.mark.usefixtures("_threads_of")
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("transform", "recent"), [(None, 0), ({}, 0), ({}, 64)], ids=["plain", "recipe", "recent"]
)
def test_cpu_attention_does_not_depend_on_threads_or_batch(
    level: str, threads: int, query_dtype: torch.dtype, transform: dict | None, recent: int
) -> None:
    query_lens = (*(1,) * 9, 6, 30)
    case = make_case(
        head_size=64,
        kv_heads=5,
        query_lens=query_lens,
        seq_lens=(*range(1, 1800, 200), 700, 560),
        query_dtype=query_dtype,
        transform=transform,
        recent=recent,
    )
    arguments = case.arguments()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = paged_attention(case.query, case.pages, backend="cpu", **arguments)
    finally:
        torch.set_num_threads(before)
    for i in (0, 4, 8, 9, 10):
        begin, end = arguments["query_start_loc"][i : i + 2].tolist()
        alone: dict[str, Any] = {
            **arguments,
            "query_start_loc": torch.tensor([0, end - begin], dtype=torch.int32),
            "seq_lens": arguments["seq_lens"][i : i + 1],
            "block_tables": arguments["block_tables"][i : i + 1],
        }
        if recent:
            kept = arguments["recent"]
            rows_of = {"key": kept.key[begin:end], "value": kept.value[begin:end]}
            alone["recent"] = kept._replace(entries=kept.entries[i : i + 1], **rows_of)
        rows = paged_attention(case.query[begin:end], case.pages, backend="cpu", **alone)
        assert torch.equal(rows, together[begin:end])


@pytest.mark.parametrize("window", [None, 37, 700])
@pytest.mark.parametrize(
    "name", ["nvfp4", "bfloat16", "fp8-nvfp4", "nvfp4-bfloat16", "recipe", "recent"]
)
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_attention_does_not_depend_on_chunks(
    level: str, name: str, window: int | None, query_dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {} if window is None else {"sliding_window": window}
    length, queries = 1100, 75
    case = make_case(
        **({"transform": {}} if name in ("recipe", "recent") else FORMATS[name]),
        recent=64 if name == "recent" else 0,
        group=3,
        query_lens=(queries,),
        seq_lens=(length,),
        query_dtype=query_dtype,
        **options,
    )
    arguments = case.arguments()
    whole = paged_attention(case.query, case.pages, backend="cpu", **arguments)
    begin = 0
    for count in (1, 1, 2, 3, 5, 20, 42, 1):
        chunk: dict[str, Any] = {
            **arguments,
            "query_start_loc": torch.tensor([0, count], dtype=torch.int32),
            "seq_lens": torch.tensor([length - queries + begin + count], dtype=torch.int32),
        }
        if name == "recent":
            kept = arguments["recent"]
            own = {side: getattr(kept, side)[begin : begin + count] for side in ("key", "value")}
            chunk["recent"] = kept._replace(**own)
        rows = paged_attention(
            case.query[begin : begin + count], case.pages, backend="cpu", **chunk
        )
        assert torch.equal(rows, whole[begin : begin + count])
        if name == "recent":
            positions = torch.arange(begin, begin + count) + length - queries
            entry, ring = int(kept.entries[0]), kept.keys.shape[2]
            for kept_rows, new in ((kept.keys, own["key"]), (kept.values, own["value"])):
                kept_rows[entry, :, positions % ring] = new.transpose(0, 1)
        begin += count
    assert begin == queries


def test_threads_of_our_own_do_all_the_work_again_and_again() -> None:
    loaded = library()
    assert loaded is not None
    case = make_case(**{**DECODE_CASES["ragged"], "query_dtype": torch.float32})
    expected = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
    before = torch.get_num_threads()
    loaded.halfbyte_use_openmp(None)
    try:
        for threads in (4, 2, 7) * 30:
            torch.set_num_threads(threads)
            out = paged_attention(case.query, case.pages, backend="cpu", **case.arguments())
            assert torch.equal(out, expected)
    finally:
        loaded.halfbyte_use_openmp(cpu_library._openmp_of_torch())
        torch.set_num_threads(before)
