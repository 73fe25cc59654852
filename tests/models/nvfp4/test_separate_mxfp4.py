"""compressed-tensors' mixtures in MXFP4: experts stay in four bits."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import halfbyte
from checkpoints.folders import load_model
from checkpoints.mxfp4_folders import make_mxfp4
from halfbyte import LLM, SamplingParams
from halfbyte.checkpoints import CheckpointError
from halfbyte.models.kv_calibration import measure_amax
from halfbyte.models.layerwise import calibrate_checkpoint
from halfbyte.moe.separate_mxfp4 import SeparateMxFp4Experts
from models.zoo import token_ids
from slow import slow

EXPERT = "model.layers.1.block_sparse_moe.experts.2"
SCALES = f"{EXPERT}.w3.weight_scale"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return make_mxfp4(tmp_path)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def declare(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    edit(fields["quantization_config"])
    file.write_text(json.dumps(fields))


def experts_of(model: Any) -> list[SeparateMxFp4Experts]:
    found = [layer.mlp.experts for layer in model.model.layers]
    assert all(isinstance(experts, SeparateMxFp4Experts) for experts in found)
    return found


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == "halfbyte"]
    return [record.message for record in records if record.levelno >= logging.WARNING]


def assert_same_logits(model: Any, plain: Path) -> None:
    ids = token_ids(2, 19)
    expected = load_model(plain)(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["mixtral", slow("qwen3_moe"), slow("gpt_oss")])
def test_experts_stay_in_four_bits(
    tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, plain = make_mxfp4(tmp_path, architecture)
    model = load_model(folder)
    for experts in experts_of(model):
        assert experts.kernel is not None
        assert experts.kernel.config.weight_format == "mxfp4"
        assert experts.has_bias == (architecture == "gpt_oss")
    assert_same_logits(model, plain)
    assert warnings_of(caplog) == []


def test_tokens_are_those_of_dequantized_weights(folders: tuple[Path, Path]) -> None:
    prompts = [token_ids(length, seed=length).tolist() for length in (1, 7, 40)]
    params = SamplingParams(max_tokens=12, temperature=0)
    found = [
        [output.token_ids for output in LLM(load_model(folder)).generate(prompts, params)]
        for folder in folders
    ]
    assert found[0] == found[1]


def test_linear_layers_are_dequantized_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, plain = make_mxfp4(tmp_path, all_layers=True)
    model = load_model(folder)
    assert_same_logits(model, plain)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.float32
    experts_of(model)
    (message,) = warnings_of(caplog)
    assert message == (
        "model.layers.0.self_attn.q_proj: dequantized to float32, and so are 7 more MXFP4 layers: "
        "in this format only experts run in four bits"
    )


def test_backend_of_the_callers_choice(folders: tuple[Path, Path]) -> None:
    model = load_model(folders[0], moe_backend="reference")
    kernels = [experts.kernel for experts in experts_of(model)]
    assert [kernel and kernel.name for kernel in kernels] == ["reference"] * 2
    assert_same_logits(model, folders[1])


def test_calibration_layer_by_layer(folders: tuple[Path, Path]) -> None:
    """As of `halfbyte calibrate`, for the cache inside vLLM."""
    scales = calibrate_checkpoint(folders[0], device="cpu", max_tokens=64)
    ids = torch.randint(0, 131, (1, 64), generator=torch.Generator().manual_seed(0))
    amax = measure_amax(load_model(folders[0]), ids)
    assert scales.k_amax == pytest.approx([2 * k for k, _ in amax])


def test_state_dict_is_that_of_the_file(folders: tuple[Path, Path]) -> None:
    experts = experts_of(load_model(folders[0]))[1]
    saved = experts.state_dict()
    tensors = load_file(folders[0] / "model.safetensors")
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    prefix = "model.layers.1.block_sparse_moe.experts."
    stored = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
    assert len(stored) == len(saved) == 4 * 3 * 2
    for name, tensor in stored.items():
        expert, own, part = name.split(".")
        assert torch.equal(saved[f"{expert}.{names[own]}.{part}"], tensor), name
    again = SeparateMxFp4Experts(4, 128, 96, dialect="compressed-tensors")
    again.load_state_dict(saved)
    ids, weights = torch.tensor([[0, 3]]), torch.tensor([[0.3, 0.7]])
    x = torch.randn(1, 128)
    assert torch.equal(again(x, ids, weights), experts(x, ids, weights))
    assert torch.equal(copy.deepcopy(again)(x, ids, weights), again(x, ids, weights))
    del saved["2.up_proj.weight_scale"]
    empty = SeparateMxFp4Experts(4, 128, 96, dialect="compressed-tensors")
    with pytest.raises(RuntimeError, match=r"Missing key.*2\.up_proj\.weight_scale"):
        empty.load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"2\.up_proj\.weight_scale: expected a tensor, foun"):
        empty.process_weights_after_loading()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop(SCALES),
            r"2\.up_proj\.weight_scale: expected U8 \[96, 4\], found no such",
        ),
        (
            lambda t: t.update({SCALES: t[SCALES][:, :3].contiguous()}),
            r"2\.up_proj\.weight_scale: expected U8 \[96, 4\], found U8 \[96, 3\]",
        ),
        (
            lambda t: t[SCALES][7].fill_(0xFF),
            r"layers\.1\.mlp\.experts\.2\.up_proj\.weight_scale: expected finite .*4 NaN of 384",
        ),
        (
            lambda t: t.update({f"{EXPERT}.w3.weight_global_scale": torch.ones(1)}),
            r"2\.up_proj\.weight_global_scale: expected no such tensor beside mxfp4 weights",
        ),
        (
            lambda t: (
                [t.pop(f"{EXPERT}.w2.weight_{part}") for part in ("packed", "scale")],
                t.update({f"{EXPERT}.w2.weight": torch.randn(128, 96)}),
            ),
            r"2\.down_proj: expected mxfp4 weights, as most experts .*found unquantized ones",
        ),
    ],
)
def test_bad_files_are_one_line(
    folders: tuple[Path, Path], edit: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    change(folders[0], edit)
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(folders[0])
    assert "\n" not in str(error.value)


def test_a_linear_layer_with_a_nan(tmp_path: Path) -> None:
    folder, _ = make_mxfp4(tmp_path, all_layers=True)
    change(folder, lambda t: t["model.layers.1.self_attn.o_proj.weight_scale"][3].fill_(0xFF))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_scale: .* found 4 NaN of 512"):
        load_model(folder)


def test_activations_stay_in_16_bits(folders: tuple[Path, Path]) -> None:
    """As of the preset MXFP4, whose activations are quantized when they are used."""

    def quantize_inputs(section: dict[str, Any]) -> None:
        group = section["config_groups"]["group_0"]
        group["input_activations"] = {**group["weights"], "dynamic": True}

    declare(folders[0], quantize_inputs)
    assert_same_logits(load_model(folders[0]), folders[1])
    with pytest.raises(ValueError, match="quantize_activations: the checkpoint has no activation"):
        load_model(folders[0], quantize_activations=True)


@pytest.mark.parametrize(
    ("field", "value"), [("group_size", 64), ("symmetric", False), ("scale_dtype", "float8_e4m3fn")]
)
def test_other_fields_are_refused(folders: tuple[Path, Path], field: str, value: object) -> None:
    declare(folders[0], lambda s: s["config_groups"]["group_0"]["weights"].update({field: value}))
    with pytest.raises(CheckpointError, match=rf"config_groups\.group_0\.weights: .*{field}"):
        load_model(folders[0])


def test_the_packages_own_files(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """compressed-tensors packs the same bytes."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme = quantization.preset_name_to_scheme("MXFP4A16", ["Linear"])
    own = load_file(folders[0] / "model.safetensors")
    parts = {part: own[f"{EXPERT}.w3.weight_{part}"] for part in ("packed", "scale")}
    stored = {"weight_packed": parts["packed"], "weight_scale": parts["scale"]}
    theirs = compressors.MXFP4PackedCompressor.decompress(stored, scheme)["weight"]
    plain = load_file(folders[1] / "model.safetensors")[f"{EXPERT}.w3.weight"]
    assert torch.equal(theirs.float(), plain)
    args = json.loads(scheme.weights.model_dump_json(exclude_unset=True))
    declare(folders[0], lambda s: s["config_groups"]["group_0"].update({"weights": args}))
    experts_of(load_model(folders[0]))


def test_other_formats_of_experts_are_not_dequantized_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here int4; transformers itself has the weights."""
    pytest.importorskip("compressed_tensors")
    folder, _ = make_mxfp4(tmp_path)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}

    def as_int4(section: dict[str, Any]) -> None:
        section["format"] = section["config_groups"]["group_0"]["format"] = "pack-quantized"
        section["config_groups"]["group_0"]["weights"] = {**weights, "symmetric": True}

    declare(folder, as_int4)
    seen: list[Path] = []

    def loaded(folder: Path, *_: Any) -> Any:
        seen.append(folder)
        raise halfbyte.models.ModelLoadError("loaded")

    monkeypatch.setattr("halfbyte.models.loader.load_by_transformers", loaded)
    with pytest.raises(halfbyte.models.ModelLoadError, match=r"^loaded$"):
        load_model(folder)
    assert seen == [folder]
    (message,) = warnings_of(caplog)
    assert message == (
        f"{folder}: experts in compressed-tensors' pack-quantized are dequantized to 16 bits by "
        "transformers; experts in NVFP4 and MXFP4 run in four bits"
    )
