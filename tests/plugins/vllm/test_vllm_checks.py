"""Configurations that cannot be served, and connectors that move pages, without vLLM."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.plugins.vllm import checks, connectors
from halfbyte.plugins.vllm.options import Options


def config(**fields: Any) -> Any:
    """The parts of vLLM's configuration that the checks read."""
    given: dict[str, Any] = {
        "additional_config": {},
        "cache_config": SimpleNamespace(cache_dtype="nvfp4", kv_cache_dtype_skip_layers=None),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**{**given, **fields})


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


def graphs(mode: str) -> Any:
    """A configuration with this `cudagraph_mode`."""
    found = SimpleNamespace(
        name=mode, has_piecewise_cudagraphs=lambda: False, has_full_cudagraphs=lambda: False
    )
    return SimpleNamespace(cudagraph_mode=found)


def drafts(tokens: int, own_model: bool = False) -> Any:
    """Drafts of a model, or from the prompt, with the target's configuration in its place."""
    target = SimpleNamespace()
    return SimpleNamespace(
        num_speculative_tokens=tokens,
        target_model_config=target,
        draft_model_config=SimpleNamespace() if own_model else target,
    )


def connector(name: str | None, module: str | None = None, **extra: Any) -> Any:
    return SimpleNamespace(
        kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra
    )


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
            {"kv_transfer_config": connector("OffloadingConnector", module="other.kv")},
            "kv_connector_module_path = other.kv, whose OffloadingConnector may split.*vLLM's own",
        ),
        (
            {
                "kv_transfer_config": connector(
                    "MultiConnector",
                    connectors=[
                        {"kv_connector": "OffloadingConnector", "kv_connector_module_path": "vllmx"}
                    ],
                )
            },
            "kv_connector_module_path = vllmx, whose OffloadingConnector may split",
        ),
        (
            {"kv_transfer_config": connector("MultiConnector", module="x")},
            "MultiConnector, which",
        ),
        (
            {
                "kv_transfer_config": connector(
                    "OffloadingConnector", module="lmcache.integration.vllm"
                )
            },
            None,
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
        (
            {"speculative_config": drafts(9), "compilation_config": graphs("FULL")},
            "cudagraph_mode FULL with 9 draft tokens.*up to 7 draft tokens, or .* PIECEWISE",
        ),
        ({"speculative_config": drafts(7), "compilation_config": graphs("FULL")}, None),
        (
            {
                "speculative_config": drafts(9),
                "compilation_config": graphs("FULL_AND_PIECEWISE"),
            },
            None,
        ),
        (
            {
                "speculative_config": drafts(9),
                "compilation_config": graphs("FULL_DECODE_ONLY"),
            },
            None,
        ),
        (
            {"additional_config": {"halfbyte": {"draft_kv_scales": __file__}}},
            "draft_kv_scales: .*: the run has no draft model; leave it out",
        ),
        (
            {
                "speculative_config": drafts(3),
                "additional_config": {"halfbyte": {"draft_kv_scales": __file__}},
            },
            "draft_kv_scales: .*: the run has no draft model",
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, None),
        (
            {"cache_config": SimpleNamespace(cache_dtype="int4")},
            "kv_cache_dtype = int4 is not supported; use --kv-cache-dtype nvfp4, or another of",
        ),
        (
            {"model_config": SimpleNamespace(use_mla=True, model="a/b")},
            "a/b: MLA, .* is not supported; use vLLM's own backend: leave out --attention-backend",
        ),
    ],
)
def test_what_halfbyte_s_attention_cannot_run(
    fields: Any, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's configuration may have the backend, and the target's cache or model."""
    monkeypatch.setattr(checks, "has_page_specs", lambda: True)
    monkeypatch.setattr(checks, "is_halfbyte", lambda backend: backend == "CUSTOM")
    attention = SimpleNamespace(backend="CUSTOM")
    options = Options(kv_recipe="plain")
    if message is not None:
        with pytest.raises(ValueError, match=message):
            checks._check_settings(config(**fields, attention_config=attention), options)
    for other in (
        {"attention_config": SimpleNamespace(backend=None)},
        {"attention_config": attention, "speculative_config": SimpleNamespace()},
    ):
        checks._check_settings(config(**fields, **other), options)


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


@pytest.mark.parametrize(
    ("model", "cache_dtype", "backend", "has_draft", "is_refused"),
    [
        ("target", "nvfp4", "CUSTOM", True, False),
        ("target", "auto", "CUSTOM", True, True),
        ("target", "auto", None, True, False),  # only the draft is halfbyte's
        ("draft", "auto", "CUSTOM", True, False),
        ("draft", "fp8", "CUSTOM", True, True),
        ("target", "auto", "CUSTOM", False, True),  # such as ngram
        ("target", "nvfp4", "CUSTOM", False, False),
    ],
)
def test_k_and_v_dtypes_beside_a_draft(
    model: str,
    cache_dtype: str,
    backend: str | None,
    has_draft: bool,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "has_page_specs", lambda: True)
    monkeypatch.setattr(checks, "is_halfbyte", lambda backend: backend == "CUSTOM")
    monkeypatch.setattr(checks, "has_own_layers", lambda attention: attention.backend == "CUSTOM")
    models = {"target": SimpleNamespace(), "draft": SimpleNamespace()}
    own = models["draft" if has_draft else "target"]
    speculative = SimpleNamespace(draft_model_config=own, target_model_config=models["target"])
    given = config(
        model_config=models[model],
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=None),
        speculative_config=speculative,
        attention_config=SimpleNamespace(backend=backend),
    )
    refusal = pytest.raises(ValueError, match="use --kv-cache-dtype nvfp4")
    with refusal if is_refused else nullcontext():
        checks._check_settings(given, Options(k_dtype="mxfp4"))


def test_lmcache_is_served_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_page_specs", lambda: True)
    monkeypatch.setattr(connectors, "is_installed", lambda: True)
    checks.check_config(config(kv_transfer_config=connector("LMCacheMPConnector")))
    with pytest.raises(ValueError, match=r"LMCacheConnectorV1, .*: .*LMCacheMPConnector, "):
        checks.check_config(config(kv_transfer_config=connector("LMCacheConnectorV1")))


def test_connectors_of_an_unknown_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_page_specs", lambda: True)
    monkeypatch.setattr(connectors, "is_installed", lambda: False)
    checks.check_config(config())
    with pytest.raises(ValueError, match="a KV connector with this vLLM"):
        checks.check_config(config(kv_transfer_config=connector("OffloadingConnector")))


EXTRA, FOLDER = "kv_connector_extra_config", "shared_storage_path"


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
