"""Run a function right after another package's module is imported.

So halfbyte can extend a package without importing it, and `import halfbyte` stays light.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

logger = logging.getLogger("halfbyte")


def after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function(module)` now if the module is imported already, else right after its import.

    A second call with the same name and function has no effect while the first is pending. If the
    function fails, that is logged in one line, and the package stays unchanged.
    """
    if name in sys.modules:
        _call(function, sys.modules[name])
        return
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _AfterImport)]
    if not any((finder.name, finder.function) == (name, function) for finder in waiting):
        sys.meta_path.insert(0, _AfterImport(name, function))


def _call(function: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        function(module)
    except Exception as error:  # an untested version of the package must still import
        logger.warning(
            "halfbyte does not extend %s: %s: %s", module.__name__, type(error).__name__, error
        )


class _AfterImport(MetaPathFinder):
    """Finds one module once, by the other finders, and calls a function after its import."""

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
            _call(self.function, module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
