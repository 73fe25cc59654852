"""`halfbyte.dispatch`: the order of preference, explicit choices, laziness, other machines."""

import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

import pytest
import torch

from halfbyte import dispatch
from halfbyte.dispatch import Answer, NoImplementationError, Registry, Verdict

MODULE = "candidates_of_test_dispatch"
MISSING = "module_that_does_not_exist_anywhere"


class Portable:
    name = "portable"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return True, "runs everywhere"

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        return config != "impossible", f"portable on {config}"


class Blackwell:
    name = "blackwell"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        if compute_capability is None:
            compute_capability = dispatch.current_compute_capability()
        return compute_capability >= 100, f"needs SM100, this is SM{compute_capability}"

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        return config == "dense", f"dense alone, not {config}"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[Any]:
    module = ModuleType(MODULE)
    module.__dict__.update(Portable=Portable, Blackwell=Blackwell)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return Registry(
        "attention backend",
        {"blackwell": f"{MODULE}:Blackwell", "portable": f"{MODULE}:Portable"},
    )


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("config", "compute_capability", "expected"),
    [
        ("dense", 100, Blackwell),
        ("dense", 120, Blackwell),
        ("dense", 90, Portable),
        ("dense", dispatch.CPU, Portable),
        ("dense", None, Portable),
        ("sparse", 100, Portable),
    ],
)
def test_select_takes_the_first_that_can(
    registry: Registry[Any], config: str, compute_capability: int | None, expected: type
) -> None:
    assert registry.select(config, compute_capability=compute_capability) is expected


def test_select_follows_the_order_of_preference(registry: Registry[Any]) -> None:
    reverse: Registry[Any] = Registry(
        "attention backend",
        {"portable": f"{MODULE}:Portable", "blackwell": f"{MODULE}:Blackwell"},
    )
    assert reverse.select("dense", compute_capability=100) is Portable
    assert registry.select("dense", compute_capability=100) is Blackwell


def test_select_explicit_overrides_the_order(registry: Registry[Any]) -> None:
    assert registry.select("dense", "portable", compute_capability=100) is Portable


@pytest.mark.parametrize(
    ("config", "compute_capability", "reason"),
    [
        ("dense", 90, "needs SM100, this is SM90"),
        ("dense", None, "needs SM100, this is SM0"),
        ("sparse", 100, "dense alone, not sparse"),
    ],
)
def test_select_explicit_that_cannot_says_why_and_what_can(
    registry: Registry[Any], config: str, compute_capability: int | None, reason: str
) -> None:
    with pytest.raises(NoImplementationError) as error:
        registry.select(config, "blackwell", compute_capability)
    message = str(error.value)
    assert "attention backend 'blackwell'" in message
    assert reason in message
    assert message.endswith("usable: portable")


def test_select_explicit_that_cannot_when_nothing_can(registry: Registry[Any]) -> None:
    with pytest.raises(NoImplementationError, match="usable: none"):
        registry.select("impossible", "portable", 90)


def test_unknown_name_lists_the_valid_ones(registry: Registry[Any]) -> None:
    with pytest.raises(NoImplementationError, match=r"'flash'.*blackwell, portable"):
        registry.get("flash")
    with pytest.raises(NoImplementationError, match=r"'flash'.*blackwell, portable"):
        registry.select("dense", "flash")


def test_select_when_nothing_can_says_every_reason(registry: Registry[Any]) -> None:
    with pytest.raises(NoImplementationError) as error:
        registry.select("impossible", compute_capability=90)
    message = str(error.value)
    assert "no attention backend" in message
    assert "blackwell: needs SM100, this is SM90" in message
    assert "portable: portable on impossible" in message


def test_errors_are_value_errors() -> None:
    assert issubclass(NoImplementationError, ValueError)


def test_explain_answers_for_another_machine(registry: Registry[Any]) -> None:
    assert registry.explain(compute_capability=100) == [
        Verdict("blackwell", True, "needs SM100, this is SM100"),
        Verdict("portable", True, "runs everywhere"),
    ]
    assert [v.usable for v in registry.explain(compute_capability=90)] == [False, True]
    assert [v.usable for v in registry.explain()] == [False, True]


def test_explain_answers_for_the_work(registry: Registry[Any]) -> None:
    assert registry.explain("sparse", 100) == [
        Verdict("blackwell", False, "dense alone, not sparse"),
        Verdict("portable", True, "portable on sparse"),
    ]
    assert registry.explain("sparse", 90)[0].reason == "needs SM100, this is SM90"


@pytest.fixture
def with_missing(registry: Registry[Any]) -> Registry[Any]:
    registry.register("missing", f"{MISSING}:Kernel")
    return registry


def test_targets_are_imported_when_requested(with_missing: Registry[Any]) -> None:
    assert with_missing.names() == ["blackwell", "portable", "missing"]
    assert with_missing.get("portable") is Portable
    assert with_missing.select("dense", "portable") is Portable
    with pytest.raises(ModuleNotFoundError, match=MISSING):
        with_missing.get("missing")


def test_select_does_not_import_what_stands_behind_its_choice(with_missing: Registry[Any]) -> None:
    assert with_missing.select("dense", compute_capability=90) is Portable


def test_register_appends_or_goes_first(registry: Registry[Any]) -> None:
    registry.register("last", f"{MODULE}:Portable")
    registry.register("first", f"{MODULE}:Portable", first=True)
    assert registry.names() == ["first", "blackwell", "portable", "last"]
    assert registry.select("dense", compute_capability=100) is Portable


def test_register_refuses_a_name_twice(registry: Registry[Any]) -> None:
    with pytest.raises(ValueError, match="'portable' is already registered"):
        registry.register("portable", f"{MODULE}:Blackwell")
    assert registry.get("portable") is Portable


def test_registry_does_not_share_the_dict_it_was_given() -> None:
    targets = {"portable": f"{MODULE}:Portable"}
    registry: Registry[Any] = Registry("kernel", targets)
    registry.register("other", f"{MODULE}:Blackwell")
    targets["third"] = f"{MODULE}:Blackwell"
    assert registry.names() == ["portable", "other"]


def test_current_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dispatch.current_compute_capability() == dispatch.CPU == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    capabilities = {2: (12, 0), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.pop)
    uncached = dispatch.compute_capability_of_gpu.__wrapped__
    monkeypatch.setattr(dispatch, "compute_capability_of_gpu", lru_cache(uncached))
    for _ in range(2):  # asked once
        assert dispatch.current_compute_capability() == 120
        assert dispatch.current_compute_capability(torch.device("cuda", 1)) == 90
        assert dispatch.compute_capability_of(torch.device("cuda")) == 120


def test_is_installed_also_for_modules_of_missing_packages() -> None:
    assert dispatch.is_installed("torch.nn")
    assert not dispatch.is_installed("torch.no_such_module")
    assert not dispatch.is_installed("no_such_package.module")


def test_answers_of_what_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str | None:
        return dispatch.missing_module("no_such_module", "nobody installs it")

    assert dispatch.runs_on_gpu(0, 80, missing, "works") == (False, "needs an NVIDIA GPU")
    assert dispatch.runs_on_gpu(75, 80, missing, "works") == (
        False,
        "needs compute capability 8.0, this is 7.5",
    )
    assert dispatch.runs_on_gpu(90, 80, missing, "works") == (True, "works")
    monkeypatch.setattr(dispatch, "current_compute_capability", lambda: 90)
    expected = (False, "needs no_such_module (nobody installs it)")
    assert dispatch.runs_on_gpu(None, 80, missing, "works") == expected
    assert dispatch.runs_on_gpu(None, 80, lambda: None, "works") == (True, "works")
