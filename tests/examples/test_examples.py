"""Every program in `examples/` runs, is short, and does what it says."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from halfbyte.assets import bundled_model_path
from halfbyte.kvcache import KV_CACHE_QUANT_REGISTRY
from halfbyte.kvcache.store import reference
from halfbyte.numerics.block_fp4 import dequantize_fp4_block16, quantize_fp4_block16

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = (
    "attention_on_tensors",
    "batch_generation",
    "move_pages",
    "own_cache_dtype",
    "quantize_and_serve",
    "transformers_cache",
)


def example(name: str) -> ModuleType:
    """A program as a module; its `main` is what running it calls."""
    spec = spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here_and_short() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.py")) == list(NAMES)
    for file in FOLDER.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 60, file.name


def test_attention_on_tensors() -> None:
    # Codes of normal values are off by a tenth; a softmax over 200 keys averages little of that.
    assert 0.02 < example("attention_on_tensors").main() < 0.2


def test_transformers_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("transformers_cache").main(bundled_model_path()).startswith("import os")
    assert "recipe balanced, 1,440 bytes per token" in capsys.readouterr().out


def test_batch_generation() -> None:
    texts = example("batch_generation").main(bundled_model_path())
    assert len(texts) == 5
    assert texts[0] == texts[-1] != ""


def test_move_pages(capsys: pytest.CaptureFixture[str]) -> None:
    pool = example("move_pages").main()
    assert pool.layout(0).num_kv_heads == 4
    out = capsys.readouterr().out
    assert "0 pages in use" in out
    assert f"{pool.num_bytes:,} together" in out


def test_quantize_and_serve(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    assert example("quantize_and_serve").main(bundled_model_path(), folder)
    assert (folder / "hf_quant_config.json").is_file()


def test_own_cache_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    own = example("own_cache_dtype")
    # The registry and what was made of it are put back: other tests want the real format.
    name = "fp4_block16"
    monkeypatch.setitem(KV_CACHE_QUANT_REGISTRY, name, KV_CACHE_QUANT_REGISTRY[name])
    reference._method.cache_clear()
    try:
        error = own.main()
    finally:
        reference._method.cache_clear()
    # Its codes are quantiles of normal values, so that it beats the format whose bytes it has.
    key = torch.randn(2, 64, 2, 64, generator=torch.Generator().manual_seed(0))[0]
    replaced = dequantize_fp4_block16(*quantize_fp4_block16(key))
    assert 0.05 < error < 0.9 * float((replaced - key).norm() / key.norm())
