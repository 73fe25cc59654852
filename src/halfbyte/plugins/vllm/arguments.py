"""Parses a `vllm serve` command line as vLLM does, without importing vLLM.

vLLM accepts `--name value`, `--name=value`, `--some_name` for `--some-name`, parts of JSON as
`--name.key value`, and abbreviated names. Options in the file of `--config` come first; the command
line overrides them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from halfbyte.files import read_text, shortened

_SHORTEST_CUT = len("--abcd")
"""Min characters of an abbreviated name: vLLM rejects shorter ones as ambiguous."""


_LIKENESS = 0.8
"""Min `difflib` ratio of a misspelled name to an option's, both without dashes in front."""
_LIKE_OURS = ("--dtype",)
"""vLLM's options that are similar to one of halfbyte's."""


def check_names(arguments: Sequence[str], own: Sequence[str]) -> None:
    """Raise ValueError for a probable misspelling of one of halfbyte's options.

    All other names are left to vLLM.

    Args:
        arguments: without halfbyte's options; those after `--` are not checked.
        own: halfbyte's options, as `--kv-recipe`.
    """
    names = [name[2:] for name in own]
    for argument in arguments:
        if argument == "--":
            return
        key, _ = _split(argument)
        if not key.startswith("--") or "." in key or key in _LIKE_OURS:
            continue
        close = get_close_matches(key[2:], names, n=1, cutoff=_LIKENESS)
        if close:
            name = shortened(argument.partition("=")[0])
            raise ValueError(f"{name}: unknown option; did you mean --{close[0]}?")


@dataclass
class ServeArguments:
    """Options of a command line.

    Args:
        arguments: those after `serve`.

    Raises:
        ValueError: a config file that cannot be read; one line.
    """

    arguments: Sequence[str]
    in_file: list[str] = field(init=False)
    """The options of the file that `--config` names, as a command line."""

    def __post_init__(self) -> None:
        self.in_file = []
        file = _value(self.arguments, ("--config",))
        if file is not None:
            self.in_file = _read_config_file(Path(file))

    @property
    def model(self) -> str | None:
        """The model: the first argument, or the value of `--model` there or in the file."""
        if self.arguments and not self.arguments[0].startswith("-"):
            return self.arguments[0]
        return self.value("--model")

    def value(self, *names: str) -> str | None:
        """The last value of an option; empty for an option without a value, None if absent."""
        return _value([*self.in_file, *self.arguments], names)

    def json(self, *names: str) -> Any:
        """The value of a JSON option; `--name.key` parts override the whole, as in vLLM.

        Raises:
            ValueError: not JSON; one line.
        """
        parts = _parts([*self.in_file, *self.arguments], names)
        if parts:
            return parts
        text = self.value(*names)
        if text is None:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{names[0]}: expected JSON, got {text[:99]!r}: {error}") from None

    def without(self, name: str) -> list[str]:
        """The arguments without an option, its value and its parts."""
        kept: list[str] = []
        arguments = list(self.arguments)
        while arguments:
            argument = arguments.pop(0)
            key, value = _split(argument)
            if not _is(key.partition(".")[0], (name,)):
                kept.append(argument)
            elif value is None and arguments:
                arguments.pop(0)
        return kept


def _split(argument: str) -> tuple[str, str | None]:
    """Name and value of `--some_name=value`; the name with dashes, its JSON keys unchanged."""
    if not argument.startswith("-"):
        return "", None
    key, equals, value = argument.partition("=")
    name, dot, part = key.partition(".")
    return name.replace("_", "-") + dot + part, value if equals else None


def _is(key: str, names: Sequence[str]) -> bool:
    """Whether an argument's name is one of an option's names, possibly abbreviated."""
    if key in names:
        return True
    return len(key) >= _SHORTEST_CUT and any(name.startswith(key) for name in names)


def _value(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    found = None
    for i, argument in enumerate(arguments):
        key, value = _split(argument)
        if _is(key, names):
            following = "".join(arguments[i + 1 : i + 2])
            found = following if value is None else value
    return found


def _parts(arguments: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """The object given by `--name.key value` and `--name.key.key value`."""
    found: dict[str, Any] = {}
    for i, argument in enumerate(arguments):
        key, value = _split(argument)
        name, _, path = key.partition(".")
        if not path or not _is(name, names):
            continue
        text = "".join(arguments[i + 1 : i + 2]) if value is None else value
        *outer, last = path.split(".")
        place = found
        for step in outer:
            inner = place.setdefault(step, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{argument}: {step} was given a value before")
            place = inner
        try:
            place[last] = json.loads(text)
        except (ValueError, RecursionError):
            place[last] = text
    return found


def _read_config_file(file: Path) -> list[str]:
    import yaml  # type: ignore[import-untyped]

    try:
        options = yaml.safe_load(read_text(file))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"--config: {file} cannot be read: {shortened(str(error))}") from None
    if options is None:
        return []
    if not isinstance(options, Mapping):
        raise ValueError(f"--config: {file}: expected options and their values")
    arguments = []
    for name, value in options.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        arguments += [f"--{name}={text}"]
    return arguments
