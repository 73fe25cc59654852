"""Compiled kernels on disk."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.cubin_cache import cubin

PARTS = [b"source", b"option"]


class Compiler:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return b"cubin"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "not" / "yet"
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(folder))
    return folder


def calls(*parts: list[bytes]) -> int:
    """Number of compilations when these cubins are requested one after the other."""
    compiler = Compiler()
    for made_from in parts:
        assert cubin("kernel", made_from, compiler) == b"cubin"
    return compiler.calls


def test_cubins_are_compiled_once(folder: Path) -> None:
    assert calls(PARTS, PARTS) == 1
    assert calls(PARTS) == 0
    (file,) = folder.iterdir()  # nothing else is left there
    assert file.name.startswith("kernel-")
    assert folder.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(
    "other", [[b"source", b"options"], [b"sourceo", b"ption"], [b"source"], [b"option", b"source"]]
)
def test_what_is_made_from_something_else_is_another(folder: Path, other: list[bytes]) -> None:
    assert calls(PARTS, other) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"x" + file.read_bytes()[1:]),
    ],
    ids=["short", "empty", "changed"],
)
def test_damaged_files_are_compiled_anew(folder: Path, damage: Callable[[Path], None]) -> None:
    assert calls(PARTS) == 1
    (file,) = folder.iterdir()
    damage(file)
    assert calls(PARTS) == 1
    assert calls(PARTS) == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_in_a_file_s_place_is_not_waited_for(folder: Path) -> None:
    assert calls(PARTS) == 1
    (file,) = folder.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert calls(PARTS) == 1
    assert calls(PARTS) == 0


def test_without_a_folder_kernels_are_compiled_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.DEBUG, "halfbyte"):
        assert calls(PARTS, PARTS) == 2
    assert "compiled kernels are not kept" in caplog.text
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", "")
    assert calls(PARTS, PARTS) == 2
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", "~nobody-of-that-name/folder")
    assert calls(PARTS, PARTS) == 2
    monkeypatch.delenv("HALFBYTE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert calls(PARTS, PARTS) == 2


def test_folders_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALFBYTE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    calls(PARTS)
    assert len([*(tmp_path / "xdg" / "halfbyte").iterdir()]) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    calls(PARTS)
    assert len([*(tmp_path / "home" / ".cache" / "halfbyte").iterdir()]) == 1


def test_cubins_depend_on_sources_options_and_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    (tmp_path / "kernel.cu").write_text('#include "part.cuh"\n__global__ void f() {}')
    (tmp_path / "part.cuh").write_text("")
    monkeypatch.setattr(nvrtc, "_FOLDER", tmp_path)

    def made_from(architecture: str = "sm_90a", **macros: int | None) -> list[bytes]:
        return nvrtc.Program.of("kernel.cu", macros, architecture).made_from()

    seen = [made_from(), made_from("sm_80"), made_from(A=1), made_from(A=2), made_from(A=None)]
    (tmp_path / "part.cuh").write_text("// changed")
    seen.append(made_from())
    monkeypatch.setattr(bindings, "nvrtcVersion", lambda: (0, 99, 1))
    seen.append(made_from())
    assert len({tuple(parts) for parts in seen}) == len(seen)
    assert made_from() == made_from()
