"""The command as a process: interrupts, signals and closed streams."""

import signal
import subprocess
import sys
import time

import pytest

from halfbyte import __version__
from slow import slow


def test_command_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "halfbyte"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert version.stdout == f"halfbyte {__version__}\n"
    broken = subprocess.run(
        [*command, "generate", "--prompt", "x", "--model", "/none"], capture_output=True, text=True
    )
    assert broken.returncode == 1
    assert broken.stderr == "error: /none: no such folder\n"


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["abacus"], 2)])
@pytest.mark.parametrize("is_last", [False, True])
def test_interrupts_while_leaving_are_silent(
    arguments: list[str], status: int, is_last: bool
) -> None:
    """Before Python's last steps they end the process at once; then its status is settled."""
    program = f"""
import atexit, os, signal
from unittest.mock import patch
def interrupt_at_exit():
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
if {is_last}:
    interrupt_at_exit()
from halfbyte.cli import main, signals
end_at_once = signals.end_at_once
def end_then_interrupt():
    end_at_once()
    if not {is_last}:
        interrupt_at_exit()
with patch.object(signals, "end_at_once", end_then_interrupt):
    main()
"""
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == (status if is_last else 130)
    assert ended.stdout.startswith("halfbyte " if status == 0 else "")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("module", ["halfbyte.cli", "typer", "halfbyte.cli.serve"])
def test_interrupts_while_modules_are_imported_are_silent(module: str) -> None:
    """Each sends itself what Ctrl-C sends."""
    program = f"""
import os, signal, sys
class Interrupter:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupter())
from halfbyte.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", program, "info"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handles", [False, True])
def test_signals_that_a_library_drops_end_the_command(number: int, handles: bool) -> None:
    """As torch does while it imports NumPy. What handles the exception is not interrupted."""
    program = f"""
import os, sys, time
class Library:
    def find_spec(self, name, *_):
        if name != "torch":
            return
        sys.meta_path.remove(self)
        try:
            os.kill(os.getpid(), {int(number)})
        except BaseException:
            if {handles}:
                time.sleep(1.2)
                print("removed", flush=True)
                raise
        time.sleep(50)
        os._exit(99)
sys.meta_path.insert(0, Library())
from halfbyte.__main__ import main
main()
"""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program, "info"], capture_output=True, text=True)
    assert time.monotonic() - start < 40
    assert (ended.returncode, ended.stderr) == (128 + number, "")
    assert ended.stdout == ("removed\n" if handles else "")


@pytest.mark.skipif(sys.platform == "win32", reason="closes descriptors in a POSIX shell")
@pytest.mark.parametrize(
    ("arguments", "closed", "status", "printed"),
    [
        ("--version", ">&-", 0, ""),
        ("--version", "2>&-", 0, f"halfbyte {__version__}\n"),
        slow("generate --prompt x --max-tokens 2 --json", ">&-", 0, ""),
        ("generate --model /nowhere --prompt x", ">&- 2>&- <&-", 1, ""),
        ("--nonsense", "2>&-", 2, ""),
    ],
)
def test_closed_streams(arguments: str, closed: str, status: int, printed: str) -> None:
    command = f'exec "$0" -m halfbyte {arguments} {closed}'
    ended = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, printed, "")
