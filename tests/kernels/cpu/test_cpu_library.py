"""How the C++ kernels are found, and which instruction set runs."""

from pathlib import Path

import pytest
import torch

from halfbyte.kernels.cpu.library import LEVELS, _load, level, library, set_level


def test_a_library_of_other_sources_is_refused() -> None:
    with pytest.raises(ImportError, match="install halfbyte again"):
        _load(Path(torch._C.__file__))


@pytest.mark.skipif(library() is None, reason="built without a C++ compiler")
def test_levels() -> None:
    unasked = set_level(None)
    assert level() == unasked
    try:
        for i, name in enumerate(LEVELS):
            assert set_level(name) == level()
            assert LEVELS[str(level())] <= i
        assert LEVELS[unasked] <= LEVELS[str(level())], "the highest that this CPU has"
        assert set_level("portable") == "portable"
    finally:
        assert set_level(None) == unasked
