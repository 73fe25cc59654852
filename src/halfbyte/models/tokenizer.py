"""Loads the tokenizer of a checkpoint after a trial in a separate process.

The `tokenizers` package checks little when it reads `tokenizer.json`: invalid files panic,
sometimes only when a text is encoded, and a huge size aborts the process. So a subprocess with
bounds on time and memory tries the file first.
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

_FILE = "tokenizer.json"
_ENOUGH = (_FILE, "tokenizer_config.json")
_OTHER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEXT = "A text: 12 words, x = f(y)\\n\\ttabs, é and 漢字."
_SECONDS = 15
"""Time limit of the trial, plus 1 s per MiB of the file."""
_MEMORY = 1 << 30
_TRY = f"""
import sys
try:
    import resource
    limit = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass  # on Windows, or under a limit that is lower still
from tokenizers import Tokenizer
try:
    tokenizer = Tokenizer.from_file(sys.argv[1])
    for text in ("", "a", {_TEXT!r}):
        tokenizer.decode(tokenizer.encode(text).ids)
except BaseException as error:
    print(type(error).__name__, str(error)[:2000])
    sys.exit(3)
"""


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
    file = folder / _FILE
    if file.is_file():
        state = file.stat()
        reason = _reason_against(str(file.absolute()), state.st_size, state.st_mtime_ns)
        if reason:
            raise ModelLoadError(f"{file}: unusable tokenizer: {reason}")


def _check_usable(folder: str | Path, tokenizer: Any) -> None:
    """Raise ModelLoadError for a tokenizer that is empty or cannot encode a text."""
    or_load_error(folder, _encode, tokenizer)
    # Without files, transformers creates an empty tokenizer that encodes every text to nothing.
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise ModelLoadError(f"{folder}: has no tokenizer")


def _encode(tokenizer: Any) -> None:
    ids = tokenizer(_TEXT).input_ids
    tokenizer.decode(ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(tokenizer, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name}: expected an id, found {value!r}")


@lru_cache(maxsize=64)
def _reason_against(file: str, size: int, mtime_ns: int) -> str | None:
    """Why a `tokenizer.json` is unusable; None if it is usable, or no process can be started."""
    if not sys.executable:
        return None
    command = [sys.executable, "-c", _TRY, file, str(_MEMORY + 64 * size)]
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
    except subprocess.TimeoutExpired:
        return f"encoding a short text takes more than {seconds} s"
    except OSError:
        return None
    if result.returncode == 0:
        return None
    if result.returncode == 3:
        return shortened(result.stdout, 300)
    return shortened(result.stderr.splitlines()[0] if result.stderr else "the process ended", 300)
