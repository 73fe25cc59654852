"""Written checkpoints can be loaded; unloadable ones are refused before anything is written."""

import os
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.assets import bundled_model_path, calibration_text
from halfbyte.checkpoints import read_kv_scales
from halfbyte.checkpoints.dialects.registry import DIALECTS
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.models import load_model
from halfbyte.quantization import quantize_checkpoint
from models.zoo import make_model

LAYER = "model.layers.2.mlp.up_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    config = (bundled_model_path() / "config.json").read_bytes()
    (folder / "config.json").write_bytes(config)
    write_weights(folder, load_file(bundled_model_path() / "model.safetensors"))
    return folder


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", [f"{LAYER}.weight", "model.norm.weight"])
def test_quantize_refuses_an_absent_weight(source: Path, dialect: str, name: str) -> None:
    weights = load_file(source / "model.safetensors")
    shape = list(weights.pop(name).shape)
    write_weights(source, weights)
    target = source.parent / "target"
    with pytest.raises(CheckpointError) as error:
        quantize_checkpoint(source, target, dialect=dialect, weights="nvfp4-a16")
    found = f"{name}: expected BF16/F16/F32 {shape}, found no such tensor"
    assert str(error.value) == f"{source}: {found}"
    assert list(source.parent.iterdir()) == [source]


@pytest.mark.parametrize("what", ["device", "pipe"])
def test_quantize_copies_no_devices(source: Path, what: str) -> None:
    """A copy of `/dev/zero` would fill the disk."""
    file = source / "chat_template.jinja"
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero") if what == "device" else os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"jinja: expected a file, found something else"):
        quantize_checkpoint(
            source, source.parent / "target", dialect="modelopt", weights="nvfp4-a16"
        )
    assert list(source.parent.iterdir()) == [source]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_quantize_copies_foreign_tensors(source: Path, dialect: str) -> None:
    """`load_model` ignores them in the source and in the written checkpoint."""
    weights = load_file(source / "model.safetensors")
    foreign = {"model.norm.bias": torch.ones(3), "other.up_proj.weight": torch.ones(16, 16)}
    write_weights(source, {**weights, **foreign})
    load_model(source, device="cpu")
    target = source.parent / "target"
    quantize_checkpoint(source, target, dialect=dialect, weights="nvfp4-a16")
    written = load_file(target / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in foreign.items())
    load_model(target, device="cpu")


@pytest.mark.parametrize("names", ["self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_quantize_replaces_kv_scales_of_either_dialect(
    source: Path, dialect: str, names: str
) -> None:
    weights = load_file(source / "model.safetensors")
    old = {
        f"model.layers.{layer}.{names.format(side)}": torch.tensor(0.5)
        for layer in range(10)
        for side in "kv"
    }
    write_weights(source, {**weights, **old})
    for file in bundled_model_path().glob("token*"):
        (source / file.name).write_bytes(file.read_bytes())
    text = source.parent / "text.txt"
    text.write_text("import os\n" * 20)
    target = source.parent / "target"
    options = {"weights": "nvfp4-a16", "kv_cache_dtype": "nvfp4", "calibration_file": text}
    quantize_checkpoint(source, target, dialect=dialect, **options)  # type: ignore[arg-type]
    scales = read_kv_scales(target)
    assert len(scales) == 10
    assert all(0.5 not in pair for pair in scales.values())
    load_model(target, device="cpu")


def test_quantize_names_a_link_to_nothing_before_it_begins(source: Path) -> None:
    (source / "README.md").symlink_to(source / "absent")
    with pytest.raises(CheckpointError, match=r"README.md: expected a file, found a link to noth"):
        quantize_checkpoint(
            source, source.parent / "target", dialect="modelopt", weights="nvfp4-a16"
        )
    assert list(source.parent.iterdir()) == [source]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_quantize_foreign_bias_of_a_quantized_layer(source: Path, dialect: str) -> None:
    """In a quantized layer loading refuses it; in an unquantized one it is ignored."""
    weights = load_file(source / "model.safetensors")
    write_weights(source, {**weights, f"{LAYER}.bias": torch.ones(704)})
    target = source.parent / "target"
    with pytest.raises(CheckpointError, match=rf"{LAYER}.bias: expected no such tensor beside"):
        quantize_checkpoint(source, target, dialect=dialect, weights="nvfp4-a16")
    assert list(source.parent.iterdir()) == [source]
    quantize_checkpoint(source, target, dialect=dialect, weights="nvfp4-a16", ignore=[LAYER])
    load_model(target, device="cpu")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_quantize_ignoring_the_head_and_routers_changes_nothing(
    tmp_path: Path, dialect: str
) -> None:
    make_model("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "source")
    written = []
    for i, ignore in enumerate(([], ["lm_head", "re:.*mlp.gate$"])):
        target = tmp_path / str(i)
        quantize_checkpoint(
            tmp_path / "source", target, dialect=dialect, weights="nvfp4-a16", ignore=ignore
        )
        written.append({file.name: file.read_bytes() for file in target.iterdir()})
    assert written[0] == written[1]
    load_model(target, device="cpu")


def test_quantize_gives_a_silent_layer_the_median_scale(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """V of the layer is zero on the text; a stored scale of 0 would be refused by readers."""
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"].zero_()
    write_weights(source, weights)
    for file in bundled_model_path().glob("tokenizer*"):
        (source / file.name).write_bytes(file.read_bytes())
    target = source.parent / "target"
    text = source.parent / "text.txt"
    text.write_text(calibration_text()[:2000])
    quantize_checkpoint(
        source,
        target,
        dialect="modelopt",
        weights="nvfp4-a16",
        kv_cache_dtype="fp8",
        calibration_file=text,
    )
    scales = read_kv_scales(target)
    others = [v for layer, (_, v) in scales.items() if layer != 1]
    assert scales[1][1] == pytest.approx(median(others), rel=1e-6)
    assert "V is all zero in layer 1" in caplog.text


def test_quantize_names_the_weight_that_is_not_finite(source: Path) -> None:
    """Not the layer behind it, whose inputs it spoils."""
    for file in bundled_model_path().glob("tokenizer*"):
        (source / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    weights[f"{LAYER}.weight"][3, 5] = torch.nan
    write_weights(source, weights)
    (source.parent / "text.txt").write_text("Some text. " * 20)
    with pytest.raises(CheckpointError) as error:
        quantize_checkpoint(
            *(source, source.parent / "target"),
            dialect="modelopt",
            weights="nvfp4",
            calibration_file=source.parent / "text.txt",
        )
    assert str(error.value) == f"{LAYER}.weight: expected finite values, found NaN or infinity"
