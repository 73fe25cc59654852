"""Random command lines of `halfbyte`, reproducible by seed, from the parameters of its commands."""

import inspect
import os
import shutil
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import typer

from halfbyte.cli import app

CLOSED_PORT = "http://127.0.0.1:9/v1"
NUMBERS = (
    *(
        "",
        "0",
        "-1",
        "1",
        "2",
        "3",
        "16",
        "100",
        "5000",
        "-0",
        "0.5",
        "1.5",
        "1e3",
        "1e400",
        "1e-320",
        "nan",
    ),
    *("inf", "-inf", "0x10", "1_0", "+5", " 7 ", "\u0663", "1,2", "--3", "x", "true", "None"),
    *(str(2**31), str(2**63), str(-(2**63)), str(2**64), "1" + "0" * 30, "1" * 5000),
)
TEXTS = (
    *("", " ", "x", "frob", "é漢字", "🦙", "\x1b[31mred", "a\nb", "\t\r\v", "\udcff", "x" * 5000),
    *("\u202ereversed", "[bold]x", ":heart:", "%s%n", "{}", "{0}", "$HOME", "${PATH}", "~", "*"),
    *("$(touch ran)", "`touch ran`", "; touch ran", "@prompt", "@/etc/passwd", "HALFBYTE=1"),
    *("-", "--", "-v", "--json", "--help", "=", "a=b", ",", "nvfp4,", "NVFP4", "nvfp4,nvfp4"),
    *("(", "(x+x+)+y", "[", "re:(", "None", "null", "true", "cpu", "cuda", "cuda:99", "meta"),
    *("org/name", "../..", "http://127.0.0.1:0", "http://[::1", "file:///etc/passwd", "auto"),
)
FORMATS = (
    *("auto", "bfloat16", "fp8", "fp8_e5m2", "nvfp4", "nvfp4_4over6", "mxfp4", "int3", "nvfp4 "),
    *("nvfp4,fp8", "turboquant"),
)
BACKENDS = ("reference", "cpu", "triton", "cuda", "auto", "marlin", "reference,cpu", "CPU")
LIKELY: dict[str, tuple[str, ...]] = {
    "kv_cache_dtype": FORMATS,
    **dict.fromkeys(("v_cache_dtype", "k_dtype", "v_dtype"), FORMATS),
    "kv_recipe": ("plain", "balanced", "accurate", "plain,balanced", "fancy"),
    "recipe": ("amax6", "four_over_six", "amax7"),
    "dtype": ("auto", "float32", "bfloat16", "float16", "int8", "torch.float32"),
    **dict.fromkeys(("attention_backend", "linear_backend", "moe_backend", "backends"), BACKENDS),
    "device": ("auto", "cpu", "cuda", "cuda:1", "meta", "cpu:7"),
    "dialect": ("modelopt", "compressed-tensors", "gguf"),
    "weights": ("nvfp4", "nvfp4-a16", "int4"),
    "method": ("rtn", "awq"),
    "heads": ("llama", "gemma", "gpt-oss,gemma", "qwen"),
    "only": ("decode", "^$", ".*", "(a|b"),
    "ignore": ("lm_head", "re:.*layers.0.*", "*q_proj", "re:("),
    **dict.fromkeys(("linear", "moe"), ("auto", "on", "off", "maybe")),
    "shapes": ("32x32", "16X16", "0x16", "2x1x32x32", "2x3x32x32", "gpt", "32x", "16x16,32x16"),
    "stop": ("\n", "x"),
    "url": (CLOSED_PORT, "http://127.0.0.1", "http://127.0.0.1:9/v1?x", "http://a@127.0.0.1"),
    "revision": ("main", "0" * 40, "../x"),
}
"""Right and nearly right values, by parameter; parameters that are not named get the others."""

VALID: dict[tuple[str, ...], dict[str, str]] = {
    ("generate",): {"--prompt": "x = ", "--max-tokens": "2", "--max-model-len": "64"},
    ("eval",): {
        "--text": "text",
        "--max-tokens": "24",
        "--window": "12",
        "--chunk-size": "8",
        "--kv-cache-dtype": "nvfp4",
    },
    ("chat",): {"--prompt": "Hi", "--timeout": "2"},
    ("info",): {},
    ("quantize",): {"--format": "modelopt", "--weights": "nvfp4-a16"},
    ("calibrate",): {"--max-tokens": "16", "--out": "new.json"},
    ("serve",): {},
    ("bench", "attention"): {"--context": "16", "--only": "store", "--kv-cache-dtype": "fp8"},
    ("bench", "linear"): {"--shapes": "32x32", "--m": "1"},
    ("bench", "moe"): {"--shapes": "2x1x32x32", "--m": "1"},
}
"""Options of a small valid run of each command."""

POSITIONAL = {"quantize": ("model", "new"), "calibrate": ("model",), "serve": ("model",)}
ENVIRONMENT = {
    "HALFBYTE_CACHE_DIR": (
        "",
        "cache",
        "text",
        "absent/cache",
        "readonly/cache",
        "null/x",
        "~x",
    ),
    "OPENAI_API_KEY": ("", "key", "a\nb", "é", "\udcff", "x" * 5000),
    "VLLM_PLUGINS": ("", "halfbyte", "other"),
    "COLUMNS": ("1", "0", "-5", "x"),
    "NO_COLOR": ("1",),
}
INSTEAD = {"--prompt-file": ("--prompt",)}
"""Options that a run cannot have together with another."""

SERVE = (
    *(("--config", "PATH"), ("--kv-cache-dtype", "fp8"), ("--additional-config", "{"), ("-h",)),
    *(("--additional-config", '{"halfbyte": {"moe": 3}}'), ("--additional-config.halfbyte.x", "1")),
    *(("--attention-backend", "FLASH_ATTN"), ("--load-format", "dummy"), ("--revision", "x")),
    *(("--attention-config", "[" * 100_000), ("--kv_recipe", "plain"), ("--port", "0")),
    ("--attention-config.backend", "custom"),
)
"""Options of vLLM that `halfbyte serve` reads."""


def commands() -> dict[tuple[str, ...], Any]:
    """All commands of the app by their path, such as `("bench", "moe")`."""
    return dict(_commands(typer.main.get_command(app), ()))


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, found in (inner or {}).items():
        yield from _commands(found, (*path, name))


def make_paths(folder: Path, model: Path) -> list[str]:
    """Files and folders in the current folder that a command may be given."""
    shutil.copytree(model, folder / "model")
    shutil.copytree(model, folder / "broken")
    (folder / "broken" / "model.safetensors").write_bytes(b"\xff" * 100)
    shutil.copytree(model, folder / "readonly")
    (folder / "readonly").chmod(0o500)
    (folder / "no config").mkdir()
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 9)
    (folder / "text").write_text("import os\n\n\ndef main() -> None:\n    print(1)\n" * 8)
    (folder / "existing.json").write_text("{}")
    (folder / "deep.json").write_text("[" * 100_000)
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("absent/file")
    for device in ("null", "zero", "full"):
        # Links, because a fault may replace what it is given.
        (folder / device).symlink_to(f"/dev/{device}")
    (folder / "unreadable").touch(mode=0o000)
    return [
        *("model", "broken", "readonly", "no config", "empty", "binary", "text", "text"),
        *("existing.json", "deep.json", "fifo", "loop", "dangling", "unreadable", "absent"),
        *("absent/file", "readonly/new", "text/new", "new.json", "new", ".", "..", "/", "x" * 300),
        *("model/config.json", "null", "zero", "full", "x/" * 3000),
        *(str(folder / "model"), str(folder / "new 2"), "\udcff", "a\nb", "\x1b[31m", "", "-"),
    ]


@dataclass
class CommandLine:
    """A command line and its surroundings.

    Args:
        path: of the command.
        options: in order, each with its value, if any.
        positional: before or after the options.
        faults: names and values that were changed; an error must name one of them.
        stdin: what standard input is: empty, text, binary, closed or none.
        has_vllm: whether vLLM is found.
        environment: variables that are set, beside those of the test.
    """

    path: tuple[str, ...]
    options: list[tuple[str, ...]]
    positional: list[str]
    stdin: str = "empty"
    has_vllm: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        options = [argument for option in self.options for argument in option]
        return [*self.path, *self.positional, *options]


def make_valid(path: tuple[str, ...], server: str) -> CommandLine:
    """A small valid run of a command."""
    values = {**VALID[path], **({"--url": server} if path == ("chat",) else {})}
    return CommandLine(path, [*values.items()], [*POSITIONAL.get(path[0], ())], has_vllm=True)


def make_command_line(random: Random, paths: list[str], server: str) -> CommandLine:
    """A valid command line, with up to three changes."""
    path = random.choice(list(commands()))
    line = make_valid(path, server)
    if random.random() < 0.03:
        change_command(line, random)
        return line
    line.stdin = random.choice(("empty", "empty", "text", "binary", "closed", "none"))
    line.has_vllm = random.random() < 0.7
    has_json = any("--json" in param.opts for param in commands()[path].params)
    if has_json and random.random() < 0.5:
        line.options.append(("--json",))
    if random.random() < 0.2:
        name = random.choice(list(ENVIRONMENT))
        line.environment[name] = random.choice(ENVIRONMENT[name])
        line.faults += [name, line.environment[name]]
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3))):
        random.choice(CHANGES)(line, random, paths)
    for _ in range(random.choice((0, 0, 1, 2))):
        set_option(line, random, paths)
    return line


def set_option(line: CommandLine, random: Random, paths: list[str]) -> None:
    """Give an option of the command a value, instead of its value so far or in addition."""
    command = commands()[line.path]
    options = [param for param in command.params if param.param_type_name == "option"]
    if not options:
        return
    param = random.choice(options)
    name = random.choice([*param.opts, *param.secondary_opts])
    if param.is_flag:
        value = f"={random.choice(TEXTS)}" if random.random() < 0.1 else ""
        line.options.append((name + value,))
        line.faults += [name, param.name or "", "-="]
        return
    value = _value(command, param.name, random, paths)
    if random.random() < 0.8:
        others = (*param.opts, *INSTEAD.get(name, ()))
        line.faults += others
        line.options = [option for option in line.options if option[0] not in others]
    line.options.append((f"{name}={value}",) if random.random() < 0.2 else (name, value))
    line.faults += [name, param.name or "", value]


def _value(command: Any, name: str, random: Random, paths: list[str]) -> str:
    kind = str(typing.get_type_hints(inspect.unwrap(command.callback)).get(name, str))
    often = random.random() < 0.75
    if name in LIKELY and random.random() < 0.5:
        return random.choice(LIKELY[name])
    if often and ("Path" in kind or name in ("model", "kv_scales", "draft_kv_scales")):
        return random.choice(paths)
    if often and ("int" in kind or "float" in kind or name in ("m", "batch", "context")):
        return random.choice(NUMBERS)
    return random.choice(random.choice((TEXTS, TEXTS, NUMBERS, tuple(paths))))


def drop_option(line: CommandLine, random: Random, paths: list[str]) -> None:
    """Leave out an option that a run needs, or an option's value, after which it is the last."""
    options = [option for option in line.options if len(option) > 1]
    if not options:
        return
    option = random.choice(options)
    line.options.remove(option)
    line.faults += [option[0]]
    # Without others, such as --max-tokens, a run is valid but long.
    if option[0] not in ("--prompt", "--url", "--format"):
        line.options.append(option[:1])
    line.faults += ["standard input", "extra argument"]


def add_unknown(line: CommandLine, random: Random, paths: list[str]) -> None:
    """An option of another command, one that is misspelled, or none at all."""
    command = commands()[random.choice(list(commands()))]
    names = [name for param in command.params for name in param.opts if name.startswith("-")]
    name = random.choice(names or ["--json"])
    what = random.randrange(5)
    if what == 0:
        place = random.randrange(2, len(name)) if len(name) > 2 else 2
        name = name[:place] + name[place + 1 :]
    elif what == 1:
        name = name.upper()
    elif what == 2:
        name = random.choice(("-x", "---", "--\x1b[1m", "--é", "--" + "x" * 5000, "--=", "-vv"))
    elif what == 3:
        name = name.replace("-", "_")
    value = random.choice(TEXTS)
    line.options.append(random.choice(((name,), (name, value), (f"{name}={value}",))))
    line.faults += [name, value, "-="]


def change_positional(line: CommandLine, random: Random, paths: list[str]) -> None:
    """Another, a missing or a surplus positional argument, or a separator."""
    if not line.positional and random.random() < 0.7:
        return set_option(line, random, paths)
    what = random.randrange(4)
    place = random.randrange(len(line.positional) + 1)
    value = random.choice(random.choice((tuple(paths), tuple(paths), TEXTS)))
    if what == 0:
        line.positional.insert(place, value)
    elif what == 1:
        line.options.insert(random.randrange(len(line.options) + 1), ("--",))
        line.faults += ["--", "missing", "extra argument"]
    elif line.positional and what == 2:
        value = line.positional.pop(place - 1)
    elif line.positional:
        line.positional[place - 1] = value
    line.faults += [value, *line.positional, "MODEL", "SOURCE", "DESTINATION", "argument"]
    return None


def change_command(line: CommandLine, random: Random) -> None:
    """Another command's name, or one that does not exist."""
    name = random.choice((*TEXTS, *line.path, "benc", "Generate", "bench", "--version"))
    line.path = (*line.path[:-1], name) if random.random() < 0.7 else (name, *line.path)
    line.faults += [name, "command", "argument", "option", *line.path]


def add_option_of_vllm(line: CommandLine, random: Random, paths: list[str]) -> None:
    """An option that `halfbyte serve` passes on."""
    if line.path[0] != "serve":
        return set_option(line, random, paths)
    option = random.choice(SERVE)
    value = tuple(random.choice(paths) if part == "PATH" else part for part in option)
    if random.random() < 0.2:
        value = (*value[:1], random.choice(TEXTS))
    line.options.append(value)
    line.faults += value
    return None


Change = Callable[[CommandLine, Random, list[str]], None]
CHANGES: tuple[Change, ...] = (
    *(set_option, set_option, set_option, set_option, set_option, add_option_of_vllm),
    *(drop_option, add_unknown, change_positional, change_positional),
)
