"""vLLM's definitions, read from its sources without importing them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_REGISTERS = ("self.register_buffer", "self.register_parameter")


class Found(NamedTuple):
    """A definition in a module of vLLM; without a node, what another package defines."""

    module: str
    node: ast.AST | None = None


class Sources:
    """Definitions in vLLM's modules by dotted names.

    Args:
        folder: of the package.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, Found] | None] = {}

    def find(self, name: str) -> Found | None:
        """None if it is not there."""
        if name.partition(".")[0] != "vllm":
            return Found("")
        parts = name.split(".")
        for n in range(len(parts), 0, -1):
            module = ".".join(parts[:n])
            if self._names(module) is not None:
                break
        found: Found | None = Found(module, ast.Module([], []))
        for part in parts[n:]:
            found = found and self._member(found, part)
        return found

    def _member(self, found: Found, name: str) -> Found | None:
        """Of a module, a class and its bases, or the class of an annotated name."""
        module, node = found
        if isinstance(node, ast.Module):
            inside = (self._names(module) or {}).get(name)
            if inside is None or not isinstance(inside.node, ast.alias):
                return inside
            return self.find(inside.module)
        if isinstance(node, ast.ClassDef):
            own = _members(node).get(name)
            bases = (self._class(module, base) for base in node.bases)
            inherited = (self._member(base, name) for base in bases if base)
            return Found(module, own) if own else next(filter(None, inherited), None)
        kind = getattr(node, "annotation", None) or getattr(node, "returns", None)
        of = self._class(module, kind) if kind else None
        return self._member(of, name) if of else Found("")

    def _class(self, module: str, expression: ast.AST) -> Found | None:
        """The first of vLLM's classes in an annotation or a base."""
        text = ast.unparse(expression)
        found = (self.find(f"{module}.{name}") for name in re.findall(r"\b[A-Z_]\w+", text))
        return next((x for x in found if x and isinstance(x.node, ast.ClassDef)), None)

    def _names(self, module: str) -> dict[str, Found] | None:
        """Of a module, imports with the names that they stand for; None if there is no module."""
        if module in self._known:
            return self._known[module]
        base = self._folder.joinpath(*module.split(".")[1:])
        files = [x for x in (base / "__init__.py", base.with_suffix(".py")) if x.is_file()]
        names: dict[str, Found] | None = self._known.setdefault(module, {} if files else None)
        if names is None:
            return None
        package = module if files[0].name == "__init__.py" else module.rpartition(".")[0]
        for node in statements(ast.parse(files[0].read_text()).body):
            for name, source in imports(node, package):
                if name == "*":
                    for other, found in (self._names(source[:-2]) or {}).items():
                        names.setdefault(other, found)
                else:
                    names.setdefault(name, Found(source, ast.alias(name)))
            for name in _defined(node):
                names.setdefault(name, Found(module, node))
        return names


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module or a class, and those under its conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            parts = (getattr(node, name, []) for name in ("body", "orelse", "finalbody"))
            handlers = (handler.body for handler in getattr(node, "handlers", []))
            for part in (*parts, *handlers):
                yield from statements(part)


def imports(node: ast.stmt, package: str) -> Iterator[tuple[str, str]]:
    """Names that an import defines, and what they stand for.

    Args:
        node: any statement.
        package: that contains its module.
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name
    elif isinstance(node, ast.ImportFrom):
        outer = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
        for alias in node.names:
            source = ".".join([*outer, *filter(None, [node.module]), alias.name])
            yield alias.asname or alias.name, source


def parameters(function: ast.FunctionDef, is_required: bool = False) -> list[str]:
    """Names of a function's parameters, without the object or class of a method.

    Args:
        function: of a module or a class.
        is_required: only those without a default.
    """
    args = function.args
    positional = [x.arg for x in (*args.posonlyargs, *args.args)]
    if is_required:
        positional = positional[: len(positional) - len(args.defaults)]
    named = [
        x.arg
        for x, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        if default is None or not is_required
    ]
    return [*positional[positional[:1] in (["self"], ["cls"]) :], *named]


def _defined(node: ast.AST) -> list[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return [x.id for x in targets if isinstance(x, ast.Name)]


@cache
def _members(node: ast.ClassDef) -> dict[str, ast.AST]:
    """What a class defines, and what its methods set and register."""
    found: dict[str, ast.AST] = {name: x for x in statements(node.body) for name in _defined(x)}
    for x in ast.walk(node):
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store):
            if isinstance(x.value, ast.Name) and x.value.id == "self":
                found.setdefault(x.attr, x)
        elif isinstance(x, ast.Call) and ast.unparse(x.func) in _REGISTERS:
            found.setdefault(ast.unparse(x.args[0]).strip("'"), x)
    return found
