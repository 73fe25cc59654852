"""Tables in Markdown pages, each between `<!-- name -->` and `<!-- /name -->`."""

from pathlib import Path


def table_in(page: Path, name: str) -> str:
    """The table that a page has under a name.

    Raises:
        ValueError: the page has not exactly one place for it.
    """
    return _parts(page, name)[1]


def put_table(page: Path, name: str, table: str) -> None:
    """Replace the table of a name, which ends with a newline.

    Raises:
        ValueError: as `table_in`.
    """
    before, _, after = _parts(page, name)
    page.write_text(before + table + after)


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    text = page.read_text()
    if (text.count(begin), text.count(end)) != (1, 1):
        raise ValueError(f"{page}: expected one place for the table {name}")
    before, _, rest = text.partition(begin)
    table, _, after = rest.partition(end)
    return before + begin, table, end + after
