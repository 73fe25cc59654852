"""CUDA sources on the CPU: compiled by a C++ compiler as they are, but for inline assembly.

`cuda_on_host.h` has the part of CUDA that they need. Every `asm` statement becomes the C++ that
stands for its text in `_ASSEMBLY`; a source with another one is refused. So it is worth running
sources here whose logic is in C++.
"""

import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from halfbyte.kernels import nvrtc

SOURCES = Path(nvrtc.__file__).parent
_HEADER = Path(__file__).with_suffix(".h")
_COMPILER = shutil.which("c++") or shutil.which("g++")
_OPTIONS = (
    *("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"),
    "-fno-strict-aliasing",  # vectors are read from arrays of scalars, as CUDA allows
    "-fvisibility=hidden",  # keeps apart what several libraries define alike
    "-U_FORTIFY_SOURCE",  # whose longjmp refuses to go to another stack, as fibers do
)

needs_compiler = pytest.mark.skipif(
    _COMPILER is None or sys.platform != "linux", reason="needs a C++ compiler, on Linux"
)

_HERE = "cuda_on_host::"
_ASSEMBLY = {
    "ex2.approx.ftz.f32 %0, %1;": f"%0 = {_HERE}flush(std::exp2({_HERE}flush(%1)))",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": f"%0 = {_HERE}to_bfloat16(%1) << 16 | {_HERE}to_bfloat16(%2)",
    "cvt.rn.f16x2.f32 %0, %1, %2;": f"%0 = {_HERE}to_float16(%1) << 16 | {_HERE}to_float16(%2)",
    "griddepcontrol.wait;": "",
    **{
        # In headers that a source includes, but nothing that it calls.
        text: f'{_HERE}refuse("{text.split()[0]}")'
        for text in (
            "ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];",
            "st.shared.f32 [%0], %1;",
            "{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}",
            "{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}",
        )
    },
}
_STATEMENT = re.compile(r'\basm\s*(?:volatile\s*)?\(\s*"([^"]*)"(.*?)\)\s*;', re.DOTALL)
_OPERAND = re.compile(r'"[=+]?\w"\s*\(((?:[^()]|\([^()]*\))*)\)')
_SHARED = re.compile(r"\b__shared__\s[\w\s]*?(\w+)\s*((?:\[[^\]]*\]\s*)*);")
_INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)
_KERNEL = re.compile(r"__global__ void [^{;]*?(\w+)\(\w+ \w+\)")


def build(name: str, macros: dict[str, int | None], folder: Path = SOURCES) -> ctypes.CDLL:
    """The kernels of `name.cu`, compiled once per process.

    Args:
        name, macros: as for `nvrtc.compile_source`.
        folder: of the source and what it includes.

    Raises:
        ValueError: inline assembly that has no C++ here.
        RuntimeError: the compiler refused the source.
    """
    return _build(name, tuple(macros.items()), folder)


def launch(function: Any, grid: int, threads: int, params: ctypes.Structure) -> None:
    """Run a kernel, such as `build(...).plan_work`, to its end.

    Args:
        grid: CTAs.
        threads: of a CTA, a multiple of 32.
        params: the kernel's only argument.

    Raises:
        RuntimeError: threads that did not come to the same barrier or shuffle, or something that
            only a GPU has.
    """
    message = function(grid, threads, ctypes.byref(params))
    if message is not None:
        raise RuntimeError(message.decode())


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda_on_host_")


@cache
def _build(name: str, macros: tuple[tuple[str, int | None], ...], folder: Path) -> ctypes.CDLL:
    assert _COMPILER is not None, "tests that come here need a compiler"
    build_folder = Path(tempfile.mkdtemp(dir=_folder().name))
    _translate(f"{name}.cu", folder, build_folder)
    kernels = _KERNEL.findall((folder / f"{name}.cu").read_text())
    main, library = build_folder / "main.cpp", build_folder / "library.so"
    main.write_text(
        f'#include "{_HEADER}"\n#include "{name}.cu"\n'
        + "".join(
            f'extern "C" __attribute__((visibility("default"))) const char* launch_{kernel}'
            f"(int grid, int threads, const void* params) {{\n"
            f"  return {_HERE}launch({kernel}, grid, threads, params);\n}}\n"
            for kernel in kernels
        )
    )
    options = [f"-D{key}" + ("" if value is None else f"={value}") for key, value in macros]
    command = [_COMPILER, *_OPTIONS, *options, str(main), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{name}.cu on the host: {result.stderr}")
    loaded = ctypes.CDLL(str(library))
    for kernel in kernels:
        function = getattr(loaded, f"launch_{kernel}")
        function.restype = ctypes.c_char_p
        setattr(loaded, kernel, function)
    return loaded


def _translate(name: str, folder: Path, to: Path) -> None:
    """Write what `name` becomes on the host, and what it includes, line by line."""
    text = (folder / name).read_text()
    for included in _INCLUDE.findall(text):
        if not (to / included).exists():
            _translate(included, folder, to)
    text = _STATEMENT.sub(_host_statement, text)
    if re.search(r"\basm\b\s*(volatile\s*)?\(", text):
        raise ValueError(f"{name}: an asm statement of an unknown form")
    text = _SHARED.sub(rf"\g<0> {_HERE}begin_with_garbage(&\1, sizeof \1);", text)
    (to / name).write_text(f'#line 1 "{folder / name}"\n{text}')


def _host_statement(match: re.Match[str]) -> str:
    text, operands = match[1], _OPERAND.findall(match[2])
    if text not in _ASSEMBLY:
        raise ValueError(f"inline assembly that has no C++ here: {text}")
    statement = re.sub(r"%(\d)", lambda number: operands[int(number[1])], _ASSEMBLY[text])
    return f"{statement};" + "\n" * match[0].count("\n")
