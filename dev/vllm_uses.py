"""What the plug-in needs of vLLM, found in its code."""

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dev.vllm_sources import imports, parameters

_UNCHECKED = ("__init__", "__members__", "__name__", "__post_init__", "value")
"""Attributes of all classes, and of enumerations."""


class Hook(NamedTuple):
    """What the plug-in needs.

    Args:
        name: dotted; of alternatives, separated by `|`, one.
        passed: parameters that a function must have, in this order unless the plug-in calls it.
        supported: all that it may have; None for any.
        positional: how many others the plug-in passes; None if it does not call it.
        is_optional: whether the plug-in can do without it.
    """

    name: str
    passed: tuple[str, ...] = ()
    supported: tuple[str, ...] | None = None
    positional: int | None = None
    is_optional: bool = False


class PluginFile:
    """A file of the plug-in, and what its names stand for in vLLM."""

    def __init__(self, file: Path, objects: dict[str, str]) -> None:
        self.tree = ast.parse(file.read_text())
        nodes = list(ast.walk(self.tree))
        imported = {
            name: source
            for node in nodes
            if isinstance(node, ast.stmt)
            for name, source in imports(node, "halfbyte.plugins.vllm")
        }
        self.imported = {x: y for x, y in imported.items() if y.startswith("vllm.")}
        own = {x.rpartition(".")[2]: y for x, y in objects.items() if x.startswith(f"{file.stem}.")}
        self._names = {x: y for x, y in objects.items() if x not in imported} | own | self.imported
        self._texts: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._texts[node.targets[0].id] = self.text(node.value)

    def text(self, node: ast.AST) -> str:
        """A string that is known here; empty for any other expression."""
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self.text, node.values))
        if isinstance(node, ast.FormattedValue):
            return self.text(node.value)
        if isinstance(node, ast.Name):
            return self._texts.get(node.id, "")
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

    def named(self, node: ast.AST) -> str:
        """The dotted name in vLLM of an expression; empty if it has none."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "")
        if isinstance(node, ast.Subscript):  # a generic class
            return self.named(node.value)
        if not isinstance(node, ast.Attribute) or node.attr in _UNCHECKED:
            return ""
        inner = self.named(node.value)
        return inner and f"{inner}.{node.attr}"

    def hooks(self) -> Iterator[Hook]:
        """All that is found in the file."""
        yield from map(Hook, self.imported.values())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and self.named(node):
                yield Hook(self.named(node))
            elif isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    yield from self._of_texts([key, value] if key else [])
            elif isinstance(node, ast.Tuple):
                yield from self._of_texts(node.elts)

    def overrides(self) -> Iterator[Hook]:
        """Methods of the plug-in's classes, which support the parameters of vLLM's."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in filter(None, map(self.named, node.bases)):
                for x in node.body:
                    if isinstance(x, ast.FunctionDef) and not (x.args.vararg or x.args.kwarg):
                        yield Hook(f"{base}.{x.name}", supported=tuple(parameters(x)))

    def _of_call(self, node: ast.Call) -> Iterator[Hook]:
        function, args = ast.unparse(node.func), node.args
        if name := self.named(node.func):
            passed = tuple(x.arg for x in node.keywords if x.arg)
            yield Hook(name, passed, positional=len(args))
        if function in ("getattr", "hasattr") and self.named(args[0]) and self.text(args[1]):
            is_optional = len(args) == 3 or function == "hasattr"
            yield Hook(f"{self.named(args[0])}.{self.text(args[1])}", is_optional=is_optional)
        for hook in self._of_texts(args):
            yield hook._replace(is_optional=function == "find_spec")
        if function == "after_import" and self.text(args[0]):
            for member in self._members_used(args[1]):
                yield Hook(f"{self.text(args[0])}.{member}")

    def _members_used(self, function: ast.expr) -> Iterator[str]:
        """Of the module that is passed to a function."""
        names = {x.id for x in ast.walk(function) if isinstance(x, ast.Name)}
        called = (x for x in self.tree.body if isinstance(x, ast.FunctionDef) and x.name in names)
        for node in (x for root in (function, *called) for x in ast.walk(root)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "module":
                yield node.attr
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "vars(module)":
                yield self.text(node.slice)

    def _of_texts(self, nodes: Sequence[ast.expr]) -> Iterator[Hook]:
        """A module's name, and the name of its member if that follows."""
        texts = [*map(self.text, nodes), ""]
        for module, member in pairwise(texts):
            if re.fullmatch(r"vllm(\.\w+)+", module):
                yield Hook(f"{module}.{member}".rstrip("."))
