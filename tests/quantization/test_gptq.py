"""GPTQ: weights rounded with error feedback, column by column and layer by layer."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.assets import bundled_model_path, calibration_text
from halfbyte.checkpoints.dialects.base import OutputFormat
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.output_folder import ShardWriter
from halfbyte.models import load_model, load_tokenizer
from halfbyte.models.layerwise import StreamedModel
from halfbyte.models.local_files import read_model_config
from halfbyte.numerics import nvfp4
from halfbyte.numerics.weighted_rounding import feedback_factor
from halfbyte.quantization import quantize_checkpoint
from halfbyte.quantization.calibrate_layers import CalibrationResult
from halfbyte.quantization.gptq import InputMoments, round_layers, round_with_feedback
from halfbyte.quantization.select_layers import select_layers
from halfbyte.quantization.write_layers import write_layers
from models.zoo import make_model, token_ids

OUTPUT = OutputFormat("modelopt", False, "amax6", None)
TEXT = calibration_text()[:1500]


def random_problem(n: int, k: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix, its global scale, and E[x x^T] of inputs that mostly lie in few directions."""
    generator = torch.Generator().manual_seed(n * k)
    weight = torch.randn(n, k, generator=generator)
    basis = torch.randn(rank, k, generator=generator, dtype=torch.float64)
    noise = 0.05 * torch.eye(k, dtype=torch.float64)
    return weight, nvfp4.global_scale_from_amax(weight.abs().max()), basis.T @ basis / rank + noise


def column_by_column(
    weight: torch.Tensor, scale: torch.Tensor, moment: torch.Tensor, recipe: nvfp4.Recipe
) -> torch.Tensor:
    """Dequantized values by the paper's loop in float64, damped as in the package."""
    k = weight.shape[1]
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    y, found = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    for i in range(k):
        if i % 16 == 0:
            scales = nvfp4.quantize(y[:, i : i + 16].float(), scale, recipe)[1]
            step = scales.double() * scale.double()
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64) * step
        distance = (y[:, i].abs()[:, None] - levels).abs()
        found[:, i] = y[:, i].sign() * levels.gather(1, distance.argmin(1, keepdim=True))[:, 0]
        error = (y[:, i] - found[:, i]) / upper[i, i]
        y[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
    return found


@pytest.mark.parametrize("recipe", nvfp4.RECIPES)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 64), (40, 96)])
def test_codes_are_those_of_the_paper_s_loop(n: int, k: int, recipe: nvfp4.Recipe) -> None:
    weight, _, moment = random_problem(n, k, rank=12)
    scale = nvfp4.global_scale_from_amax(weight.abs().max(), recipe)
    data, scales = round_with_feedback(weight, scale, feedback_factor(moment)[0], recipe)
    found = nvfp4.dequantize(data, scales, scale).double()
    torch.testing.assert_close(
        found, column_by_column(weight, scale, moment, recipe), rtol=1e-6, atol=1e-7
    )


def test_inputs_that_have_nothing_in_common_change_nothing() -> None:
    weight, scale, _ = random_problem(5, 64, rank=3)
    moment = torch.diag(torch.rand(64, dtype=torch.float64) + 0.1)
    data, scales = round_with_feedback(weight, scale, feedback_factor(moment)[0], "amax6")
    expected = nvfp4.quantize(weight, scale)
    assert torch.equal(data, expected[0])
    assert torch.equal(scales.view(torch.uint8), expected[1].view(torch.uint8))


@pytest.mark.parametrize("recipe", nvfp4.RECIPES)
def test_outputs_are_closer_than_those_of_rounding_to_nearest(recipe: nvfp4.Recipe) -> None:
    weight, _, moment = random_problem(64, 256, rank=20)
    scale = nvfp4.global_scale_from_amax(weight.abs().max(), recipe)

    def cost(data: torch.Tensor, scales: torch.Tensor) -> float:
        error = weight.double() - nvfp4.dequantize(data, scales, scale).double()
        return float(((error @ moment) * error).sum())

    nearest = cost(*nvfp4.quantize(weight, scale, recipe))
    assert (
        cost(*round_with_feedback(weight, scale, feedback_factor(moment)[0], recipe))
        < 0.25 * nearest
    )


def test_moments_are_of_the_inputs_of_each_layer() -> None:
    model = make_model("llama")
    attention = model.model.layers[0].self_attn
    layers: list[torch.nn.Linear] = [
        attention.q_proj,
        attention.k_proj,
        attention.o_proj,
        model.lm_head,
    ]
    inputs: dict[torch.nn.Module, list[torch.Tensor]] = {layer: [] for layer in layers}
    hooks = [
        layer.register_forward_pre_hook(lambda m, a: inputs[m].append(a[0].flatten(0, -2)))
        for layer in layers
    ]
    with InputMoments([layer.weight for layer in layers[:3]]) as moments, torch.inference_mode():
        for seed in (1, 2):
            model(token_ids(1, 9, seed=seed))
    for hook in hooks:
        hook.remove()
    for layer in layers[:3]:
        x = torch.cat(inputs[layer]).double()
        expected = feedback_factor(x.T @ x / len(x))[0]
        torch.testing.assert_close(moments.factor(layer.weight), expected)
    shared = moments.factor(layers[0].weight)
    assert moments.factor(layers[1].weight) is shared
    assert moments.factor(layers[2].weight) is not shared
    assert not moments.factor(layers[3].weight).any()  # no inputs were recorded


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "phi3", "gpt_oss"])
def test_layers_see_what_the_rounded_layers_before_them_give(
    tmp_path: Path, architecture: str
) -> None:
    """Against the whole model in memory, whose layers are rounded one after the other."""
    make_model(architecture).save_pretrained(tmp_path)
    config, index = read_model_config(tmp_path), CheckpointIndex.read(tmp_path)
    selection = select_layers(config, index)
    ids = token_ids(3, 40)
    done: list[tuple[int, int]] = []
    rounded = round_layers(
        tmp_path, config, ids, selection, OUTPUT, "cpu", lambda *progress: done.append(progress)
    )
    assert set(rounded) == set(selection.modules)
    assert done == [(i + 1, 4) for i in range(4)]
    model = load_model(tmp_path, dtype="float32", device="cpu")
    for i in range(4):
        groups = [group for group in selection.groups if f".layers.{i}." in group[0]]
        named = dict(model.named_parameters())
        weights = {name: named[f"{name}.weight"].detach() for group in groups for name in group}
        with InputMoments(list(weights.values())) as moments, torch.inference_mode():
            for row in ids.split(1):
                model(row, use_cache=False)
        for group in groups:
            amax = max(float(weights[name].abs().max()) for name in group)
            scale = nvfp4.global_scale_from_amax(amax)
            for name in group:
                weight = weights[name]
                factor = moments.factor(weight)
                data, scales = round_with_feedback(weight, scale, factor, "amax6")
                wanted = nvfp4.dequantize(data, scales, scale)
                found = nvfp4.dequantize(*rounded[name].weight, scale)
                # Sums in another order may take a value next to a tie to its other side.
                assert (wanted != found).double().mean() < 0.01
                assert rounded[name].scale.decode == scale
                weight.copy_(found)


def test_layers_are_freed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer has run, nothing holds the linear layers of those before it."""
    make_model("llama").save_pretrained(tmp_path)
    config, index = read_model_config(tmp_path), CheckpointIndex.read(tmp_path)
    alive: list[weakref.ref[torch.nn.Module]] = []
    made = StreamedModel.__init__

    def watched(self: StreamedModel, *args: Any) -> None:
        made(self, *args)
        base: Any = self.model.base_model
        alive.extend(weakref.ref(layer.mlp.up_proj) for layer in base.layers)

    monkeypatch.setattr(StreamedModel, "__init__", watched)
    counts: list[int] = []

    def on_layer(done: int, total: int) -> None:
        gc.collect()
        counts.append(sum(ref() is not None for ref in alive[:done]))

    selection = select_layers(config, index)
    round_layers(tmp_path, config, token_ids(1, 8), selection, OUTPUT, "cpu", on_layer)
    assert len(alive) == 4
    assert counts == [0, 0, 0, 0]


def test_scales_are_those_that_codes_were_rounded_with(tmp_path: Path) -> None:
    """For a float32 file whose config says bfloat16, the dtype in which layers run."""
    make_model("llama").save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    folder = tmp_path / "source"
    config, index = read_model_config(folder), CheckpointIndex.read(folder)
    selection = select_layers(config, index)
    rounded = round_layers(folder, config, token_ids(1, 30), selection, OUTPUT, "cpu")
    writer = ShardWriter(tmp_path, 2**30)
    reports = write_layers(index, writer, selection, OUTPUT, CalibrationResult(), rounded=rounded)
    writer.finish()
    written = load_file(tmp_path / "model.safetensors")
    exact = load_file(folder / "model.safetensors")
    amax = max(float(exact[f"{name}.weight"].abs().max()) for name in selection.groups[0])
    for name in selection.groups[0]:
        scale = written[f"{name}.weight_scale_2"]
        assert float(scale) == float(rounded[name].scale.decode)
        assert float(scale) != float(nvfp4.global_scale_from_amax(amax))  # the case is one
        assert torch.equal(written[f"{name}.weight"], rounded[name].weight.data)
    assert {report.module for report in reports} == set(selection.modules)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path)
    config, index = read_model_config(tmp_path), CheckpointIndex.read(tmp_path)
    with pytest.raises(ValueError, match=r"gptq cannot round experts, such as .*experts\.0\."):
        round_layers(tmp_path, config, token_ids(1, 8), select_layers(config, index), OUTPUT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two layers of the bundled model, and its tokenizer."""
    folder = tmp_path / "source"
    folder.mkdir()
    for file in bundled_model_path().glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((bundled_model_path() / "config.json").read_text())
    layers = {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps({**config, **layers}))
    weights = load_file(bundled_model_path() / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if ".layers." not in name or name.split(".")[2] in {"0", "1"}
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_checkpoint_by_gptq_is_closer_to_its_source(
    source: Path, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = source.parent / "text.txt"
    text.write_text(TEXT)
    errors = {}
    exact = load_model(source, dtype="float32", device="cpu")
    ids = load_tokenizer(source)(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = exact(ids).logits
        for method in ("rtn", "gptq"):
            target = source.parent / method
            report = quantize_checkpoint(
                source,
                target,
                dialect=dialect,
                weights="nvfp4-a16",
                method=method,
                calibration_file=text if method == "gptq" else None,
            )
            assert report.method == method
            assert (report.calibration is None) == (method == "rtn")
            model = load_model(target, dtype="float32", device="cpu")
            errors[method] = float((model(ids).logits - logits).square().mean())
    assert errors["gptq"] < 0.9 * errors["rtn"]
    assert "calibration tokens are few for layers of" in caplog.text


def test_unknown_methods_and_texts_for_nothing_are_refused(source: Path) -> None:
    target = source.parent / "target"
    with pytest.raises(ValueError, match="method: expected one of rtn, gptq, got 'awq'"):
        quantize_checkpoint(source, target, dialect="modelopt", method="awq")
    text = source.parent / "text.txt"
    text.write_text(TEXT)
    with pytest.raises(ValueError, match="by method rtn need no calibration"):
        quantize_checkpoint(
            source, target, dialect="modelopt", weights="nvfp4-a16", calibration_file=text
        )
    assert not target.exists()
