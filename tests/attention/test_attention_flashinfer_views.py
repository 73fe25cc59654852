"""Our pages as FlashInfer reads them."""

import pytest
import torch

from attention.cases import make_case
from attention.documented_flashinfer import tokens_of
from halfbyte.attention.flashinfer_views import flashinfer_dtype, kv_cache_views, page_table
from halfbyte.kvcache import read_tokens
from halfbyte.layouts import PageLayout


@pytest.mark.parametrize("k_dtype", ["nvfp4", "fp8", "fp8_e5m2", "bfloat16", "float16"])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_kv_cache_views_hold_what_the_oracle_reads(k_dtype: str, order: str) -> None:
    case = make_case(k_dtype=k_dtype, order=order)
    views = kv_cache_views(case.pages, case.layout)
    key, value = read_tokens(
        case.pages, case.slots[2], case.layout, case.k_scale, case.v_scale, torch.float64
    )
    pages = case.block_tables[2, :5].long()
    ours = tokens_of(views.data, views.scales, order, pages, 77)
    quantized = case.layout.k_dtype.has_global_scale
    for values, expected, scale in zip(
        ours, (key, value), (case.k_scale, case.v_scale), strict=True
    ):
        torch.testing.assert_close(
            values * (scale if quantized else 1.0), expected, rtol=1e-6, atol=0
        )
    first = views.data[0]
    assert first.untyped_storage().data_ptr() == case.pages.untyped_storage().data_ptr()


def test_page_table_lists_pages_in_order() -> None:
    tables = torch.tensor([[7, 3, -1], [5, -1, -1], [2, 9, 4]], dtype=torch.int32)
    table = page_table(tables, [17, 16, 48], 16)
    assert table.indptr.tolist() == [0, 2, 3, 6]
    assert table.indices.tolist() == [7, 3, 5, 2, 9, 4]
    assert table.last_page_len.tolist() == [1, 16, 16]


@pytest.mark.parametrize(
    ("k_dtype", "extra", "message"),
    [
        ("nvfp4", 4, "k_data in units of 8 bytes"),
        ("fp8", 8, "k_data in units of 16 bytes"),
        ("bfloat16", 8, "k_data in units of 16 bytes"),
    ],
)
def test_kv_cache_views_refuse_misaligned_pages(k_dtype: str, extra: int, message: str) -> None:
    layout = PageLayout(k_dtype, k_dtype, 64, None, 2, 16)
    pages = torch.zeros(3, layout.page_bytes + extra, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        kv_cache_views(pages, layout)


def test_kv_cache_views_refuse_regions_that_are_misaligned() -> None:
    layout = PageLayout("nvfp4", "nvfp4", 64, None, 1, 1)
    with pytest.raises(ValueError, match="reads v_data in units of 8 bytes"):
        kv_cache_views(torch.zeros(3, 128, dtype=torch.uint8), layout)
    layout = PageLayout("nvfp4", "nvfp4", 128, None, 1, 16, "HND", "sm100")
    with pytest.raises(ValueError, match="k_data in units of 32 bytes"):
        kv_cache_views(torch.zeros(3, layout.page_bytes + 16, dtype=torch.uint8), layout)
    with pytest.raises(ValueError, match="FlashInfer has no K fp8_e4m3 with V nvfp4"):
        kv_cache_views(
            torch.zeros(3, 9999, dtype=torch.uint8), PageLayout("fp8", "nvfp4", 64, None, 1, 16)
        )


def test_flashinfer_dtypes() -> None:
    sm100 = PageLayout("nvfp4", "nvfp4", 128, None, 8, 16, "HND", "sm100")
    assert flashinfer_dtype(sm100) == torch.uint8
    assert flashinfer_dtype(PageLayout("fp8", "fp8", 64, None, 1, 16)) == torch.float8_e4m3fn
    assert flashinfer_dtype(PageLayout("fp8", "bfloat16", 64, None, 1, 16)) is None
