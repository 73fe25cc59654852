"""KV scales in a checkpoint's files: names and directions of all dialects."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.checkpoints import CheckpointError, read_kv_scales
from halfbyte.checkpoints.dialects.base import OutputFormat
from halfbyte.checkpoints.dialects.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.index import INDEX_FILE, SINGLE_FILE
from halfbyte.checkpoints.stored_kv_scales import is_kv_scale


def write(folder: Path, scales: dict[str, float]) -> Path:
    """Write scales of layer 3."""
    tensors = {
        f"model.layers.3.self_attn.{name}": torch.tensor([value]) for name, value in scales.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "scales",
    [
        {"k_scale": 0.25, "v_scale": 0.5},
        {"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5},
        {"attn.k_scale": 0.25, "attn.v_scale": 0.5},
        {"k_global_scale": 4.0, "v_global_scale": 2.0},
        {"k_scale": 0.25, "k_proj.k_scale": 0.25, "v_scale": 0.5},
        {"k_scale": 0.25, "k_global_scale": 24.0, "v_scale": 0.5, "v_global_scale": 12.0},
        {"k_scale": 0.25, "v_global_scale": 2.0},
        {"k_proj.output_scale": 0.25, "v_proj.output_scale": 0.5, "q_proj.output_scale": 9.0},
        {"qkv_proj.k_scale": 0.25, "qkv_proj.v_scale": 0.5},
        {"k_cache.scale": 0.25, "v_cache.scale": 0.5, "q.scale": 9.0},
        {"k_fake_quantizer.qscale_act": 0.25, "v_fake_quantizer.qscale_act": 0.5},
        {"k_scale": 0.25, "v_scale": 0.5, "k_proj.output_zero_point": 0.0},
    ],
    ids=[
        *("compressed-tensors", "modelopt", "older", "global", "twice the same", "both", "mixed"),
        *("outputs", "fused", "hunyuan", "mistral", "an offset of zero"),
    ],
)
def test_all_are_read_as_decode_scales(tmp_path: Path, scales: dict[str, float]) -> None:
    assert read_kv_scales(write(tmp_path, scales)) == {3: (0.25, 0.5)}


@pytest.mark.parametrize("name", ["attn.kv_scale", "kv_scale", "kv_fake_quantizer.qscale_act"])
def test_one_scale_may_be_for_both(tmp_path: Path, name: str) -> None:
    assert read_kv_scales(write(tmp_path, {name: 0.25})) == {3: (0.25, 0.25)}


UNKNOWN = (
    *("qkv_proj.output_scale", "attention.qkv.output_scale", "k_proj.output_scale_inv"),
    *("kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor", "kv_orig_quant_scale"),
    *("k_cache_scale", "v_cache_scale", "kv_cache.scale", "k_cache.scale_inv", "key_cache_scale"),
    *("k_scale_inv", "v_scales", "attn._k_scale", "key_scale", "k_descale", "k_quant_scale"),
    *("k_bmm_quantizer._amax", "v_bmm_quantizer._amax", "v_bmm_quantizer._scale", "v_amax"),
    *("k_proj.output_quantizer._amax", "qkv_proj.output_quantizer._amax", "scale_v"),
    *("kscale", "K_scale", "keyScale", "k_scale.weight", "cache_k_scale", "past_key_scale"),
    *("k_per_tensor_scale", "k_inv_scale", "k_observer.scale", "v_quant.amax", "quant_v.scales"),
)


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("beside", [{}, {"k_scale": 0.25, "v_scale": 0.5}], ids=["alone", "beside"])
def test_scales_under_unknown_names_are_refused(
    tmp_path: Path, name: str, beside: dict[str, float]
) -> None:
    """Their direction or unit is not certain, so that the values could be wrong by any factor."""
    folder = write(tmp_path, {name: 0.5, **beside})
    message = rf"layers\.3\.self_attn\.{re.escape(name)}: expected the scales of a language model"
    with pytest.raises(CheckpointError, match=message) as error:
        read_kv_scales(folder)
    assert ("export_hf_checkpoint" in str(error.value)) is ("_quantizer." in name)
    assert is_kv_scale(f"model.layers.3.self_attn.{name}")


INNOCENT = (
    *("k_proj.weight_scale", "v_proj.weight_scale_inv", "k_proj.weight_scale_2", "k_proj.scale"),
    *("k_proj.input_scale", "qkv_proj.input_global_scale", "k_proj.pre_quant_scale", "k_proj.bias"),
    *("k_proj.weight_quantizer._amax", "v_proj.input_quantizer._amax", "v_proj.qweight"),
    *("q_scale", "q_proj.output_scale", "o_proj.output_scale", "prob_output_scale"),
    *("q_bmm_quantizer._amax", "o_proj.output_quantizer._amax", "k_proj.activation_scaling_factor"),
    *("k_norm.scale", "kv_a_layernorm.scale", "kv_b_proj.weight_scale_inv", "attn.scale"),
    *("k_proj.lora_scaling", "v_proj.scales", "qk_scale", "q_k_scale", "k_ln.scale"),
    *("v_residual_scale", "k_norm_scale", "k_weight_scale", "value_bias_scale", "k_norm.weight"),
    *("indexer.k_scale", "indexer.k_cache.scale", "compressor.kv_scale_inv", "mlp.v_scale_inv"),
)


@pytest.mark.parametrize("name", INNOCENT)
def test_tensors_that_are_no_scales_of_k_and_v_are_passed_over(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, {name: 9.0, "k_scale": 0.25, "v_scale": 0.5})
    assert read_kv_scales(folder) == {3: (0.25, 0.5)}
    assert not is_kv_scale(f"model.layers.3.self_attn.{name}")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool, torch.complex64])
def test_integers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """A byte may be the exponent of an E8M0 scale."""
    name = "model.layers.0.self_attn.{}_scale"
    tensors = {name.format(side): torch.ones(1, dtype=dtype) for side in "kv"}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="_scale: expected a floating-point number, found"):
        read_kv_scales(tmp_path)


def test_small_floats_are_read(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.{}_scale"
    dtypes = {"k": torch.float8_e8m0fnu, "v": torch.bfloat16}
    tensors = {name.format(side): torch.tensor([0.0625]).to(x) for side, x in dtypes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_kv_scales(tmp_path) == {0: (0.0625, 0.0625)}


def test_a_scale_outside_the_layers_is_refused(tmp_path: Path) -> None:
    save_file({"kv_cache_scaling_factor": torch.tensor(0.5)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"kv_cache_scaling_factor: expected the scales of"):
        read_kv_scales(tmp_path)


@pytest.mark.parametrize("name", ["k_cache" + "_a" * 9999, "k" + "_quant" * 9999, "_" * 9999])
def test_long_names_take_no_time(name: str) -> None:
    start = time.monotonic()
    assert not is_kv_scale(f"model.layers.0.{name}!")
    assert time.monotonic() - start < 1


def test_names_are_matched_whole(tmp_path: Path) -> None:
    """Drafts and vision towers in the same files have layers with the same numbers."""
    names = {
        "model.layers.0.self_attn.": 1.0,
        "model.language_model.layers.1.self_attn.": 2.0,
        "layers.2.self_attn.": 3.0,
        "mtp.layers.0.self_attn.": 10.0,
        "model.mtp.layers.0.self_attn.": 10.0,
        "eagle_module.layers.1.self_attn.": 10.0,
        "model.vision_tower.encoder.layers.2.self_attn.": 10.0,
    }
    scales = {f"{n}{side}_scale": torch.tensor(x) for n, x in names.items() for side in "kv"}
    save_file(scales, tmp_path / "model.safetensors")
    assert read_kv_scales(tmp_path) == {0: (1.0, 1.0), 1: (2.0, 2.0), 2: (3.0, 3.0)}


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_global_scale": 0.0, "v_global_scale": 2.0}, "k_global_scale: .*above 0, found 0.0"),
        ({"k_global_scale": 4.0, "v_global_scale": float("nan")}, "v_global_scale: .*found nan"),
        ({"k_global_scale": 4.0}, "layer 3 has a k_scale only"),
        ({"k_scale": float("nan"), "v_scale": 0.5}, "k_scale: .*above 0, found nan"),
        ({"k_scale": 0.5, "v_scale": 0.0}, "v_scale: .*above 0, found 0.0"),
        ({"k_scale": -1.0, "v_scale": 0.5}, "k_scale: .*found -1.0"),
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": float("inf")}, "v_proj.v_scale: .*found inf"),
        (
            {"k_scale": 0.5, "k_proj.k_scale": 0.25, "v_scale": 0.5},
            "expected one k_scale in the layer, found ",
        ),
    ],
)
def test_refuses(tmp_path: Path, scales: dict[str, float], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_kv_scales(write(tmp_path, scales))


@pytest.mark.parametrize("names", [("k_proj.k_", "v_proj.v_"), ("k_", "v_")])
@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("offset", ["bias", "zero_point"])
def test_affine_caches_are_refused(
    tmp_path: Path, names: tuple[str, str], is_indexed: bool, offset: str
) -> None:
    """They declare a plain FP8 cache, but store K and V minus their offsets."""
    write(tmp_path, {f"{name}{kind}": 0.5 for name in names for kind in ("scale", offset)})
    if is_indexed:
        offsets = {
            f"model.layers.3.self_attn.{name}{offset}": "model.safetensors" for name in names
        }
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": offsets}))
    with pytest.raises(CheckpointError, match=rf"k_{offset}: expected .* alone, found the offset"):
        read_kv_scales(tmp_path)


OWN = {"model.layers.0.self_attn.k_scale": 0.5, "model.layers.0.self_attn.v_scale": 0.25}
OTHERS = (
    *("eagle3.", "eagle.model.", "draft.", "drafter.model.", "speculator.", "medusa.", "mtp_head."),
    *("nextn.", "encoder.", "model.mtp_block.", "model.vision_tower.encoder.", "audio_tower."),
)


@pytest.mark.parametrize("other", [f"{name}layers.0.self_attn" for name in OTHERS])
def test_scales_of_other_models_are_not_the_models(tmp_path: Path, other: str) -> None:
    scales = {**OWN, f"{other}.k_scale": 5.0, f"{other}.v_scale": 7.0}
    tensors = {name: torch.tensor(value) for name, value in scales.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_kv_scales(tmp_path) == {0: (0.5, 0.25)}
    assert not is_kv_scale(f"{other}.k_scale")


def test_scales_in_a_draft_block_are_not_the_models(tmp_path: Path) -> None:
    inner = "model.layers.0.mtp_block.self_attn"
    scales = {**OWN, f"{inner}.k_scale": 5.0, f"{inner}.v_scale": 7.0}
    tensors = {name: torch.tensor(value) for name, value in scales.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_kv_scales(tmp_path) == {0: (0.5, 0.25)}


def test_scales_of_unknown_modules_alone_are_refused(tmp_path: Path) -> None:
    names = [f"backbone.layers.0.mixer.{side}_scale" for side in "kv"]
    save_file({name: torch.tensor(0.5) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mixer.k_scale: expected the scales of a language"):
        read_kv_scales(tmp_path)


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 7)
    with pytest.raises(ValueError, match="not a readable safetensors file") as error:
        read_kv_scales(tmp_path)
    assert "\n" not in str(error.value)


def test_names_of_4_bit_caches_in_compressed_tensors() -> None:
    """The package's own names and directions of the scales of such a cache."""
    package = "compressed_tensors.quantization"
    theirs = pytest.importorskip(package)
    initialize = pytest.importorskip(f"{package}.lifecycle.initialize").initialize_qparams
    encode_scale = pytest.importorskip(f"{package}.utils.helpers").generate_gparam
    declaration = CompressedTensors().config_section(OutputFormat("compressed-tensors", True), [])
    # A cache is declared as activations are.
    args = theirs.QuantizationArgs(**declaration["config_groups"]["group_0"]["input_activations"])
    attention = torch.nn.Linear(1, 1)
    before = set(dict(attention.named_parameters()))
    for side in ("k", "v"):
        initialize(attention, side, args, (2, None, 16), torch.float32)
    made = set(dict(attention.named_parameters())) - before
    assert made == {"k_global_scale", "v_global_scale"}
    assert float(encode_scale(torch.tensor(-2.0), torch.tensor(8.0))) == 2688 / 8


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}']
    + [f'{{"weight_map": {{"model.layers.0.self_attn.k_scale": {x}}}}}' for x in ("5", '"../a"')],
)
def test_a_broken_index_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"index.json: expected .*, found") as error:
        read_kv_scales(tmp_path)
    assert "\n" not in str(error.value)
    save_file(
        {f"model.layers.0.self_attn.{x}_scale": torch.tensor(0.5) for x in "kv"},
        tmp_path / SINGLE_FILE,
    )
    assert read_kv_scales(tmp_path) == {0: (0.5, 0.5)}


def test_scales_come_from_the_file_that_the_weights_come_from(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.{}_scale"
    for file, value in (("model.safetensors", 0.5), ("model-1.safetensors", 0.25)):
        save_file({name.format(side): torch.tensor(value) for side in "kv"}, tmp_path / file)
    shards = {name.format(side): "model-1.safetensors" for side in "kv"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": shards}))
    assert read_kv_scales(tmp_path) == {0: (0.5, 0.5)}
    both = {**shards, "lm_head.weight": "model.safetensors"}  # one set of files after all
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": both}))
    assert read_kv_scales(tmp_path) == {0: (0.25, 0.25)}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "model.safetensors").unlink()
    assert read_kv_scales(tmp_path) == {0: (0.25, 0.25)}
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected the shard model-1\.safetensors"):
        read_kv_scales(tmp_path)


@pytest.mark.parametrize("names", [OWN, {"model.layers.0.self_attn.kv_scale_inv": 0.5}])
@pytest.mark.parametrize("file", ["model-1.safetensors", "scales.safetensors"])
def test_scales_that_an_index_leaves_out(
    tmp_path: Path, names: dict[str, float], file: str
) -> None:
    """In a shard that it lists, which transformers reads whole, or in one that it does not list."""
    weight = {"model.norm.weight": torch.ones(2)}
    save_file(weight, tmp_path / "model-1.safetensors")
    scales = {name: torch.tensor(value) for name, value in names.items()}
    save_file({**(weight if file[0] == "m" else {}), **scales}, tmp_path / file)
    weight_map = dict.fromkeys(weight, "model-1.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    if names is OWN:
        assert read_kv_scales(tmp_path) == {0: (0.5, 0.25)}
    else:
        with pytest.raises(CheckpointError, match="kv_scale_inv: expected the scales of"):
            read_kv_scales(tmp_path)


def test_a_scale_that_is_not_where_the_index_says(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model-1.safetensors")
    names = ["model.norm.weight", *OWN]
    weight_map = dict.fromkeys(names, "model-1.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"k_scale: expected in model-1\.safetensors, as "):
        read_kv_scales(tmp_path)
    scales = {name: torch.tensor(value) for name, value in OWN.items()}
    save_file(scales, tmp_path / "model-2.safetensors")  # not where it was said to be
    with pytest.raises(CheckpointError, match=r"k_scale: expected in model-1\.safetensors, as "):
        read_kv_scales(tmp_path)


def write_layers(folder: Path, name: str, k: list[float], v: float = 0.05) -> None:
    names = {f"model.layers.{i}.self_attn.{name.format('k')}": x for i, x in enumerate(k)}
    names |= {f"model.layers.{i}.self_attn.{name.format('v')}": v for i in range(len(k))}
    scales = {name: torch.tensor(value) for name, value in names.items()}
    save_file(scales, folder / "model.safetensors")


FP8, NVFP4 = 448, 2688


@pytest.mark.parametrize("amax", [0.05, 1.0, 8.0, 40.0, 150.0])
@pytest.mark.parametrize("unit", [FP8, NVFP4])
def test_encode_scales_under_a_decode_name_are_reported(
    tmp_path: Path, amax: float, unit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """For all usual sizes of K: 448 / 40 would be the scale of |K| up to 5018."""
    write_layers(tmp_path, "{}_scale", [unit / amax, 1.1 * unit / amax, 0.9 * unit / amax])
    read_kv_scales(tmp_path)
    assert len(caplog.messages) == 1
    message = r"layers\.[012]\.self_attn\.k_scale: its name means a decode scale, so that "
    assert re.search(message + r"\|K\| is at most \d.*; is it an encode scale", caplog.text)


@pytest.mark.parametrize("amax", [0.05, 1.0, 8.0, 40.0, 400.0])
def test_decode_scales_under_an_encode_name_are_reported(
    tmp_path: Path, amax: float, caplog: pytest.LogCaptureFixture
) -> None:
    write_layers(tmp_path, "{}_global_scale", [amax / NVFP4] * 2, NVFP4 / 8.0)
    read_kv_scales(tmp_path)
    message = "self_attn.k_global_scale: its name means an encode scale, so that |K| is at most"
    assert [message in text for text in caplog.messages] == [True]
    assert caplog.messages[0].endswith("is it a decode scale (the reciprocal), or in another unit?")


def test_one_unlikely_scale_is_reported_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for value, amax in ((448 / 40, "5017.6"), (1e-7, "4.48e-05")):
        caplog.clear()
        write_layers(tmp_path, "{0}_proj.{0}_scale", [0.05, 0.05, value, 0.05])
        read_kv_scales(tmp_path)
        expected = "model.layers.2.self_attn.k_proj.k_scale: its name means a decode scale"
        assert [expected in text for text in caplog.messages] == [True]
        assert f"so that |K| is at most {amax};" in caplog.text


@pytest.mark.parametrize("amax", [0.02, 1.0, 20.0, 448.0, 900.0])
@pytest.mark.parametrize("unit", [FP8, NVFP4])
def test_usual_scales_are_not_reported(
    tmp_path: Path, amax: float, unit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """ModelOpt raises scales of FP8 caches to 1.0, which is of 448."""
    write_layers(tmp_path, "{}_scale", [amax / unit, 2 * amax / unit, 0.5 * amax / unit])
    read_kv_scales(tmp_path)
    write_layers(tmp_path, "{}_global_scale", [NVFP4 / amax] * 3, NVFP4 / amax)
    read_kv_scales(tmp_path)
    assert not caplog.messages
