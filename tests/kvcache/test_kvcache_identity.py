"""Pages have the same identity only if formats, scales and recipe are the same."""

from dataclasses import replace

import pytest

from halfbyte.kvcache import KVRecipe, KVScales, identity
from halfbyte.kvcache.identity import pages_identity

SCALES = KVScales((1.0, 2.0), (3.0, 0.1), "test")


def test_pages_identity_is_of_what_decides_values() -> None:
    identity = pages_identity("nvfp4", "nvfp4", SCALES)
    assert len(identity) == 64
    assert pages_identity("nvfp4", "nvfp4", replace(SCALES, source="another place")) == identity
    others = [
        pages_identity("nvfp4", "fp8_e4m3", SCALES),
        pages_identity("nvfp4_4over6", "nvfp4", SCALES),
        pages_identity("nvfp4", "nvfp4", None),
        pages_identity("nvfp4", "nvfp4", replace(SCALES, k_amax=(1.0, 2.0000000000000004))),
        pages_identity("nvfp4", "nvfp4", KVScales(SCALES.v_amax, SCALES.k_amax, "swapped")),
    ]
    assert len({identity, *others}) == 6


def test_pages_identity_stays_what_it_is() -> None:
    """Existing files are named by it: it must not change."""
    assert pages_identity("nvfp4", "nvfp4", SCALES).startswith("706c626a72a9842e")


def test_candidates_of_weighted_scales_are_in_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipes = KVRecipe(rotate=True), KVRecipe(rotate=True, weighted_scales=True)
    before = [pages_identity("nvfp4", "nvfp4", SCALES, recipe) for recipe in recipes]
    monkeypatch.setattr(identity, "CANDIDATES", (0, -3, -2, -1, 1, 2, 3, 4, 5))
    after = [pages_identity("nvfp4", "nvfp4", SCALES, recipe) for recipe in recipes]
    assert before[0] == after[0]
    assert before[1] != after[1]
