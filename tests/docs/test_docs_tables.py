"""Tables and lists of the docs have every format and every backend."""

import re
from pathlib import Path

import pytest

from halfbyte.layouts import KVCacheDType
from halfbyte.linear import LINEAR_BACKENDS

REPOSITORY = Path(__file__).parents[2]
FORMATS = [dtype for dtype in KVCacheDType if dtype is not KVCacheDType.AUTO]


def first_cells(page: str, heading: str) -> list[str]:
    """First cells of the tables in a section."""
    text = (REPOSITORY / "docs" / page).read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def bits_per_value(dtype: KVCacheDType) -> float:
    head_size = 128
    return 8 * (dtype.data_bytes(head_size) + dtype.scale_bytes(head_size)) / head_size


def test_page_of_formats_has_every_format_with_its_bits() -> None:
    text = (REPOSITORY / "docs" / "how" / "format.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \| ([\d.]+) \|", text, re.MULTILINE)
    stated = {
        KVCacheDType.parse(name): float(bits) for cell, bits in rows for name in names_in(cell)
    }
    assert stated == {dtype: bits_per_value(dtype) for dtype in FORMATS}, (
        "docs/how/format.md: give every format a row with its bits per value"
    )


@pytest.mark.parametrize(
    ("page", "start", "end"),
    [
        ("README.md", "- **The format, exactly.**", "\n- "),
        ("docs/vllm.md", "| `k_dtype`, `v_dtype` |", "\n"),
    ],
    ids=["README", "vllm"],
)
def test_lists_have_every_quantized_format(page: str, start: str, end: str) -> None:
    text = (REPOSITORY / page).read_text()
    assert text.count(start) == 1
    listed = {
        KVCacheDType.parse(name)
        for name in names_in(text.split(start)[1].split(end)[0])
        if name in {*KVCacheDType, "fp8"}
    }
    missing = sorted(dtype for dtype in FORMATS if dtype.is_quantized and dtype not in listed)
    assert not missing, f"{page}: name {', '.join(missing)} after {start!r}"


def test_page_of_linear_layers_has_every_backend() -> None:
    cells = first_cells("linear.md", "Built-in backends")
    cells += first_cells("linear.md", "Backends of other libraries")
    assert sorted(name for cell in cells for name in names_in(cell)) == sorted(
        LINEAR_BACKENDS.names()
    ), "docs/linear.md: give every linear backend a row in one of its two tables"
