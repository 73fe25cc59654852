"""Checks that a vLLM has what the plug-in hooks into, by its sources: nothing of it is imported.

What the plug-in imports, calls, overrides and extends, and what it reads of vLLM's configurations,
is found in its code; `vllm_hooks.txt` has the rest. Prints a line for each that is missing.

python -m dev.check_vllm_sources FOLDER     of the package `vllm`, unpacked or installed
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dev.vllm_sources import Sources, parameters
from dev.vllm_uses import Hook, PluginFile

_PLUGIN = Path(__file__).absolute().parents[1] / "src" / "halfbyte" / "plugins" / "vllm"
_TABLES = Path(__file__).with_name("vllm_hooks.txt")
_MEMBER = re.compile(r"([\w.|]+)(?:([(\[])([\w,]*)[)\]])?")


class Findings(NamedTuple):
    """Lines about what a vLLM lacks, and about what of it the plug-in can do without."""

    missing: list[str]
    optional: list[str]


def check(folder: Path) -> Findings:
    """Look for everything that the plug-in needs.

    Args:
        folder: of the package `vllm`.
    """
    sources = Sources(folder)
    missing, optional = set[str](), set[str]()
    for hook in set(_hooks(sources)):
        if problem := _problem(hook, sources):
            found = optional if _is_optional(hook, sources) else missing
            found.add(f"{hook.name} {problem}")
    return Findings(sorted(missing), sorted(optional - missing))


def _hooks(sources: Sources) -> Iterator[Hook]:
    for place, members in _table("hooks"):
        for names, bracket, text in _MEMBER.findall(members):
            of = tuple(filter(None, text.split(",")))
            name = "|".join(f"{place}.{x}" for x in names.split("|"))
            yield Hook(name, of, supported=of if bracket == "[" else None)
    for file in sorted(_PLUGIN.rglob("*.py")):
        code = PluginFile(file, dict(_table("objects")))
        yield from code.hooks()
        yield from (hook for hook in code.overrides() if sources.find(hook.name))


def _is_optional(hook: Hook, sources: Sources) -> bool:
    for name, other in _table("if"):
        if f"{hook.name}.".startswith(f"{name}."):
            has_other = sources.find(other.removeprefix("!")) is not None
            return has_other == other.startswith("!")
    return hook.is_optional


@cache
def _table(title: str) -> list[tuple[str, str]]:
    """Rows of a table."""
    rows = _TABLES.read_text().split(f"[{title}]\n")[1].partition("\n\n")[0]
    return [(name, rest) for name, _, rest in (row.partition(": ") for row in rows.splitlines())]


def _problem(hook: Hook, sources: Sources) -> str | None:
    """What is wrong with what a vLLM has for a hook; None if nothing."""
    found = next(filter(None, map(sources.find, hook.name.split("|"))), None)
    if found is None:
        return "is missing"
    if not isinstance(found.node, ast.FunctionDef):
        return None
    theirs, required = parameters(found.node), parameters(found.node, is_required=True)
    if hook.positional is None:
        suits = [x for x in theirs if x in hook.passed] == list(hook.passed)
        suits &= hook.supported is None or set(theirs) <= set(hook.supported)
    else:
        suits = set(required[hook.positional :]) <= set(hook.passed) <= set(theirs)
        suits &= hook.positional <= len(theirs)
    return None if suits else f"has other parameters: {', '.join(theirs)}"


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    print("\n".join([*found.missing, *(f"{line}, but optional" for line in found.optional)]))
    sys.exit(bool(found.missing))
