"""Options shared by commands."""

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.console import choose_verbose
from halfbyte.files import check_checkpoint_name


def checkpoint(value: str | None) -> str | None:
    """A checkpoint's name, checked before PyTorch is loaded, which takes seconds.

    Raises:
        typer.BadParameter: an empty name, such as from an unset shell variable.
        ValueError: as `check_checkpoint_name`.
    """
    if value is None:
        return None
    if not value.strip():
        raise typer.BadParameter("expected a folder or hub id, got an empty name")
    check_checkpoint_name(value)
    return value


def given_path(text: str) -> Path:
    """Parse a path; an empty one, such as from an unset shell variable, would be this folder."""
    if not text.strip():
        raise typer.BadParameter("expected a path, got an empty one")
    return Path(text)


Model = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of a checkpoint; by default the bundled model.", callback=checkpoint
    ),
]
DType = Annotated[
    str, typer.Option(help="Dtype of weights and computation: auto, float32, bfloat16 or float16.")
]
AttentionBackend = Annotated[
    str | None,
    typer.Option(help="Attention backend, see `halfbyte info`; by default the best that runs."),
]
LinearBackend = Annotated[
    str | None,
    typer.Option(
        help="Linear backend for NVFP4 weights, see `halfbyte info`; by default the best for each "
        "layer."
    ),
]
MoeBackend = Annotated[
    str | None,
    typer.Option(
        help="MoE backend for 4-bit experts, see `halfbyte info`; by default the best for each "
        "layer."
    ),
]
QuantizeActivations = Annotated[
    bool | None,
    typer.Option(
        help="Whether W4A4 layers quantize their activations, emulated without native FP4 "
        "products; by default only with them."
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        *("--verbose", "-v"),
        help="Also log choices and progress.",
        # Before other options are checked, which may raise errors.
        is_eager=True,
        callback=choose_verbose,
    ),
]
