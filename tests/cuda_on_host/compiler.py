"""CUDA sources compiled by a C++ compiler, unchanged except for inline assembly.

`cuda.h` has the part of CUDA that they need. Every `asm` statement becomes the C++ that
stands for its text in `assembly.py`, most of it in `ptx.h`, `wgmma.h` and `bulk.h`; a source with
another one is refused.

Libraries stay in `.pytest_cache/cuda_on_host`, named by a hash of everything that they are made
of: test workers share them, and the next run finds them again.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from cuda_on_host.assembly import ASSEMBLY, HERE
from halfbyte.kernels.runtime import nvrtc

SOURCES = Path(nvrtc.__file__).parents[2]
_HEADERS = Path(__file__).parent
_CACHE = Path(__file__).parents[2] / ".pytest_cache" / "cuda_on_host"
_KEPT_SECONDS = 7 * 24 * 3600
"""Libraries that nobody has used for so long are removed."""
_COMPILER = shutil.which("c++") or shutil.which("g++")
_OPTIONS = (
    *("-std=c++17", "-O1", "-w", "-fPIC", "-ffp-contract=off"),
    "-fno-strict-aliasing",  # vectors are read from arrays of scalars, as CUDA allows
    "-fvisibility=hidden",  # keeps apart what several libraries define alike
    "-U_FORTIFY_SOURCE",  # whose longjmp refuses to go to another stack, as fibers do
)

needs_compiler = pytest.mark.skipif(
    _COMPILER is None or sys.platform != "linux", reason="needs a C++ compiler, on Linux"
)

_STATEMENT = re.compile(
    r'\basm\s*(?:volatile\s*)?\(\s*((?:(?:"[^"]*"|\w+(?:\(\w*\))?)\s*)+)(.*?)\)\s*;', re.DOTALL
)
_TEXT = re.compile(r'"([^"]*)"|(\w+)')
_OPERAND = re.compile(r'"[=+]?\w"\s*\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)')
_SHARED = re.compile(
    r"\b(extern\s+)?__shared__\s(?:__align__\((\d+)\)\s)?([\w\s]*?)(\w+)\s*((?:\[[^\]]*\]\s*)*);"
)
_INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)
_KERNEL = re.compile(r"__global__ void ([^{;]*?)(\w+)\([\w\s,]*\)\s*\{")
"""A kernel's declaration: attributes (with the cluster size), then its name."""


def library_of(
    name: str, macros: Sequence[tuple[str, int | None]], folder: Path
) -> tuple[Path, list[str]]:
    """Compile a source unless that has been done, see `build`.

    Returns:
        The library, and the kernels for each of which it has a function `launch_KERNEL`.
    """
    files: dict[str, str] = {}
    _translate(name, folder, files)
    kernels = _KERNEL.findall((folder / name).read_text())
    files["main.cpp"] = _main(name, kernels)
    options = [f"-D{key}" + ("" if value is None else f"={value}") for key, value in macros]
    path = _cached(
        "library.so", files, ["-shared", *options], "main.cpp", [_header().parent, _HEADERS]
    )
    return path, [kernel for _, kernel in kernels]


@cache
def _header() -> Path:
    """`bulk.h` and what it includes, precompiled: more than half of a compilation otherwise."""
    files = {path.name: path.read_text() for path in _HEADERS.glob("*.h")}
    return _cached("bulk.h.gch", files, ["-x", "c++-header"], "bulk.h", [])


def _cached(
    product: str, files: dict[str, str], options: list[str], main: str, include: list[Path]
) -> Path:
    """What the compiler makes of `main`, one of `files`; those lie beside it."""
    assert _COMPILER is not None, "tests that come here need a compiler"
    command = [_COMPILER, *_OPTIONS, *options, *(f"-I{folder}" for folder in include)]
    key = hashlib.sha256(repr((_version(), command, sorted(files.items()))).encode()).hexdigest()
    folder = _CACHE / key[:24]
    _CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / product).exists():
            _remove_unused()
            _compile(command, files, main, folder / product)
    folder.touch()
    return folder / product


@cache
def _version() -> str:
    assert _COMPILER is not None
    return subprocess.check_output([_COMPILER, "--version"], text=True)


def _compile(command: list[str], files: dict[str, str], main: str, product: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_CACHE) as temporary:
        for name, text in files.items():
            path = Path(temporary, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        made = Path(temporary, "made")
        command = [*command, f"-I{temporary}", f"{temporary}/{main}", "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{main} on the host: {result.stderr}")
        product.parent.mkdir(exist_ok=True)
        made.rename(product)


def _remove_unused() -> None:
    long_ago = time.time() - _KEPT_SECONDS
    for path in _CACHE.iterdir():
        if path.is_dir() and path.stat().st_mtime < long_ago:
            shutil.rmtree(path, ignore_errors=True)


def _main(name: str, kernels: list[tuple[str, str]]) -> str:
    """A source that includes the translated one and has a function to launch each kernel."""
    return (
        f'#include "bulk.h"\n#include "{name}"\n'
        # Of what stands before a kernel's name, this leaves the size of its clusters, or nothing.
        "#undef __cluster_dims__\n#define __cluster_dims__(x, y, z) x\n"
        "inline int cluster_size(int x = 1) { return x; }\n"
        'extern "C" __attribute__((visibility("default"))) void set_late'
        "(const unsigned char* begin, const unsigned char* before, size_t bytes) {"
        f" {HERE}late = {{begin, before, bytes}}; {HERE}waits = 0; }}\n"
        'extern "C" __attribute__((visibility("default"))) int count_waits()'
        f" {{ return {HERE}waits; }}\n"
        + "".join(
            f'extern "C" __attribute__((visibility("default"))) const char* launch_{kernel}'
            "(int at_once, int grid, int threads, int shared_bytes, const void* const* arguments) {"
            "\n"
            f"  const int cluster = cluster_size({' '.join(before.split())});\n"
            f"  return {HERE}launch({kernel}, cluster, at_once, grid, threads, shared_bytes, "
            "arguments);\n"
            "}\n"
            for before, kernel in kernels
        )
    )


def _translate(name: str, folder: Path, files: dict[str, str]) -> None:
    """Add what `name` becomes on the host, and what it includes, line by line, to `files`."""
    source = folder / name
    if not source.exists():
        source = SOURCES / name
    text = source.read_text()
    files[name] = ""  # seen
    for included in _INCLUDE.findall(text):
        if included not in files:
            _translate(included, folder, files)
    text = _STATEMENT.sub(_host_statement, text)
    if re.search(r"\basm\b\s*(volatile\s*)?\(", text):
        raise ValueError(f"{name}: an asm statement of an unknown form")
    text = _SHARED.sub(_host_variable, text)
    files[name] = f'#line 1 "{source}"\n{text}'


def _host_variable(match: re.Match[str]) -> str:
    is_dynamic, alignment, kind, name = match[1], match[2], match[3], match[4]
    if is_dynamic:
        return f"{kind}* const {name} = ({kind}*){HERE}dynamic_shared({alignment});"
    return f"{match[0]} {HERE}begin_with_garbage(&{name}, sizeof {name});"


def _host_statement(match: re.Match[str]) -> str:
    """The C++ of an `asm` statement; adjacent literals, and a macro before them, are one text."""
    text = "".join(f"{macro} " if macro else part for part, macro in _TEXT.findall(match[1]))
    text = re.sub(", *", ", ", text)  # with or without a space
    operands = _OPERAND.findall(match[2])
    if text in ASSEMBLY:
        statement = re.sub(r"%(\d)", lambda number: operands[int(number[1])], ASSEMBLY[text])
    else:
        raise ValueError(f"inline assembly that has no C++ here: {text}")
    return f"{statement};" + "\n" * match[0].count("\n")
