"""Triton kernels on the CPU: modules imported a second time, under Triton's interpreter.

Triton reads `TRITON_INTERPRET` when a function is decorated, and its own library (`tl.sum`,
`tl.max`, ...) is decorated when it is imported. So a process that has imported Triton compiles, and
one test process must do both. `interpreted` makes a second copy of Triton's Python modules and of
ours, decorated for the interpreter; the C++ extension below them is shared. The modules that
other code imports stay as they were.
"""

import ast
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

import halfbyte

_PACKAGE = Path(halfbyte.__file__).parent


@cache
def _with_kernels() -> frozenset[str]:
    """Our modules that have kernels in Triton, and those that import these at their head."""
    imports = {
        ".".join(("halfbyte", *path.relative_to(_PACKAGE).with_suffix("").parts)): _imported(path)
        for path in _PACKAGE.rglob("*.py")
    }
    found = {"triton"}
    while more := {name for name, names in imports.items() if names & found} - found:
        found |= more
    return frozenset(found)


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _is_copied(name: str) -> bool:
    in_triton = name.startswith("triton.") and not name.startswith("triton._C")
    return in_triton or name in _with_kernels()


@cache
def _copies() -> dict[str, ModuleType]:
    """Modules of the second copy, by name; grows with what is imported."""
    return {}


def _replace(modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Make these the imported modules of all that are copied; returns those that were."""
    previous = {name: module for name, module in sys.modules.items() if _is_copied(name)}
    for name in previous:
        del sys.modules[name]
    sys.modules.update(modules)
    # An import also binds a module in its package, and our packages are there but once.
    for name in {**previous, **modules}:
        package, _, leaf = name.rpartition(".")
        if package.startswith("halfbyte.") and name in modules:
            setattr(sys.modules[package], leaf, modules[name])
        elif package.startswith("halfbyte.") and hasattr(sys.modules[package], leaf):
            delattr(sys.modules[package], leaf)
    return previous


def interpreted(module_name: str) -> ModuleType:
    """A module of ours whose Triton kernels run on CPU tensors, in the interpreter.

    Jit functions that it imports from other modules of ours are interpreted, too.
    The same module is returned for the same name.
    """
    originals = _replace(_copies())
    try:
        with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            module = import_module(module_name)
            interpreter: Any = import_module("triton.runtime.interpreter")
        convert = interpreter._convert_float
        if not hasattr(convert, "rounds"):
            interpreter._convert_float = _rounding(convert)
        return module
    finally:
        _copies().update(_replace(originals))


def _rounding(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's conversion of floats; to bfloat16 it truncates, but GPUs round."""

    def rounding(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(x, source, target, mode)
        bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0x7FFF, nearest).astype(np.uint16).reshape(x.shape)

    rounding.rounds = True  # type: ignore[attr-defined]
    return rounding
