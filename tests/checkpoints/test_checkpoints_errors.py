"""One-line errors."""

import pytest

from halfbyte.checkpoints.errors import one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("F4"), "unknown name 'F4'"),
        (KeyError("no such dtype"), "'no such dtype'"),
        (ValueError("F4"), "F4"),
        (ValueError("two\n  lines"), "two lines"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_s_line(error: Exception, line: str) -> None:
    assert one_line(error) == line
