from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import decoder_layers, store_and_decode


@pytest.mark.parametrize("recipe", store_and_decode.RECIPES)
def test_a_layer_stores_its_own_tokens(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result depends on qkv: K and V of the step are what the layer's kernels give."""
    device = torch.device("cpu")
    monkeypatch.setattr(store_and_decode, "_BYTES", 2**20)
    for module in (store_and_decode, decoder_layers):
        monkeypatch.setattr(module, "_LAYERS", 1)
    linear: list[list[Any]] = [*decoder_layers.linear_layers(device, "reference")]
    call = decoder_layers.layers_in_a_row(linear, 2, 20, recipe, device)
    out = call()
    assert out.shape == (2, 4096)
    assert out.isfinite().all()
    assert torch.equal(call(), out)  # the same tokens, in the same slots
    qkv = linear[0][0]
    for rows in (slice(4096, 5120), slice(5120, 6144)):  # of K, of V
        weight = qkv.dequantize(torch.bfloat16)
        weight[rows] *= -1
        linear[0][0] = partial(F.linear, weight=weight)
        assert not torch.equal(call(), out)
