"""The figures that the README shows are those of the committed run."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["accuracy", "attention_decode"])
def test_readme_shows_the_committed_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    benchmark = import_module(name)
    report = json.loads(benchmark.RESULT.read_text())
    assert benchmark.table(report) in (REPOSITORY / "README.md").read_text()


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("accuracy")


def test_committed_run_says_what_it_was_measured_on(accuracy: Any) -> None:
    report = json.loads(accuracy.RESULT.read_text())
    assert report["command"].startswith("halfbyte eval --kv-cache-dtype bfloat16,")
    assert report["date"]
    assert report["versions"]["torch"]
    assert {row["kv_cache_dtype"] for row in report["results"]} == set(accuracy.FORMATS.split(","))
