"""Fixtures that run commands."""

import os
import sys
from pathlib import Path

import pytest

from cli.running import Command, Serve, ServeResult, run, small_model
from halfbyte.plugins.vllm import launch


@pytest.fixture
def halfbyte(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return lambda *arguments: run(capsys, monkeypatch, *arguments)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty."""
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def serve(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Serve:
    """Runs the command in this process, with a vLLM that is never started."""
    started: list[list[str]] = []
    environments: list[dict[str, str]] = []

    def start(file: str, command: list[str], environment: dict[str, str]) -> None:
        assert file == command[0]
        started.append(command)
        environments.append(environment)
        sys.exit(0)

    monkeypatch.setattr(launch, "find_spec", lambda name: name == "vllm")
    monkeypatch.setattr(launch, "entry_points", lambda **_: ("halfbyte",))
    monkeypatch.setattr(launch, "has_distribution", lambda: False)
    monkeypatch.setattr(os, "execvpe", start)

    def command(*arguments: str) -> ServeResult:
        result = run(capsys, monkeypatch, "serve", *arguments)
        found = ServeResult(*result, started.pop() if started else None)
        found.environment = environments.pop() if environments else {}
        return found

    return command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small random model without scales."""
    return small_model(tmp_path / "model")
