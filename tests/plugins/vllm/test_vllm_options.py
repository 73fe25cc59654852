"""Options, layer numbers, scales of drafts and registration of the plug-in, without vLLM."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from halfbyte.kvcache import KVScales
from halfbyte.kvcache.calibration import KVCalibration, LayerCalibration, RopeAverages
from halfbyte.plugins.vllm import support
from halfbyte.plugins.vllm.options import Options
from halfbyte.plugins.vllm.recipes import resolve_options
from halfbyte.plugins.vllm.scales import LayerPlace, heads_of_rank, place_of, scales_of_draft
from plugins.vllm.test_vllm_checks import config

ROOT = Path(__file__).parents[3]
GIVEN: dict[str, Any] = {
    "kv_scales": "/a/b.json",
    "draft_kv_scales": "/a/c.json",
    "k_dtype": "fp8",
    "v_dtype": "nvfp4",
    "linear": "off",
    "moe": "on",
    "elementwise": "off",
}


def test_options_are_read() -> None:
    assert Options.parse({"halfbyte": GIVEN}) == Options(**GIVEN)
    for yaml, said in ((True, "on"), (False, "off")):
        assert Options.parse({"halfbyte": {"linear": yaml}}).linear == said
        assert Options.parse({"halfbyte": {"moe": yaml}}).moe == said
        assert Options.parse({"halfbyte": {"elementwise": yaml}}).elementwise == said
    for nothing in ({}, None, {"other": 1}, {"halfbyte": None}, {"halfbyte": {}}, object()):
        assert Options.parse(nothing) == Options()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (3, "additional_config.halfbyte: expected an object, got 3"),
        ({"kv_scale": "x"}, "unknown option kv_scale; expected kv_scales, draft_kv_scales, k_dt"),
        ({"": 1, "a\nb": 1}, r"unknown option '', 'a\\nb'; expected kv_scales, "),
        ({"kv_recipe": ["plain"]}, r"kv_recipe: expected one of plain, .*, got \['plain'\]"),
        ({"kv_scales": 3}, "halfbyte.kv_scales: expected a path, got 3"),
        ({"draft_kv_scales": ""}, "halfbyte.draft_kv_scales: expected a path, got ''"),
        ({"k_dtype": "fp9"}, "halfbyte.k_dtype: expected one of auto, bfloat16, .*, got 'fp9'"),
        ({"v_dtype": ["nvfp4"]}, r"halfbyte.v_dtype: expected one of auto, .*, got \['nvfp4'\]"),
        ({"linear": 1}, "halfbyte.linear: expected one of auto, on, off, got 1"),
        ({"moe": "yes"}, "halfbyte.moe: expected one of auto, on, off, got 'yes'"),
        ({"elementwise": []}, r"halfbyte.elementwise: expected one of auto, on, off, got \[\]"),
    ],
    ids=str,
)
def test_options_are_checked(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.parse({"halfbyte": section})


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [
        ("model.layers.3.self_attn.attn", 3, LayerPlace(False, 3)),
        ("model.layers.32.self_attn.attn", 32, LayerPlace(True, 0)),
        ("model.layers.33.mtp_block.self_attn.attn", 33, LayerPlace(True, 1)),
        ("draft_model.model.layers.3.self_attn.attn", 3, LayerPlace(True, 3)),
        ("mtp.layers.0.self_attn.attn", 0, LayerPlace(True, 0)),
        ("model.mtp.layers.1.self_attn.attn", 1, LayerPlace(True, 1)),
    ],
)
def test_layers_of_drafts_are_told_apart(name: str, number: int, expected: LayerPlace) -> None:
    assert place_of(name, number, 32) == expected


@pytest.mark.parametrize(
    ("total", "own", "ranks", "expected"),
    [
        (8, 8, 1, [range(8)]),
        (8, 4, 2, [range(4), range(4, 8)]),
        (2, 1, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 1, 2, [range(1), range(1)]),
    ],
)
def test_heads_of_ranks(total: int, own: int, ranks: int, expected: list[range]) -> None:
    heads = [heads_of_rank(total, own, rank, ranks) for rank in range(ranks)]
    assert [range(total)[part] for part in heads] == expected


def model_config(folder: Path, layers: int, scales: KVScales | None) -> SimpleNamespace:
    """vLLM's `ModelConfig` of a folder with only a configuration and scales."""
    folder.mkdir()
    fields = {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(fields))
    if scales is not None:
        scales.save(folder)
    return SimpleNamespace(model=str(folder), hf_config=SimpleNamespace(**fields), max_model_len=64)


def calibrated(layers: int) -> KVScales:
    """Scales with a calibration for 128 tokens."""
    amax = (8.0,) * layers
    rope = RopeAverages(torch.ones(2, 16), torch.zeros(2, 16), torch.arange(16).roll(8))
    none = torch.zeros(1, 1, 16)
    layer = LayerCalibration(none[0], (8.0,) * 4, 8.0, none, none, 0)
    return KVScales(amax, amax, "test", KVCalibration(64, (0,), (layer,) * layers, (rope,)))


@pytest.mark.parametrize(
    ("target", "draft", "max_model_len", "recipe"),
    [
        (calibrated(4), calibrated(2), 64, "balanced"),
        (calibrated(4), None, 64, "balanced"),
        (calibrated(4), replace(calibrated(2), calibration=None), 64, "plain"),
        (replace(calibrated(4), calibration=None), calibrated(2), 64, "plain"),
        (calibrated(4), calibrated(2), 129, "plain"),
        (None, None, 64, "balanced"),
    ],
)
def test_a_run_has_one_default_recipe(
    tmp_path: Path,
    target: KVScales | None,
    draft: KVScales | None,
    max_model_len: int,
    recipe: str,
) -> None:
    """Target and draft share it; the draft's layers are made under the draft's configuration."""
    of_target = model_config(tmp_path / "target", 4, target)
    of_target.max_model_len = max_model_len
    of_draft = model_config(tmp_path / "draft", 2, draft)
    run = config(
        model_config=of_target,
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=SimpleNamespace(
            draft_model_config=of_draft, target_model_config=of_target
        ),
    )
    assert resolve_options(run).kv_recipe == recipe
    run.model_config = of_draft
    assert resolve_options(run).kv_recipe == recipe
    run.model_config, run.additional_config = of_target, {"halfbyte": {"kv_recipe": "plain"}}
    assert resolve_options(run).kv_recipe == "plain"
    if target is not None:
        file = target.save_file(tmp_path / "given.json")
        run.additional_config = {"halfbyte": {"kv_scales": str(file)}}
        run.model_config = of_draft
        assert resolve_options(run).kv_recipe == recipe


def test_scales_of_a_draft_inside_its_target(tmp_path: Path) -> None:
    """Tensors of the layers after the target's; a draft of another folder has its own."""
    target = model_config(tmp_path / "target", 4, calibrated(4))
    target.hf_config = LlamaConfig(num_hidden_layers=4)
    target.hf_config.update({"num_nextn_predict_layers": 1})
    tensors = {f"model.layers.4.self_attn.{x}_scale": torch.tensor(0.5) for x in "kv"}
    draft = SimpleNamespace(model=target.model, hf_config=SimpleNamespace(num_hidden_layers=1))
    speculative = SimpleNamespace(draft_model_config=draft, method="mtp")
    run = config(
        model_config=target,
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=speculative,
    )
    plain, balanced = Options(kv_recipe="plain"), Options(kv_recipe="balanced")
    with pytest.raises(ValueError, match="has no KV cache scales of its own"):
        scales_of_draft(run, plain)
    save_file(tensors, tmp_path / "target" / "model.safetensors")
    found = scales_of_draft(run, plain)
    assert (found.k_amax, found.v_amax) == ((0.5 * 448,), (0.5 * 448,))
    with pytest.raises(ValueError, match="without the calibration that kv_recipe balanced needs"):
        scales_of_draft(run, balanced)
    given = calibrated(1).save_file(tmp_path / "given.json")
    options = Options(kv_recipe="plain", draft_kv_scales=str(given))
    assert scales_of_draft(run, options).k_amax == (8.0,)
    speculative.draft_model_config = model_config(tmp_path / "draft", 2, calibrated(2))
    assert scales_of_draft(run, plain).k_amax == (8.0, 8.0)


def test_package_that_is_other_than_expected_stays_as_it_is(tmp_path: Path) -> None:
    """One line in the log; its import works."""
    (tmp_path / "strange_package.py").write_text("value = 7")
    code = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "from halfbyte.after_import import after_import\n"
        "after_import('strange_package', lambda module: module.no_such_name)\n"
        "import strange_package\n"
        "assert strange_package.value == 7\n"
        "after_import('strange_package', lambda module: module.nor_this)"
    )
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("halfbyte does not extend strange_package: AttributeError: ")


def run_python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    source = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)


def test_the_plug_in_stays_out_of_an_unknown_vllm(tmp_path: Path) -> None:
    """One line in the log, whatever is missing; and nothing heavy is imported."""
    code = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "import halfbyte.plugins.vllm as plugin\n"
        "plugin.register(); plugin.register()\n"
        "assert 'transformers' not in sys.modules and 'halfbyte.models' not in sys.modules"
    )
    registry = tmp_path / "vllm" / "v1" / "attention" / "backends"
    registry.mkdir(parents=True)
    for folder in (registry, *list(registry.parents)[:3]):
        (folder / "__init__.py").touch()
    (registry / "registry.py").write_text("class AttentionBackendEnum: pass\n")
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("halfbyte is disabled in this vLLM") == 1
    assert "vllm.v1.attention.backends.registry.AttentionBackendEnum.CUSTOM" in result.stderr
    (registry / "registry.py").write_text("raise RuntimeError('broken\\nmodule')\n")
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip().splitlines()[1:] == []


def test_halfbyte_does_not_import_vllm() -> None:
    code = "import halfbyte, halfbyte.plugins.vllm, halfbyte.cli; assert 'vllm' not in sys.modules"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_the_documented_table_is_the_code_s() -> None:
    text = (ROOT / "docs" / "vllm.md").read_text()
    documented = text.split("<!-- support -->\n")[1].split("\n<!-- /support -->")[0]
    assert documented == support.table()
    for feature in support.FEATURES:
        if support.TESTED in feature.known:
            assert feature.test is not None, feature.name
        if feature.test is not None:
            file, name = feature.test.split("::")
            source = (ROOT / "tests" / "plugins" / "vllm" / "engine" / file).read_text()
            assert f"\ndef {name}(" in source, feature.test
