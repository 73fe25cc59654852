"""The `halfbyte` command.

Bad input ends in one line on stderr and a non-zero status: 2 for a command line that cannot be
understood, 1 for anything that goes wrong later, 130 for an interrupt, 143 where the process is
asked to end (SIGTERM); what it was writing is removed then. Heavy imports happen inside the
commands, so that `--help` answers at once.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Annotated

import typer

from halfbyte import __version__
from halfbyte.cli.bench import bench
from halfbyte.cli.calibrate import calibrate
from halfbyte.cli.chat import chat
from halfbyte.cli.console import print_error
from halfbyte.cli.environment import remember_users_environment
from halfbyte.cli.evaluate import evaluate
from halfbyte.cli.generate import generate
from halfbyte.cli.info import info
from halfbyte.cli.quantize import quantize
from halfbyte.cli.serve import ServeCommand, serve

app = typer.Typer(
    help="LLMs on an NVFP4 (4-bit) paged KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command("generate")(generate)
app.command("eval")(evaluate)
app.command("chat")(chat)
app.command("info")(info)
app.command("quantize")(quantize)
app.command("calibrate")(calibrate)
# `-h` is handed to vLLM there.
app.command("serve", cls=ServeCommand, context_settings={"help_option_names": ["--help"]})(serve)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"halfbyte {__version__}")
        raise typer.Exit


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Run the command line."""
    with suppress(ValueError):  # in another thread than the first, signals are not ours
        signal.signal(signal.SIGTERM, _end)
    remember_users_environment()
    # Before torch is loaded: threads that spin while they wait make a shared machine crawl.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        # Usage errors are typer's: it prints them and exits with status 2.
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if "--verbose" in sys.argv or "-v" in sys.argv:
            raise
        print_error(error)
        sys.exit(1)
