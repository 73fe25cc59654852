"""Call a function with a module of another package as soon as that is imported.

So that halfbyte can add to a package without importing it: `import halfbyte` stays light.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function(module)` now if the module is imported already, else right after its import.

    A second call with the same name and function does nothing while the first still waits.
    """
    if name in sys.modules:
        function(sys.modules[name])
        return
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _AfterImport)]
    if not any((finder.name, finder.function) == (name, function) for finder in waiting):
        sys.meta_path.insert(0, _AfterImport(name, function))


class _AfterImport(MetaPathFinder):
    """Finds one module, once, as the other finders do, and lets a function see it."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self.function(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
