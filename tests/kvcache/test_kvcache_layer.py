"""Scales and transform of a layer: from amax, its formats and the recipe."""

import pytest
import torch

from halfbyte.kvcache import KVScales
from halfbyte.kvcache.layer import LayerQuantization
from halfbyte.kvcache.recipe import RECIPES
from halfbyte.layouts import KVCacheDType
from kvcache.transforms import make_calibration

NVFP4, FP8, MXFP4, BF16 = map(KVCacheDType.parse, ("nvfp4", "fp8", "mxfp4", "bfloat16"))
FOUR_OVER_SIX = KVCacheDType.parse("nvfp4_4over6")
SCALES = KVScales((2688.0, 896.0), (448.0, 5376.0), "test")
BALANCED = RECIPES["balanced"]


def test_scales_are_those_of_each_format() -> None:
    expected = (1.0, float(torch.tensor(448 / 2688)), None)
    for recipe in (None, RECIPES["plain"]):
        assert LayerQuantization.of(SCALES, 0, NVFP4, NVFP4, recipe) == expected
    assert LayerQuantization.of(SCALES, 1, FP8, MXFP4) == (2.0, 1.0, None)
    assert LayerQuantization.of(None, 7, BF16, MXFP4) == (1.0, 1.0, None)


def test_layers_without_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="no layer 2, only 2"):
        LayerQuantization.of(SCALES, 2, NVFP4, NVFP4)
    with pytest.raises(ValueError, match="layer 3 is bfloat16 and has no scale"):
        LayerQuantization.of(None, 3, BF16, NVFP4)
    with pytest.raises(ValueError, match=r"balanced: needs a calibration of K, .* test"):
        LayerQuantization.of(SCALES, 0, NVFP4, NVFP4, BALANCED)


def test_recipe_has_its_own_amax_and_transforms_some_heads() -> None:
    calibration = make_calibration()
    scales = KVScales((9.0,) * 3, (9.0,) * 3, "test", calibration)
    found = LayerQuantization.of(
        scales, 1, FOUR_OVER_SIX, FOUR_OVER_SIX, BALANCED, heads=slice(1, 2)
    )
    assert found.k_scale == float(torch.tensor(4.0 / 1536))
    assert found.v_scale == float(torch.tensor(0.1 / 1536, dtype=torch.float32))
    assert found.transform is not None
    assert found.transform.mean is not None
    assert torch.equal(found.transform.mean, calibration.layers[1].mean[1:])
    assert found.transform.first_keys is not None
    assert torch.equal(found.transform.first_keys, calibration.layers[1].first_keys[:, 1:])
    plain = LayerQuantization.of(scales, 1, FP8, FOUR_OVER_SIX, BALANCED)
    assert plain == (float(torch.tensor(9.0 / 448)), float(torch.tensor(9.0 / 1536)), None)
