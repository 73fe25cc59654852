"""Checks of the docs beyond mkdocs' own (links, anchors, pages outside the menu)."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_included_programs_are_there(page: Path) -> None:
    """A malformed include line would be shown as text."""
    for line in page.read_text().splitlines():
        if "--8" in line or "8<" in line:
            found = re.fullmatch(r'--8<-- "(examples/\w+\.py)"', line)
            assert found, line
            assert (REPOSITORY / found[1]).is_file()


@pytest.mark.parametrize("folder", ["start", "how", "walks", "guides"])
def test_pages_to_read_are_short(folder: str) -> None:
    pages = list((REPOSITORY / "docs" / folder).glob("*.md"))
    assert len(pages) >= 3
    for page in pages:
        assert len(page.read_text().splitlines()) <= 150, page


@pytest.mark.parametrize("tab", ["transformers", "Python"])
def test_tabs_of_the_first_page_run(tab: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPOSITORY / "docs" / "index.md").read_text()
    (code,) = re.findall(rf'^=== "{tab}"\n\n    ```python\n(.*?)^    ```$', text, re.M | re.S)
    exec(dedent(code), {})
    assert capsys.readouterr().out.strip()
