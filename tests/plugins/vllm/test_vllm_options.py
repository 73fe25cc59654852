"""Options, formats, pages, layer numbers and refusals of the plug-in, without vLLM."""

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

from halfbyte.kvcache import FullAttentionSpec, KVScales
from halfbyte.kvcache.calibration import KVCalibration, LayerCalibration, RopeAverages
from halfbyte.layouts import PageLayout
from halfbyte.plugins.vllm import checks, connectors, support
from halfbyte.plugins.vllm.formats import LayerFormat, block_size_of, pages_of
from halfbyte.plugins.vllm.options import Options
from halfbyte.plugins.vllm.recipes import resolve_options
from halfbyte.plugins.vllm.scales import LayerPlace, heads_of_rank, place_of, scales_of_draft

ROOT = Path(__file__).parents[3]
GIVEN: dict[str, Any] = {
    "kv_scales": "/a/b.json",
    "draft_kv_scales": "/a/c.json",
    "k_dtype": "fp8",
    "v_dtype": "nvfp4",
    "linear": "off",
    "moe": "on",
}


def test_options_are_read() -> None:
    assert Options.parse({"halfbyte": GIVEN}) == Options(**GIVEN)
    for yaml, said in ((True, "on"), (False, "off")):
        assert Options.parse({"halfbyte": {"linear": yaml}}).linear == said
        assert Options.parse({"halfbyte": {"moe": yaml}}).moe == said
    for nothing in ({}, None, {"other": 1}, {"halfbyte": None}, {"halfbyte": {}}, object()):
        assert Options.parse(nothing) == Options()


EXTRA, FOLDER = "kv_connector_extra_config", "shared_storage_path"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (3, "additional_config.halfbyte: expected an object, got 3"),
        ({"kv_scale": "x"}, "unknown option kv_scale; expected kv_scales, draft_kv_scales, k_dt"),
        ({"kv_scales": 3}, "halfbyte.kv_scales: expected a path, got 3"),
        ({"draft_kv_scales": ""}, "halfbyte.draft_kv_scales: expected a path, got ''"),
        ({"k_dtype": "fp9"}, "halfbyte.k_dtype: expected one of auto, bfloat16, .*, got 'fp9'"),
        ({"v_dtype": ["nvfp4"]}, r"halfbyte.v_dtype: expected one of auto, .*, got \['nvfp4'\]"),
        ({"linear": 1}, "halfbyte.linear: expected one of auto, on, off, got 1"),
        ({"moe": "yes"}, "halfbyte.moe: expected one of auto, on, off, got 'yes'"),
    ],
    ids=str,
)
def test_options_are_checked(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.parse({"halfbyte": section})


@pytest.mark.parametrize(
    ("cache_dtype", "options", "k", "v"),
    [
        ("auto", {}, "bfloat16", "bfloat16"),
        ("float16", {}, "float16", "float16"),
        ("fp8", {}, "fp8_e4m3", "fp8_e4m3"),
        ("nvfp4", {}, "nvfp4", "nvfp4"),
        ("nvfp4_4over6", {}, "nvfp4_4over6", "nvfp4_4over6"),
        ("nvfp4", {"k_dtype": "fp8"}, "fp8_e4m3", "nvfp4"),
        ("nvfp4", {"v_dtype": "auto"}, "nvfp4", "bfloat16"),
        ("nvfp4", {"k_dtype": "mxfp4", "v_dtype": "fp4_block16"}, "mxfp4", "fp4_block16"),
        ("auto", {"k_dtype": "fp8"}, "bfloat16", "bfloat16"),  # a layer left unquantized
    ],
)
def test_formats_of_a_layer(cache_dtype: str, options: Any, k: str, v: str) -> None:
    found = LayerFormat.of(cache_dtype, torch.bfloat16, Options(kv_recipe="plain", **options))
    assert (found.k, found.v) == (k, v)


def test_formats_refuse_what_the_cache_dtype_cannot_carry() -> None:
    with pytest.raises(ValueError, match=r"\.k_dtype: needs --kv-cache-dtype nvfp4, got fp8"):
        LayerFormat.of("fp8", torch.bfloat16, Options(k_dtype="mxfp4"))
    with pytest.raises(ValueError, match="nvfp4_4over6, got 'turboquant'"):
        LayerFormat.of("turboquant", torch.bfloat16, Options())


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (80, 48)])
@pytest.mark.parametrize(("k", "v"), [("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("bfloat16", "fp8")])
def test_cell_bytes_are_a_page_s_share(k: str, v: str, sizes: tuple[int, int]) -> None:
    found = LayerFormat.of("nvfp4", torch.bfloat16, Options(k_dtype=k, v_dtype=v))
    layout = found.layout(*sizes, 5, 16)
    assert layout.page_bytes == 16 * 5 * found.cell_bytes(*sizes)


BLOCK, HEADS, SIZE, PAGES = 16, 3, 32, 7
LAYOUT = PageLayout("nvfp4", "nvfp4", SIZE, SIZE, HEADS, BLOCK, "HND")
CELL = LAYOUT.page_bytes // (BLOCK * HEADS)


def counted(*shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 251).to(torch.uint8).view(shape)


CACHES = {
    "0.24": counted(PAGES, 2, HEADS, BLOCK, CELL // 2),
    "0.32": counted(PAGES, HEADS, BLOCK, CELL),
    # Several layers in one block, and a page padded to a hybrid model's size.
    "0.32 block-major": counted(PAGES, 4, HEADS, BLOCK, CELL)[:, 2],
    "0.24 padded": counted(PAGES, 2 * HEADS * BLOCK * CELL // 2 + 48)[:, :-48].unflatten(
        1, (2, HEADS, BLOCK, CELL // 2)
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_pages_are_the_same_memory(name: str) -> None:
    cache = CACHES[name]
    assert block_size_of(cache) == BLOCK
    pages = pages_of(cache, LAYOUT)
    assert pages.shape == (PAGES, LAYOUT.page_bytes)
    for page in range(PAGES):
        assert torch.equal(pages[page], cache[page].flatten())
    assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    LAYOUT.check_pages(pages)


def test_pages_of_floats() -> None:
    layout = PageLayout("bfloat16", "bfloat16", SIZE, SIZE, HEADS, BLOCK, "HND")
    cache = torch.randn(PAGES, HEADS, BLOCK, 2 * SIZE).bfloat16()
    assert torch.equal(pages_of(cache, layout), cache.view(torch.uint8).flatten(1))


def test_pages_must_be_one_run_of_the_right_size() -> None:
    with pytest.raises(ValueError, match="has 864 bytes, expected 1728"):
        pages_of(CACHES["0.32"][:, :, :8], LAYOUT)
    token_major = counted(PAGES, BLOCK, HEADS, CELL).transpose(1, 2)
    assert pages_of(token_major, LAYOUT).shape  # one run, whatever vLLM calls its dimensions
    with pytest.raises(ValueError, match="one run of bytes"):
        pages_of(counted(PAGES, HEADS, 2 * BLOCK, CELL)[:, :, ::2], LAYOUT)


def test_page_bytes_are_what_a_spec_counts() -> None:
    spec = FullAttentionSpec(BLOCK, HEADS, SIZE, kv_cache_dtype="nvfp4")
    assert spec.real_page_size_bytes == LAYOUT.page_bytes


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


def test_recipe_decides_the_format() -> None:
    options = Options(kv_recipe="balanced")
    both = LayerFormat.of("nvfp4", torch.bfloat16, options)
    assert (both.k, both.v) == ("nvfp4_4over6", "nvfp4_4over6")
    assert LayerFormat.of("fp8", torch.bfloat16, options).k == "fp8_e4m3"
    accurate = Options(kv_recipe="accurate")
    assert LayerFormat.of("nvfp4", torch.bfloat16, accurate) == both
    assert accurate.recipe.feedback
    assert accurate.recipe.recent_tokens == 0
    expected = "kv_recipe: expected one of plain, balanced, accurate, got 'best'"
    with pytest.raises(ValueError, match=expected):
        Options(kv_recipe="best")


def config(**fields: Any) -> Any:
    """The parts of vLLM's configuration that the checks read."""
    given: dict[str, Any] = {
        "additional_config": {},
        "cache_config": SimpleNamespace(cache_dtype="nvfp4", kv_cache_dtype_skip_layers=None),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**{**given, **fields})


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


def compilation(**fields: Any) -> SimpleNamespace:
    """A configuration with piecewise CUDA graphs."""
    return SimpleNamespace(
        cudagraph_mode=SimpleNamespace(
            has_piecewise_cudagraphs=lambda: True, has_full_cudagraphs=lambda: False
        ),
        **fields,
    )


def full_graphs(**fields: Any) -> Any:
    """`cudagraph_mode=FULL`, whose graphs of mixed batches become piecewise."""
    full = SimpleNamespace(has_full_cudagraphs=lambda: True)
    mode = SimpleNamespace(
        has_piecewise_cudagraphs=lambda: False,
        has_full_cudagraphs=lambda: True,
        mixed_mode=lambda: full,
    )
    return SimpleNamespace(
        cudagraph_mode=mode, splitting_ops_contain_attention=lambda: True, **fields
    )


def connector(name: str | None, **extra: Any) -> Any:
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)


@pytest.mark.parametrize("has_page_specs", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, None),
        ({"kv_transfer_config": connector(None)}, None),
        ({"kv_transfer_config": connector("OffloadingConnector")}, None),
        ({"kv_transfer_config": connector("NixlConnector")}, "NixlConnector.*whole blocks: "),
        (
            {
                "kv_transfer_config": connector(
                    "MultiConnector",
                    connectors=[
                        {"kv_connector": "OffloadingConnector"},
                        {"kv_connector": "MooncakeConnector"},
                    ],
                )
            },
            "kv_connector = MooncakeConnector",
        ),
        (
            {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)},
            "decode_context_parallel_size = 2 is not supported; use tensor or pipeline parallel",
        ),
        (
            {"parallel_config": SimpleNamespace(prefill_context_parallel_size=4)},
            "prefill_context_parallel_size = 4",
        ),
        (
            {
                "additional_config": {"halfbyte": {"kv_recipe": "balanced"}},
                "compilation_config": compilation(use_inductor_graph_partition=True),
            },
            "kv_recipe balanced with piecewise CUDA graphs that contain.*FULL_DECODE_ONLY or NONE",
        ),
        (
            {
                "additional_config": {"halfbyte": {"kv_recipe": "balanced"}},
                "compilation_config": full_graphs(use_inductor_graph_partition=True),
            },
            "kv_recipe balanced with piecewise CUDA graphs that contain.*FULL_DECODE_ONLY or NONE",
        ),
        (
            {
                "additional_config": {"halfbyte": {"kv_recipe": "balanced"}},
                "compilation_config": compilation(
                    splitting_ops_contain_kv_cache_update=lambda: False
                ),
            },
            "kv_recipe balanced with piecewise CUDA graphs that contain",
        ),
        (
            {"cache_config": SimpleNamespace(calculate_kv_scales=True)},
            "calculate_kv_scales.*use `halfbyte calibrate`",
        ),
        ({"additional_config": {"halfbyte": {"x": 1}}}, "unknown option x"),
        (
            {"additional_config": {"halfbyte": {"kv_scales": "/nowhere.json"}}},
            "kv_scales: /nowhere.json: no such file; give a file",
        ),
        (
            {
                "model_config": SimpleNamespace(enable_sleep_mode=False),
                "additional_config": {"halfbyte": {"kv_recipe": "plain"}},
            },
            None,
        ),
        (
            {"kv_transfer_config": connector("OffloadingConnector", canonical_layout=True)},
            "canonical_layout.*leave it out",
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_configurations_that_cannot_be_served(
    fields: Any, message: str | None, has_page_specs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "has_page_specs", lambda: has_page_specs)
    monkeypatch.setattr(connectors, "is_installed", lambda: True)
    if message is None:
        found = checks.check_config(config(**fields))
        assert found == Options.parse(fields.get("additional_config"))
        return
    with pytest.raises(ValueError, match=message) as error:
        checks.check_config(config(**fields))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {
                "cache_config": SimpleNamespace(
                    cache_dtype="nvfp4", kv_cache_dtype_skip_layers=["0"]
                )
            },
            r"kv_cache_dtype_skip_layers = \['0'\] with this vLLM",
        ),
        ({"additional_config": {"halfbyte": {"k_dtype": "fp8"}}}, "k_dtype and v_dtype with this"),
        (
            {
                "model_config": SimpleNamespace(enable_sleep_mode=True),
                "additional_config": {"halfbyte": {"kv_recipe": "plain"}},
            },
            "enable_sleep_mode with this vLLM.*use vLLM 0.32 or later",
        ),
    ],
)
def test_what_needs_pages_of_the_backend_s_own(
    fields: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "has_page_specs", lambda: False)
    with pytest.raises(ValueError, match=message):
        checks.check_config(config(**fields))
    monkeypatch.setattr(checks, "has_page_specs", lambda: True)
    checks.check_config(config(**fields))


@pytest.mark.parametrize("option", ["k_dtype", "v_dtype"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_k_and_v_dtypes_need_the_cache_dtype_nvfp4(
    option: str, cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "has_page_specs", lambda: True)
    cache = SimpleNamespace(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=None)
    asked = {"halfbyte": {option: "mxfp4"}}
    with pytest.raises(ValueError, match=f"cache dtype {cache_dtype}.*use --kv-cache-dtype nvfp4"):
        checks.check_config(config(cache_config=cache, additional_config=asked))


def test_connectors_of_an_unknown_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_page_specs", lambda: True)
    monkeypatch.setattr(connectors, "is_installed", lambda: False)
    checks.check_config(config())
    with pytest.raises(ValueError, match="a KV connector with this vLLM"):
        checks.check_config(config(kv_transfer_config=connector("OffloadingConnector")))


def test_folders_of_joined_connectors_are_named_too() -> None:
    inner = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {FOLDER: "/pages"}}
    other = {"kv_connector": "OffloadingConnector"}
    given = {
        "connectors": [
            inner,
            other,
            {"kv_connector": "MultiConnector", EXTRA: {"connectors": [inner]}},
        ]
    }
    named = connectors._named_folders(given, "abc")
    first, second, third = named["connectors"]
    assert first[EXTRA] == {FOLDER: "/pages/halfbyte-abc"}
    assert second == other
    assert third[EXTRA]["connectors"][0][EXTRA] == {FOLDER: "/pages/halfbyte-abc"}
    assert inner[EXTRA] == {FOLDER: "/pages"}  # as it was


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
