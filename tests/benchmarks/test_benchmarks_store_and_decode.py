import pytest
import torch

from benchmarks import store_and_decode


@pytest.mark.parametrize("recipe", store_and_decode.RECIPES)
def test_one_call_gives_what_two_calls_give(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_and_decode, "_BYTES", 2**20)
    calls = store_and_decode.ways(2, 130, recipe, torch.device("cpu"))
    layers = len(calls["one call"])
    assert [len(calls[way]) for way in ("decode", "two calls")] == [layers, 2 * layers]
    for i, call in enumerate(calls["one call"]):
        found = call()
        store, attend = calls["two calls"][2 * i : 2 * i + 2]
        assert store() is None
        assert torch.equal(found, attend())
        assert torch.equal(found, calls["decode"][i]())
