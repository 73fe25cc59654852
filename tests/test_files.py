"""Reading of users' files."""

import os
import threading
from pathlib import Path

import pytest

from halfbyte.files import read_text


def test_text_keeps_newlines(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes("a\r\né\n".encode())
    assert read_text(file) == "a\r\né\n"


@pytest.mark.parametrize("has_writer", [False, True])
def test_text_of_a_pipe(tmp_path: Path, has_writer: bool) -> None:
    """Without a writer it is empty, instead of waiting for one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if not has_writer:
        assert read_text(pipe) == ""
        return
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # lets the writer open
    writer = pipe.open("w")

    def write() -> None:
        with writer:
            writer.write("late")

    threading.Timer(0.05, write).start()
    assert read_text(pipe) == "late"
    os.close(reader)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "absent: cannot be read: No such file or directory"),
        (".", "cannot be read: Is a directory"),
        ("binary", "binary: is not UTF-8 text: "),
        ("/dev/zero", "/dev/zero: cannot be read: more than 64 MiB"),
    ],
)
def test_what_is_no_text(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / name)
