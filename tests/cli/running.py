"""The `halfbyte` command in this process, and results of `halfbyte serve`."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from halfbyte.assets import bundled_model_path
from halfbyte.cli import main
from models.zoo import make_model

BUNDLED = str(bundled_model_path())
FILLED_IN = ["--attention-backend", "CUSTOM", "--kv-cache-dtype", "nvfp4"]
SCALES = f"{BUNDLED}/kv_scales.json"

Command = Callable[..., tuple[int, str, str]]


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["halfbyte", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    code = end.value.code
    return code if isinstance(code, int) else 0, captured.out, captured.err


def small_model(folder: Path, architecture: str = "llama") -> Path:
    """A random model with the bundled model's tokenizer, written to `folder`."""
    transformers_logging.disable_progress_bar()  # it would count as the command's stderr
    make_model(architecture, torch.bfloat16, vocab_size=4096).save_pretrained(folder)
    for file in bundled_model_path().glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return folder


class ServeResult:
    """Result of a run: exit status, stderr, and the command that replaces the process."""

    def __init__(self, status: int, out: str, err: str, started: list[str] | None) -> None:
        self.status, self.out, self.err = status, out, err
        self.started = started
        self.environment: dict[str, str] = {}

    @property
    def arguments(self) -> list[str]:
        """Those of `vllm serve`."""
        assert self.started is not None, self.err
        return self.started[self.started.index("serve") + 1 :]

    @property
    def options(self) -> dict[str, object]:
        """halfbyte's section of the additional config."""
        config = self.arguments[self.arguments.index("--additional-config") + 1]
        return json.loads(config)["halfbyte"]


Serve = Callable[..., ServeResult]
