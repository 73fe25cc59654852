"""The text behind the bundled model: CPython's standard library, split three ways.

The library's ``.py`` files fall into

* **held-out** modules, which nothing is ever trained or tuned on; they ship with the package and
  are what ``halfbyte eval`` measures by default;
* **validation** modules, used to choose between training settings, so that the held-out figures
  stay an honest measurement;
* **training** files: everything else, less whatever would leak the first two (their tests, files
  that quote them), tables of numbers, very long files and exact duplicates.

The reference manual that :mod:`pydoc` carries as one big dict of string literals is turned back
into the English it holds, which gives the model some prose to go with the docstrings.

Run as a script, it writes the held-out modules as the text files that ship::

    python dev/bundled_model/corpus.py --stdlib /usr/lib/python3.11 --out heldout
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = (
    "configparser.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "http/cookies.py",
    "json/encoder.py",
    "sched.py",
    "shlex.py",
    "tempfile.py",
    "textwrap.py",
    "zipapp.py",
)

VALIDATION = (
    "cmd.py",
    "filecmp.py",
    "fileinput.py",
    "getopt.py",
    "gettext.py",
    "selectors.py",
    "urllib/robotparser.py",
)

# Kept out of training because they repeat held-out or validation text: the modules' own tests, and
# the files found to quote more than 1 % of a held-out module (beyond a licence header).
LEAKS = (
    "idlelib/idle_test/test_calltip.py",  # quotes the docstring of textwrap.TextWrapper
    "json/__init__.py",  # shares the documentation of JSONEncoder's arguments
    "test/test_cmd.py",
    "test/test_configparser.py",
    "test/test_filecmp.py",
    "test/test_fileinput.py",
    "test/test_fractions.py",
    "test/test_getopt.py",
    "test/test_gettext.py",
    "test/test_graphlib.py",
    "test/test_heapq.py",
    "test/test_http_cookies.py",
    "test/test_json/",
    "test/test_robotparser.py",
    "test/test_sched.py",
    "test/test_selectors.py",
    "test/test_shlex.py",
    "test/test_tempfile.py",
    "test/test_textwrap.py",
    "test/test_zipapp.py",
)

TOPICS = "pydoc_data/topics.py"
MAX_CHARS = 310_000
MAX_NUMERIC_SHARE = 0.12
_NUMERIC = re.compile(r"0[xX][0-9a-fA-F]+|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[0-7]{3}|[0-9]+")


@dataclass(frozen=True)
class Corpus:
    """Texts by path relative to the standard library's folder."""

    train: dict[str, str]
    validation: dict[str, str]
    held_out: dict[str, str]


def load_corpus(stdlib: Path) -> Corpus:
    """Read the standard library under ``stdlib`` and split it as this module's docstring says."""
    if not (stdlib / "os.py").is_file():
        raise FileNotFoundError(f"{stdlib} is no Python standard library: it has no os.py")
    train: dict[str, str] = {}
    seen: set[bytes] = set()
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if _is_foreign(name) or name in HELD_OUT or name in VALIDATION or _leaks(name):
            continue
        text = _read(path)
        if text is None:
            continue
        if name == TOPICS:
            train.update(_topics(text))
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or not _is_worth_training_on(text):
            continue
        seen.add(digest)
        train[name] = text
    return Corpus(train, _read_named(stdlib, VALIDATION), _read_named(stdlib, HELD_OUT))


def _is_foreign(name: str) -> bool:
    """True for what lies in the folder without being part of the standard library's source."""
    parts = name.split("/")
    return any(part in {"site-packages", "dist-packages", "__pycache__"} for part in parts)


def _leaks(name: str) -> bool:
    return any(name == leak or (leak[-1] == "/" and name.startswith(leak)) for leak in LEAKS)


def _read(path: Path) -> str | None:
    """The file's text, or None for the few test files that are deliberately not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read_named(stdlib: Path, names: tuple[str, ...]) -> dict[str, str]:
    return {name: (stdlib / name).read_bytes().decode("utf-8") for name in names}


def _is_worth_training_on(text: str) -> bool:
    """False for empty files, very long files and tables (character maps, binary test data)."""
    if not text.strip() or len(text) > MAX_CHARS:
        return False
    numeric = sum(len(match) for match in _NUMERIC.findall(text))
    return numeric <= MAX_NUMERIC_SHARE * len(text)


def _topics(source: str) -> dict[str, str]:
    """The reference manual's chapters, decoded from the dict literal that holds them."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            topics: dict[str, str] = ast.literal_eval(node.value)
            # Several topics share one chapter word for word.
            unique = {text: name for name, text in sorted(topics.items(), reverse=True)}
            return {f"{TOPICS}:{name}": text for text, name in unique.items()}
    return {}


def write_held_out(corpus: Corpus, folder: Path) -> None:
    """Write each held-out module as it is, ``json/encoder.py`` under ``json_encoder.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in corpus.held_out.items():
        stem = name.removesuffix(".py").replace("/", "_")
        (folder / f"{stem}.txt").write_bytes(text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the held-out modules as text files.")
    parser.add_argument("--stdlib", type=Path, required=True, help="the standard library's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the texts to")
    options = parser.parse_args()
    write_held_out(load_corpus(options.stdlib), options.out)


if __name__ == "__main__":
    main()
