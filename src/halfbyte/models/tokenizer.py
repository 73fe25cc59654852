"""Loads the tokenizer of a checkpoint after a trial in a separate process.

The `tokenizers` package checks little when it reads `tokenizer.json`: invalid files panic,
sometimes only when a text is encoded, and a huge size aborts the process. A chat template is a
program that may never end. So a subprocess with bounds on time and memory (`tokenizer_trial`) tries
them first.
"""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from halfbyte.checkpoints.errors import read_json
from halfbyte.files import shortened
from halfbyte.models.local_files import (
    LOCAL_FILES,
    ModelLoadError,
    check_is_data,
    local_folder,
    or_load_error,
)
from halfbyte.models.tokenizer_trial import TEXT, UNUSABLE

_FILE = "tokenizer.json"
_ENOUGH = (_FILE, "tokenizer_config.json")
_OTHER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
_SECONDS = 15
"""Time limit of the trial, plus 1 s per MiB of the files."""
_MEMORY = 1 << 30
_TRIAL = Path(__file__).with_name("tokenizer_trial.py")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's files."""
    # pathlib's `is_file` raises for names that are too long.
    return any(os.path.isfile(folder / name) for name in _ENOUGH)


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a checkpoint, or of a folder or hub id that has nothing else.

    Raises:
        ModelLoadError: there is no tokenizer, or it cannot be read.
    """
    folder = Path(path)
    if not has_tokenizer(folder):
        folder = local_folder(path)
    if (folder / "config.json").is_file():
        check_is_data(folder)  # the tokenizer's class may depend on it
    _check_files(folder)
    tokenizer = or_load_error(path, AutoTokenizer.from_pretrained, folder, **LOCAL_FILES)
    _check_usable(path, tokenizer)
    return tokenizer


def _check_files(folder: Path) -> None:
    """Raise ModelLoadError for a folder's tokenizer that is broken, in one line."""
    for name in (*_OTHER_FILES, _FILE):
        file = folder / name
        if not os.path.lexists(file):
            continue
        if not file.is_file():  # reading a pipe would block
            raise ModelLoadError(f"{file}: expected a file")
        if name != _FILE:  # that file may be large; the subprocess reads it
            or_load_error(folder, read_json, file)
    templates = [file for pattern in _TEMPLATES for file in sorted(folder.glob(pattern))]
    tried = [folder / _FILE, folder / "tokenizer_config.json", *templates]
    files = [(str(file.absolute()), file.stat()) for file in tried if file.is_file()]
    if files:
        problem = _problem_of(*((file, state.st_size, state.st_mtime_ns) for file, state in files))
        if problem:
            raise ModelLoadError(problem)


def _check_usable(folder: str | Path, tokenizer: Any) -> None:
    """Raise ModelLoadError for a tokenizer that is empty or cannot encode a text."""
    or_load_error(folder, _encode, tokenizer)
    # Without files, transformers creates an empty tokenizer that encodes every text to nothing.
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise ModelLoadError(f"{folder}: has no tokenizer")


def _encode(tokenizer: Any) -> None:
    ids = tokenizer(TEXT).input_ids
    tokenizer.decode(ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(tokenizer, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name}: expected an id, found {value!r}")


@lru_cache(maxsize=64)
def _problem_of(*files: tuple[str, int, int]) -> str | None:
    """Which file of a tokenizer is unusable, and why; None if all are usable, or no process can be
    started.

    Args:
        files: path, size and time of modification of `tokenizer.json` and of files with templates.
    """
    if not sys.executable:
        return None
    size = sum(size for _, size, _ in files)
    paths = [path for path, _, _ in files]
    tokenizer = paths.pop(0) if Path(paths[0]).name == _FILE else "-"
    command = [sys.executable, "-P", str(_TRIAL), str(_MEMORY + 64 * size), tokenizer, *paths]
    seconds = _SECONDS + (size >> 20)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace").splitlines()
        reason = f"a short text takes more than {seconds} s"
    except OSError:
        return None
    else:
        if result.returncode == 0:
            return None
        printed, reason = result.stdout.splitlines(), "the process ended"
        if result.returncode == UNUSABLE:
            reason = printed.pop()
        elif result.stderr:
            reason = result.stderr.splitlines()[0]
    file = printed[-1] if printed else paths[0] if tokenizer == "-" else tokenizer
    kind = "tokenizer" if file == tokenizer else "chat template"
    return f"{file}: unusable {kind}: {shortened(reason, 300)}"
