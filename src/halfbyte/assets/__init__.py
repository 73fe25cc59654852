"""Files that ship with halfbyte: the bundled model, its held-out text and the calibration text.

Texts of the user's, in place of these, are read the same way.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["bundled_model_path", "calibration_text", "heldout_texts"]

_FOLDER = Path(__file__).resolve().parent


def bundled_model_path() -> Path:
    """The folder of the bundled model, as ``from_pretrained`` takes it."""
    return _FOLDER / "bundled"


def heldout_texts() -> dict[str, str]:
    """The texts the bundled model never saw, by name, in alphabetical order.

    They are modules of Python's standard library, newlines and all: their UTF-8 encoding is the
    original file byte for byte.
    """
    # Bytes rather than read_text(), which would translate newlines.
    return {
        path.stem: path.read_bytes().decode("utf-8")
        for path in sorted((_FOLDER / "heldout").glob("*.txt"))
    }


def calibration_text() -> str:
    """A fixed mixed text (prose, code, data, several languages) to run through a model once."""
    return (_FOLDER / "calibration.txt").read_bytes().decode("utf-8")
