"""Registries of implementations (attention backends, linear kernels) and how one is selected.

Candidates are in order of preference. Each says whether it runs on a machine (`is_supported`) and
can do the work (`can_implement`), always with a reason. An explicit choice that cannot run raises
an error that names the reason and the usable ones; there is no silent fallback.
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch

CPU = 0
"""The compute capability of a machine without an NVIDIA GPU."""

Answer = tuple[bool, str]
"""(supported, reason)."""


class Implementation(Protocol):
    """The interface of a candidate."""

    name: ClassVar[str]

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether it runs on a machine: 90 for SM90, `CPU` for no GPU, None for this machine."""
        ...

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        """Whether it supports the configuration `config`."""
        ...


class Verdict(NamedTuple):
    """Whether a candidate is usable on a machine (and for a config, if given), and why."""

    name: str
    usable: bool
    reason: str


class NoImplementationError(ValueError):
    """No candidate, or not the requested one, can be used; the message says why."""


T = TypeVar("T", bound=Implementation)


class Registry(Generic[T]):
    """Implementations by name, in order of preference, imported at first use.

    Args:
        kind: of the implementations, for messages ("attention backend").
        targets: name -> "module:attribute".
    """

    def __init__(self, kind: str, targets: dict[str, str]) -> None:
        self.kind = kind
        self._targets = dict(targets)
        self._loaded: dict[str, type[T]] = {}

    def register(self, name: str, target: str, *, first: bool = False) -> None:
        """Add an implementation at the end, or at the front (`first`)."""
        if name in self._targets:
            raise ValueError(f"{self.kind}: {name!r} is already registered")
        self._targets = (
            {name: target, **self._targets} if first else {**self._targets, name: target}
        )

    def names(self) -> list[str]:
        """Registered names, best first."""
        return list(self._targets)

    def get(self, name: str) -> type[T]:
        """The implementation of a name.

        Raises:
            NoImplementationError: unknown name; the message lists the valid ones.
        """
        if name not in self._loaded:
            if name not in self._targets:
                raise NoImplementationError(self._unknown(name))
            module, _, attribute = self._targets[name].partition(":")
            self._loaded[name] = getattr(import_module(module), attribute)
        return self._loaded[name]

    def explain(self, config: Any = None, compute_capability: int | None = None) -> list[Verdict]:
        """Every candidate's verdict for a machine and, if given, a config."""
        return [self._judge(name, config, compute_capability) for name in self._targets]

    def select(
        self,
        config: Any,
        explicit: str | None = None,
        compute_capability: int | None = None,
    ) -> type[T]:
        """The explicit choice, or the first candidate that can be used.

        Args:
            config: the argument of `can_implement`; None to select by machine only.
            explicit: a registered name, or None to choose.
            compute_capability: of the machine; None for this one.

        Raises:
            NoImplementationError: the explicit choice is unknown or unusable, or nothing is usable.
        """
        if explicit is not None:
            problem = self._unknown(explicit)
            if explicit in self._targets:
                verdict = self._judge(explicit, config, compute_capability, named=True)
                if verdict.usable:
                    return self.get(explicit)
                problem = f"{self.kind} {explicit!r} cannot be used here: {verdict.reason}"
            usable = [v.name for v in self.explain(config, compute_capability) if v.usable]
            raise NoImplementationError(f"{problem}; usable: {', '.join(usable) or 'none'}")
        verdicts: list[Verdict] = []
        for name in self._targets:
            verdicts.append(self._judge(name, config, compute_capability))
            if verdicts[-1].usable:
                return self.get(name)
        reasons = "; ".join(f"{v.name}: {v.reason}" for v in verdicts)
        raise NoImplementationError(f"no {self.kind} can be used here ({reasons})")

    def _unknown(self, name: str) -> str:
        return f"{self.kind}: unknown {name!r}; expected one of {', '.join(self._targets)}"

    def _judge(
        self, name: str, config: Any, compute_capability: int | None, *, named: bool = False
    ) -> Verdict:
        """The verdict on a candidate; `named` if it is the explicit choice."""
        try:
            candidate = self.get(name)
        except ImportError as error:
            return Verdict(name, False, f"cannot be imported: {error}")
        usable, reason = candidate.is_supported(compute_capability)
        if usable and config is not None:
            usable, reason = candidate.can_implement(config)
        return Verdict(name, usable, reason)


class LayerConfig(Protocol):
    """What all configs of layers have; they are frozen dataclasses."""

    @property
    def device_type(self) -> str:
        """Such as "cuda"."""
        ...

    @property
    def compute_capability(self) -> int:
        """The target GPU's; `CPU` on "cuda" stands for this machine's."""
        ...


C = TypeVar("C", bound=LayerConfig)


class LayerRegistry(Registry[T]):
    """Kernels of layers, which an environment variable can choose.

    Args:
        kind, targets: as of `Registry`.
        variable: name of the environment variable.
    """

    def __init__(self, kind: str, targets: dict[str, str], variable: str) -> None:
        super().__init__(kind, targets)
        self._variable = variable

    def select_for(self, config: LayerConfig, backend: str | None) -> type[T]:
        """The kernel class for a layer.

        Args:
            config: may be for another GPU; then installed packages are not checked.
            backend: a name; None for the environment variable's if set, else the first that
                supports the layer.

        Raises:
            NoImplementationError: as `select`; the message names the variable if it has chosen.
        """
        config = on_this_machine(config)
        here = config.device_type != "cuda" or (
            config.compute_capability == current_compute_capability()
        )
        capability = None if here else config.compute_capability
        from_environment = os.environ.get(self._variable) if backend is None else None
        try:
            return self.select(
                config, explicit=from_environment or backend, compute_capability=capability
            )
        except NoImplementationError as error:
            if from_environment:
                raise NoImplementationError(f"{self._variable}: {error}") from None
            raise


def on_this_machine(config: C) -> C:
    """A layer's config; on "cuda" without a compute capability it gets this machine's."""
    if config.device_type == "cuda" and config.compute_capability == CPU:
        # `replace` is for dataclasses, which a protocol cannot ask for.
        return replace(config, compute_capability=current_compute_capability())  # type: ignore[type-var]
    return config


@cache
def is_installed(module: str) -> bool:
    """Whether a module can be imported; cached per process."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def current_compute_capability(device: torch.device | None = None) -> int:
    """Compute capability of this machine: 90 for SM90, `CPU` without an NVIDIA GPU.

    Args:
        device: which GPU; by default the current one.
    """
    if not torch.cuda.is_available():
        return CPU
    index = None if device is None else device.index
    return compute_capability_of_gpu(torch.cuda.current_device() if index is None else index)


@lru_cache(maxsize=16)  # the query takes longer than many kernels
def compute_capability_of_gpu(index: int) -> int:
    """Compute capability of an NVIDIA GPU by its index; cached."""
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def compute_capability_of(device: torch.device) -> int:
    """Compute capability of a device: `CPU` for all but NVIDIA GPUs."""
    return current_compute_capability(device) if device.type == "cuda" else CPU


def runs_on_gpu(
    compute_capability: int | None, oldest: int, missing: Callable[[], str | None], purpose: str
) -> Answer:
    """`is_supported` of implementations for NVIDIA GPUs from a min compute capability on.

    Args:
        compute_capability: of the machine; None for this one.
        oldest: min compute capability.
        missing: returns what is not installed, or None; called for this machine only.
        purpose: the reason of a positive answer.
    """
    here = compute_capability is None
    capability = current_compute_capability() if compute_capability is None else compute_capability
    if capability == CPU:
        return False, "needs an NVIDIA GPU"
    if capability < oldest:
        return False, f"needs compute capability {oldest / 10}, this is {capability / 10}"
    reason = missing() if here else None
    return reason is None, reason or purpose


def runs_on_triton(compute_capability: int | None, purpose: str) -> Answer:
    """`is_supported` of kernels in Triton: SM80 and later; on this machine also where Triton is
    installed. Arguments as of `runs_on_gpu`."""
    return runs_on_gpu(
        compute_capability,
        80,
        lambda: missing_module("triton", "pip install halfbyte[gpu]"),
        purpose,
    )


def missing_module(module: str, source: str) -> str | None:
    """Why a module cannot be used, and how to install it; None if it is installed."""
    return None if is_installed(module) else f"needs {module} ({source})"


def missing_version(package: str, oldest: tuple[int, ...]) -> str | None:
    """Why a package, by its name on PyPI, cannot be used; None if a version from `oldest` on is
    installed. It is not imported."""
    needed = f"needs {package} {'.'.join(map(str, oldest))} or later"
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{needed}, which is not installed"
    found = tuple(int(part) for part in re.findall(r"\d+", version))
    return f"{needed}, this is {version}" if found[: len(oldest)] < oldest else None
