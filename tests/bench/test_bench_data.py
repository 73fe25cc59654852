"""Random caches, and the store that is measured on them."""

from dataclasses import asdict, replace

import pytest
import torch

from halfbyte.bench.attention_calls import store_calls
from halfbyte.bench.cases import Case, decode, store
from halfbyte.bench.data import make_inputs, random_tables
from halfbyte.kvcache import KV_CACHE_QUANT_REGISTRY, read_tokens
from halfbyte.measure.report import short_name
from halfbyte.measure.timing import copies

CPU = torch.device("cpu")


def test_tables_name_every_page_once_in_random_order() -> None:
    class Ragged(Case):
        def lengths(self) -> torch.Tensor:
            return torch.tensor([1, 33, 16, 200], dtype=torch.int32)

    table, num_pages = random_tables(Ragged(**asdict(decode("llama", 4, 200))))
    counts = [1, 3, 1, 13]
    used = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    assert num_pages == sum(counts)
    assert sorted(used.tolist()) == list(range(num_pages))
    assert used.tolist() != sorted(used.tolist())
    assert table.dtype == torch.int32


@pytest.mark.parametrize("dtype", list(KV_CACHE_QUANT_REGISTRY))
def test_caches_hold_finite_values_of_both_signs_and_sane_size(dtype: str) -> None:
    case = decode("gpt-oss", 2, 100)
    inputs = make_inputs(case, dtype, CPU)
    slots = torch.arange(inputs.pools[0].shape[0] * case.block_size)
    for pages in inputs.pools[:2]:
        for values in read_tokens(pages, slots, inputs.layout, inputs.scale, inputs.scale):
            assert values.isfinite().all()
            assert 0.01 < values.abs().mean() < 10
            assert 0.4 < (values < 0).sum() / (values != 0).sum() < 0.6
    assert not torch.equal(inputs.pools[0], inputs.pools[1])
    assert inputs.num_bytes == 200 * inputs.layout.bytes_per_token


def test_copies_leave_the_caches_within_reason() -> None:
    gpu = torch.device("cuda")
    assert copies(600_000_000, gpu) == 1
    assert copies(100_000_000, gpu) == 5
    assert copies(1000, gpu) == 256
    assert copies(0, CPU) == 64


def test_names_of_formats_in_reports() -> None:
    names = [short_name(name) for name in ("nvfp4", "fp8", "bfloat16", "float32", "mxfp4")]
    assert names == ["nvfp4", "fp8", "bf16", "fp32", "mxfp4"]


def test_a_window_has_only_pages_that_are_read() -> None:
    """Otherwise all copies together would fit in the GPU's L2."""
    case = replace(decode("llama", 3, 200), sliding_window=20)
    inputs = make_inputs(case, "nvfp4", CPU)
    live = inputs.block_tables[:, (200 - 20) // 16 :]
    assert sorted(live.flatten().tolist()) == list(range(len(inputs.pools[0])))
    assert inputs.num_bytes == 3 * 20 * inputs.layout.bytes_per_token


def test_store_writes_every_copy_once() -> None:
    case = store("llama", 100)
    calls, num_bytes = store_calls(case, "nvfp4", CPU)
    assert len(calls) == 64
    assert num_bytes == 2 * 100 * 8 * 128 * 2 + 100 * 8 + 100 * 8 * 2 * 72
    for call in (calls[0], calls[-1]):
        call()
        key, value, pages, slots, layout, scale, _ = call.args  # type: ignore[attr-defined]
        for stored, exact in zip(
            read_tokens(pages, slots, layout, scale, scale), (key, value), strict=True
        ):
            assert (stored - exact.float()).abs().mean() < 0.1 * exact.float().abs().mean()
    assert calls[0].args[2].data_ptr() != calls[-1].args[2].data_ptr()  # type: ignore[attr-defined]
