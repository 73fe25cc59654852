"""Configurations refused at start; and the loss in vLLM compared with halfbyte's own."""

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
)

import halfbyte
from halfbyte.assets import heldout_texts
from halfbyte.dispatch import is_installed
from halfbyte.evaluation.perplexity import evaluate_perplexity, text_windows
from halfbyte.kernels.runtime.inductor import OVERLAP
from halfbyte.kvcache import KV_SCALES_FILE
from halfbyte.plugins.vllm import layers, register
from halfbyte.plugins.vllm.arguments import check_names
from halfbyte.plugins.vllm.options import Options
from halfbyte.plugins.vllm.registry import has_page_specs, wants_kernels
from kvcache.transforms import with_heads
from models.zoo import make_model
from plugins.vllm.engine.engines import (
    BUNDLED,
    CACHE_BYTES,
    TEXTS,
    assert_ours,
    example_connector,
    generate,
    needs_page_specs,
    run_apart,
    vllm_engine,
)

NO_TOKENIZER: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}


def bundled_copy(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "cache"))


def refused(message: str, model: str | Path = BUNDLED, **options: Any) -> None:
    with pytest.raises(Exception, match=message), vllm_engine(model, **options):
        pass


@pytest.mark.parametrize(
    ("capability", "linear", "moe"),
    [
        (None, True, True),
        (75, False, False),
        (80, True, False),
        (90, True, True),
        (100, False, False),
        (120, False, False),
    ],
)
def test_machines_whose_kernels_auto_takes(
    capability: int | None, linear: bool, moe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` on a CPU and on GPUs: the machines on which steps inside vLLM are faster."""
    platform = SimpleNamespace(
        is_cpu=lambda: capability is None,
        is_cuda=lambda: capability is not None,
        get_device_capability=lambda: SimpleNamespace(to_int=lambda: capability),
    )
    register()  # for the real platform: a process registers once
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    config = SimpleNamespace(
        additional_config={}, attention_config=SimpleNamespace(backend="CUSTOM")
    )
    assert wants_kernels(config, "linear") == linear
    assert wants_kernels(config, "moe") == moe
    for choice in ("on", "off"):
        config.additional_config = {"halfbyte": {"moe": choice}}
        assert wants_kernels(config, "moe") == (choice == "on")
    config.additional_config = {}
    config.attention_config.backend = None
    assert not wants_kernels(config, "linear")
    assert not wants_kernels(config, "moe")


def test_missing_scales_name_the_command(tmp_path: Path) -> None:
    folder = bundled_copy(tmp_path)
    (folder / KV_SCALES_FILE).unlink()
    refused(f"no KV cache scales for {folder}: run `halfbyte calibrate {folder}`", folder)
    with vllm_engine(folder, kv_cache_dtype="auto") as llm:  # needs no scales
        assert_ours(llm)


def test_missing_scales_are_reported_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bundled_copy(tmp_path)
    (folder / KV_SCALES_FILE).unlink()
    with pytest.raises(ValueError, match="no KV cache scales for") as caught, vllm_engine(folder):
        pass
    functions = {entry.name for entry in caught.traceback}
    assert "create_engine_config" in functions
    assert not functions & {"initialize_model", "load_weights"}
    with monkeypatch.context() as patch:  # as for models that are not in a local folder
        patch.setattr("halfbyte.plugins.vllm.checks.check_local_scales", lambda *_: None)
        with pytest.raises(ValueError, match="no KV cache scales") as caught, vllm_engine(folder):
            pass
    functions = {entry.name for entry in caught.traceback}
    assert "initialize_model" in functions
    assert "load_weights" not in functions


def output_of_engine(model: str | Path, **options: Any) -> list[str]:
    """All lines of an engine with vLLM's log, in processes of its own as vLLM starts them."""
    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "kv_cache_memory_bytes": CACHE_BYTES,
        **options,
    }
    code = f"from vllm import LLM; LLM({str(model)!r}, **{settings!r})"
    ours = ("VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    result = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    return result.stdout.strip().splitlines()


def test_scales_that_are_missing_are_the_last_message(tmp_path: Path) -> None:
    folder = bundled_copy(tmp_path)
    absent = tmp_path / "absent.json"
    options = {"attention_backend": "CUSTOM", "kv_cache_dtype": "nvfp4"}
    given = {"halfbyte": {"kv_scales": str(absent)}}
    lines = output_of_engine(folder, **options, additional_config=given)
    assert any(f"{absent}: no such file" in line for line in lines[-3:])
    (folder / KV_SCALES_FILE).unlink()
    lines = output_of_engine(folder, **options)
    assert any(f"no KV cache scales for {folder}: run " in line for line in lines[-3:])
    assert not any("Engine core initialization failed" in line for line in lines)


@pytest.mark.slow
def test_one_line_of_the_log_says_how_k_and_v_are_stored(tmp_path: Path) -> None:
    folder = bundled_copy(tmp_path)
    ours = {"attention_backend": "CUSTOM", "kv_cache_dtype": "nvfp4"}
    lines = [line for line in output_of_engine(folder, **ours) if "halfbyte: " in line]
    source = halfbyte.models.find_kv_scales(folder, {}).source  # type: ignore[union-attr]
    assert len(lines) == 1, lines
    assert " INFO " in lines[0]
    recipe = "recipe balanced, last 64 tokens in 16 bits"
    assert lines[0].endswith(f"halfbyte: K and V nvfp4, {recipe}, scales from {source}")


@pytest.mark.slow
def test_the_log_says_nothing_until_it_is_enabled(tmp_path: Path) -> None:
    lines = output_of_engine(bundled_copy(tmp_path))
    assert any(" INFO " in line for line in lines)
    assert not any("halfbyte: " in line for line in lines)


def test_scales_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = bundled_copy(tmp_path)
    file = tmp_path / "other.json"
    file.write_text((folder / KV_SCALES_FILE).read_text().replace("k_amax", "k_max"))
    options: dict[str, Any] = {"additional_config": {"halfbyte": {"kv_scales": str(file)}}}
    refused(r"halfbyte\.kv_scales: .*other.json: not a file of KV scales", folder, **options)
    halfbyte.kvcache.KVScales((1.0,) * 3, (1.0,) * 3, "one").save(tmp_path)
    options = {"additional_config": {"halfbyte": {"kv_scales": str(tmp_path / KV_SCALES_FILE)}}}
    refused(r"halfbyte\.kv_scales: .*\(one\): 3 layers, the model has 10", folder, **options)
    with pytest.raises(ValueError, match="3 layers") as caught, vllm_engine(folder, **options):
        pass
    assert "initialize_model" not in {entry.name for entry in caught.traceback}


@pytest.mark.parametrize("heads", [1, 4])
def test_calibration_of_other_heads_is_refused(tmp_path: Path, heads: int) -> None:
    """Of a file that does not name its model: some of its means would apply to other heads."""
    stored = halfbyte.kvcache.KVScales.load(BUNDLED)
    assert stored is not None
    other = with_heads(stored, heads)
    section = {"kv_scales": str(other.save(tmp_path)), "kv_recipe": "balanced"}
    message = f"layer 0 has a calibration for {heads} KV heads of 64, the model has 2 of 64; "
    refused(message, additional_config={"halfbyte": section})


def test_scales_that_are_given_are_used(tmp_path: Path) -> None:
    """Scales with twice the amax give other codes."""
    stored = halfbyte.kvcache.KVScales.load(BUNDLED)
    assert stored is not None
    twice = halfbyte.kvcache.KVScales(
        tuple(3 * x for x in stored.k_amax), tuple(3 * x for x in stored.v_amax), "three times"
    )
    file = twice.save(tmp_path)
    options: dict[str, Any] = {"additional_config": {"halfbyte": {"kv_scales": str(file)}}}
    runner = halfbyte.LLM(BUNDLED, dtype="float32", kv_scales=twice).core.runner
    with vllm_engine(**options) as llm:
        impls = assert_ours(llm)
        assert [(impl.k_scale, impl.v_scale) for impl in impls] == list(runner.quantization.scales)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"additional_config": {"halfbyte": {"scale": 1}}}, "unknown option scale"),
        (
            {"additional_config": {"halfbyte": {"scale": 1}}, "attention_backend": None},
            "unknown option scale",
        ),
        (
            {"additional_config": {"halfbyte": {"k_dtype": "fp8"}}, "attention_backend": None},
            "halfbyte.k_dtype: needs --attention-backend CUSTOM",
        ),
        ({"block_size": 8}, "block_size not supported.*use --block-size 16 or a multiple"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "fail",
                }
            },
            "kv_connector = NixlConnector, which may split pages.*use one that moves whole blocks",
        ),
        (
            {"kv_cache_dtype": "int8_per_token_head"},
            "kv_cache_dtype = int8_per_token_head is not supported; use --kv-cache-dtype nvfp4",
        ),
        (
            {
                "additional_config": {"halfbyte": {"v_dtype": "mxfp4"}},
                "kv_cache_dtype": "auto",
            },
            "k_dtype or v_dtype with" if has_page_specs() else "k_dtype and v_dtype with this vLLM",
        ),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "decode_context_parallel_size = 2 is not supported; use tensor or pipeline parallel",
        ),
    ],
    ids=[
        "option",
        "option-idle",
        "option-no-effect",
        "block",
        "connector",
        "dtype",
        "side-dtype",
        "context-parallel",
    ],
)
def test_wrong_use_is_one_clear_error_at_start(options: dict[str, Any], message: str) -> None:
    """By vLLM's configuration, not by a worker, whose error would precede pages of traceback."""
    with pytest.raises(ValueError, match=message) as caught, vllm_engine(**options):
        pass
    functions = {entry.name for entry in caught.traceback}
    # vLLM itself shows block sizes to a backend when it makes the layers.
    assert ("initialize_model" in functions) == ("block_size" in options)


@pytest.mark.skipif(has_page_specs(), reason="this vLLM lets a backend say what a page is")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype_skip_layers": ["0"]}, "kv_cache_dtype_skip_layers"),
        ({"additional_config": {"halfbyte": {"k_dtype": "fp8"}}}, "k_dtype and v_dtype"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "kv_connector = ExampleConnector",
        ),
    ],
)
def test_what_needs_pages_of_our_own_is_refused(options: dict[str, Any], message: str) -> None:
    refused(message, **options)


def test_a_plug_in_that_fails_half_way_stays_away() -> None:
    """Its backend is not registered, and its options are nobody's; asking for it is an error."""
    code = """
from halfbyte.plugins import vllm as plugin
from halfbyte.plugins.vllm import registry, warmup
warmup.install = lambda: 1 / 0
plugin.register()
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
config = VllmConfig(additional_config={"halfbyte": {"typo": 1, "linear": "on"}})
assert not registry.uses_halfbyte(config) and not registry.wants_kernels(config, "linear")
for ask in (
    AttentionBackendEnum.CUSTOM.get_path,
    lambda: current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, None),
):
    try:
        ask()
    except ValueError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "ZeroDivisionError: division by zero" in result.stderr
    unregistered, disabled = result.stdout.splitlines()
    assert "CUSTOM must be registered" in unregistered
    assert "halfbyte is disabled" in disabled


@needs_page_specs
@pytest.mark.parametrize("name", ["99", "nonsense", "01", "sliding_window"])
def test_skipped_layers_that_are_none_are_refused(name: str) -> None:
    refused(f"kv_cache_dtype_skip_layers = {name}, which names", kv_cache_dtype_skip_layers=[name])


@needs_page_specs
def test_a_draft_that_cannot_store_the_cache_is_refused() -> None:
    draft = {"method": "draft_model", "model": BUNDLED, "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=r'draft_model\.model.*set "attention_backend": "CUSTOM"'):
        run_apart(TEXTS, speculative_config=draft)


def test_head_sizes_that_16_does_not_divide_are_refused(tmp_path: Path) -> None:
    make_model("llama", hidden_size=96, num_attention_heads=4).save_pretrained(tmp_path)
    refused("head_size not supported.*multiple of 16", tmp_path, **NO_TOKENIZER)


def test_models_with_alibi_are_refused(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=512, hidden_size=64, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    refused("alibi_slopes.*leave out --attention-backend", tmp_path, **NO_TOKENIZER)


def test_encoders_are_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        architectures=["BertModel"],
    )
    config.save_pretrained(tmp_path)
    pooling: dict[str, Any] = {"runner": "pooling", "load_format": "dummy"}
    message = "attention type .*ENCODER_ONLY.*leave out --attention-backend"
    refused(message, tmp_path, **pooling, **NO_TOKENIZER)


@pytest.mark.parametrize("dtype", ["nvfp4", "auto"])
def test_models_with_latent_attention_are_refused(tmp_path: Path, dtype: str) -> None:
    """By vLLM itself if the cache is NVFP4."""
    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
        max_position_embeddings=256,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(tmp_path)
    refused("(?i)MLA.*(not supported|use)", tmp_path, kv_cache_dtype=dtype, **NO_TOKENIZER)


def test_nothing_changes_until_it_is_enabled() -> None:
    with vllm_engine(attention_backend=None, kv_cache_dtype="auto") as llm:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        from plugins.vllm.engine.engines import layers_of

        assert {type(layer.impl) for layer in layers_of(llm).values()} == {CPUAttentionBackendImpl}
        assert generate(llm, TEXTS[:1], 4)


def test_no_option_of_vllm_s_counts_as_misspelled() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    places = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    place = next(name for name in places if is_installed(name))
    parser = import_module(place).make_arg_parser(FlexibleArgumentParser())
    names = [name for action in parser._actions for name in action.option_strings]
    assert len(names) > 100
    ours = [f"--{field.name.replace('_', '-')}" for field in fields(Options)]
    check_names(names, ours)
    with pytest.raises(ValueError, match="--k-dtpe: unknown option; did you mean --k-dtype"):
        check_names([*names, "--k-dtpe"], ours)


def test_another_plug_in_s_backend_stays() -> None:
    code = (
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend\n"
        "register_backend(AttentionBackendEnum.CUSTOM, 'other.Backend')\n"
        "import halfbyte.plugins.vllm as plugin\n"
        "plugin.register()\n"
        "print(AttentionBackendEnum.CUSTOM.get_path())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "other.Backend"
    assert "is disabled in this vLLM: RuntimeError: attention backend CUSTOM is" in result.stderr


def test_loss_is_halfbyte_s_own() -> None:
    """NLL in bfloat16, nvfp4 cache, within 0.2 %."""
    from vllm import SamplingParams

    model = halfbyte.load_model(BUNDLED)
    tokenizer = halfbyte.models.load_tokenizer(BUNDLED)
    windows, _ = text_windows(tokenizer, list(heldout_texts().values()), 500, 2500)
    windows = [window for window in windows if len(window) > 8]
    found = {}
    for dtype in ("auto", "nvfp4"):
        with vllm_engine(dtype="bfloat16", kv_cache_dtype=dtype) as llm:
            assert_ours(llm)
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
            asked = [{"prompt_token_ids": window} for window in windows]
            outputs = llm.generate(asked, params, use_tqdm=False)
        total = count = 0.0
        for window, output in zip(windows, outputs, strict=True):
            for token, row in zip(window[1:], output.prompt_logprobs[1:], strict=True):
                total -= row[token].logprob
                count += 1
        found[dtype] = total / count
    own = evaluate_perplexity(model, windows, ["bfloat16", "nvfp4"], kv_recipes=["plain"])
    for result, dtype in zip(own, found, strict=True):
        assert found[dtype] == pytest.approx(result.nll, rel=2e-3), dtype
    # Four bits show, so the cache was read.
    assert 1.002 < found["nvfp4"] / found["auto"] < 1.03


@needs_page_specs
@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined"])
def test_pages_of_other_scales_are_not_found(tmp_path: Path, joined: bool) -> None:
    """A connector does not find pages stored with other scales, which would decode to other values.

    `joined`: inside a `MultiConnector`, with halfbyte's attention for one kind of layers only.
    """
    stored = halfbyte.kvcache.KVScales.load(BUNDLED)
    assert stored is not None
    scales = {}
    for factor in (1, 40):
        folder = tmp_path / f"scales-{factor}"
        folder.mkdir()
        amax = [tuple(factor * x for x in side) for side in (stored.k_amax, stored.v_amax)]
        scales[factor] = halfbyte.kvcache.KVScales(amax[0], amax[1], "test").save(folder)
    transfer = example_connector(tmp_path / "pages")
    attention: dict[str, Any] = {}
    if joined:
        extra = {"connectors": [transfer]}
        transfer = {**transfer, "kv_connector": "MultiConnector"}
        transfer["kv_connector_extra_config"] = extra
        attention = {
            "attention_backend": None,
            "attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}},
        }
    prompts = [TEXTS[1] * 4 + text for text in TEXTS]
    found = {}
    for factor in (1, 40):
        options: dict[str, Any] = {
            "additional_config": {"halfbyte": {"kv_scales": str(scales[factor])}},
            "block_size": 16,
            "enable_prefix_caching": False,
            **attention,
        }
        with vllm_engine(**options) as llm:
            assert_ours(llm)
            expected = generate(llm, prompts)
        with vllm_engine(kv_transfer_config=transfer, **options) as llm:
            assert_ours(llm)
            found[factor] = generate(llm, prompts)
        assert found[factor] == expected
    assert found[1] != found[40]
    assert len(list((tmp_path / "pages").iterdir())) == 2


@pytest.mark.parametrize(
    ("capability", "backend", "given", "expected"),
    [
        ((9, 0), "CUSTOM", {}, True),
        ((9, 0), "CUSTOM with experts", {}, None),
        ((9, 0), "CUSTOM with NVFP4 experts", {}, True),
        ((9, 0), "CUSTOM", {OVERLAP: False}, False),
        ((9, 0), None, {}, None),
        ((8, 0), "CUSTOM", {}, None),
        (None, "CUSTOM", {}, None),
    ],
)
def test_launches_overlap_on_hopper(
    capability: tuple[int, int] | None,
    backend: str | None,
    given: dict[str, bool],
    expected: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, only the options for vLLM's compiler are checked."""
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    found = None if capability is None else DeviceCapability(*capability)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda *_: found)
    options: dict[str, Any] = {"compilation_config": {"inductor_compile_config": given}}
    if backend is not None:
        options["attention_backend"] = backend.split()[0]
        monkeypatch.setattr(ModelConfig, "is_moe", property(lambda _: "experts" in backend))
        monkeypatch.setattr(ModelConfig, "is_nvfp4_quantized", lambda _: "NVFP4" in backend)
        monkeypatch.setattr(layers, "wants_kernels", lambda *_: True)
    config = EngineArgs(model=BUNDLED, max_model_len=128, **options).create_engine_config()
    assert config.compilation_config.inductor_compile_config.get(OVERLAP) is expected


def test_every_sampling_parameter_is_known() -> None:
    """`halfbyte.SamplingParams` has it, or refuses it by name."""
    from vllm import SamplingParams

    own = set(halfbyte.SamplingParams.__dataclass_fields__)
    others = {x for x in SamplingParams.__struct_fields__ if not x.startswith("_")} - own
    assert len(others) > 10
    for name in others:
        with pytest.raises(ValueError, match=name):
            halfbyte.SamplingParams(**{name: 1})  # type: ignore[arg-type]
