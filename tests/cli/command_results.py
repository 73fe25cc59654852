"""What must hold after a fuzzed command line: one clear line, and only the named files changed."""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cli.command_lines import VALID, CommandLine
from halfbyte.files import shortened

LONGEST = 1000
BESIDE = ("halfbyte: ",)
"""Starts of lines of the log, which may stand beside an error."""


class Result(NamedTuple):
    """What a command left: its status, what it wrote, and an error that it raised."""

    status: int
    out: str
    err: str
    raised: BaseException | None


def problems(line: CommandLine, result: Result) -> Iterator[str]:
    """What is wrong with the result of a command line."""
    arguments = line.arguments
    if result.raised is not None:
        if not any(re.fullmatch("--verbose|-v+", x) for x in arguments):
            yield f"raised {result.raised!r:.400}"
        return
    if result.status not in (0, 1, 2):
        yield f"status {result.status}"
    if "Traceback" in result.err:
        yield f"a traceback: {result.err[-600:]}"
    lines = [x for x in result.err.splitlines() if not x.startswith(BESIDE)]
    if result.status == 0:
        shows_help = result.out.startswith(("Usage: ", "halfbyte "))
        if ("--json",) in line.options and line.path in VALID and not shows_help:
            yield from _not_json(result.out)
        return
    if not lines:
        yield "no error"
        return
    if result.status == 1 and len(lines) > 1:
        yield f"{len(lines)} lines: {result.err[:1000]!r}"
    last = lines[-1]
    if not all(x.isprintable() and len(x) <= LONGEST for x in lines):
        yield f"not printable, or {len(last)} characters: {result.err[:300]!r}"
    if result.status == 1 and not last.startswith("error: ") and line.path[0] != "bench":
        yield f"no error: {last}"
    if len(last) < 20:
        yield f"not clear: {last}"
    if "vLLM is not installed" not in last and not _names_fault(last, line.faults):
        yield f"names no fault of {[fault[:40] for fault in line.faults]}: {last}"


def _names_fault(message: str, faults: list[str]) -> bool:
    """Whether a message has the start of a name or value that was changed, as is or escaped."""
    forms = (str, lambda x: repr(x)[1:-1], shortened, os.path.normpath, os.path.dirname)
    names = [_plain(form(fault)) for fault in faults for form in forms]
    names += [repr(fault.partition(",")[0]) for fault in faults]  # one of a list
    names += ["''" for fault in faults if not fault.strip()]
    names += [f"option: {fault[:2]}" for fault in faults if fault[:1] == "-"]
    return any(name[:12] in _plain(message) for name in names if name)


def _plain(text: str) -> str:
    """Without what tells `--some-name`, `some_name` and `some name` apart."""
    return re.sub(r"(?<=\w)[-_\s]+(?=\w)|^-+(?=\w)", "", text.lower()).strip()


def _not_json(text: str) -> Iterator[str]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError as error:
        yield f"no JSON: {error}: {text[:200]!r}"


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Mode, size and time of change of everything in a folder."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            info = os.lstat(os.path.join(root, name))
            is_folder = stat.S_ISDIR(info.st_mode)
            times = (0, 0) if is_folder else (info.st_size, info.st_mtime_ns)
            found[os.path.join(root, name)] = (info.st_mode, *times)
    return found


def surprises(line: CommandLine, folder: Path, before: dict[str, Any]) -> Iterator[str]:
    """Files that a command changed although it was not given their names."""
    after = snapshot(folder)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    given = [x for argument in line.arguments for x in (argument, argument.partition("=")[2]) if x]
    # A calibration's tokens are beside its scales, with another suffix.
    named = tuple(os.path.splitext(os.path.abspath(x))[0] for x in given)
    for path in sorted(changed):
        is_scales = os.path.basename(path).startswith("kv_scales.")
        is_input = "/model/" in path and path not in map(os.path.abspath, given) and not is_scales
        if not path.startswith(named) or is_input:
            yield f"changed {path}"
