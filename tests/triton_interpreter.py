"""Triton kernels on the CPU: modules imported a second time, under Triton's interpreter.

Triton reads `TRITON_INTERPRET` when a function is decorated, and its own library (`tl.sum`,
`tl.max`, ...) is decorated when it is imported. So a process that has imported Triton compiles, and
one test process must do both. `interpreted` makes a second copy of Triton's Python modules and of
ours, decorated for the interpreter; the C++ extension below them is shared. The modules that
anybody else imports stay as they were.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

import halfbyte.kernels as our_kernels

_OURS = our_kernels.__name__ + "."


def _is_copied(name: str) -> bool:
    in_triton = name == "triton" or name.startswith("triton.")
    return name.startswith(_OURS) or (in_triton and not name.startswith("triton._C"))


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
    # An import also binds a module in its package, and this package there is but once.
    for name in {**previous, **modules}:
        leaf = name.removeprefix(_OURS)
        if leaf != name and name in modules:
            setattr(our_kernels, leaf, modules[name])
        elif leaf != name and hasattr(our_kernels, leaf):
            delattr(our_kernels, leaf)
    return previous


def interpreted(module_name: str) -> ModuleType:
    """A module under `halfbyte.kernels` whose kernels run on CPU tensors, in the interpreter.

    Jit functions that it imports from other modules of `halfbyte.kernels` are interpreted, too.
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
    """The interpreter's conversion of floats: to bfloat16 it cuts off, where GPUs round."""

    def rounding(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(x, source, target, mode)
        bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0x7FFF, nearest).astype(np.uint16).reshape(x.shape)

    rounding.rounds = True  # type: ignore[attr-defined]
    return rounding
