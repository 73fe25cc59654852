"""The `halfbyte` command.

Errors are one line on stderr and a non-zero exit status: 2 for an invalid command line, 1 for later
errors, 130 for an interrupt, 143 for SIGTERM, after which partial output is removed. Heavy imports
are inside the commands, so that `--help` is fast.
"""

import os
import sys
from typing import Annotated

import typer

from halfbyte import __version__
from halfbyte.cli import console, signals
from halfbyte.cli.bench import bench
from halfbyte.cli.calibrate import calibrate
from halfbyte.cli.chat import chat
from halfbyte.cli.environment import remember_users_environment
from halfbyte.cli.evaluate import evaluate
from halfbyte.cli.generate import generate
from halfbyte.cli.info import info
from halfbyte.cli.quantize import quantize
from halfbyte.cli.serve import ServeCommand, serve
from halfbyte.cli.usage import ShortUsageErrors

app = typer.Typer(
    cls=ShortUsageErrors,
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
# `-h` is passed to vLLM there.
app.command("serve", cls=ServeCommand, context_settings={"help_option_names": ["--help"]})(serve)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"halfbyte {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    signals.install()
    console.start()
    remember_users_environment()
    # Before torch is loaded: spinning threads slow down a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        # typer prints usage errors and exits with status 2.
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit:
        if (status := signals.status()) is not None:
            sys.exit(status)
        raise
    except Exception as error:
        if (status := signals.status()) is not None:
            sys.exit(status)
        if console.is_verbose():
            raise
        console.print_error(error)
        sys.exit(1)
    finally:
        signals.end_at_once()
