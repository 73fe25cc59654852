"""GPT-OSS's own files: every tensor stays, the cache gets scales and a format."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints.folders import load_model
from checkpoints.mxfp4_folders import make_gpt_oss
from halfbyte import LLM, SamplingParams
from halfbyte.assets import bundled_model_path
from halfbyte.checkpoints import CheckpointIndex, read_kv_scales
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.layouts import KVCacheDType
from halfbyte.models.kv_calibration import measure_amax
from halfbyte.models.tokenizer import load_tokenizer
from halfbyte.moe import MxFp4Experts
from halfbyte.quantization import quantize_checkpoint
from models.zoo import make_model, token_ids

TEXT = "import os\nprint(os.path)\n" * 60
DOWN_SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = make_gpt_oss(tmp_path / "source", vocab_size=4096)
    for file in bundled_model_path().glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    (tmp_path / "text.txt").write_text(TEXT)
    return folder


def quantize(source: Path, kv_cache_dtype: str = "nvfp4", **options: Any) -> Path:
    folder = source.parent / f"kept-{kv_cache_dtype}"
    text = source.parents[1] / "text.txt"
    quantize_checkpoint(
        source, folder, kv_cache_dtype=kv_cache_dtype, calibration_file=text, **options
    )
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    index = CheckpointIndex.read(folder)
    return dict(index.stream(index.tensors))


def test_every_tensor_stays_bit_for_bit(source: Path) -> None:
    kept = quantize(source, max_shard_bytes=100_000)
    assert len(list(kept.glob("*.safetensors"))) > 1
    before, after = tensors_of(source), tensors_of(kept)
    experts = [name for name in before if name.endswith(("_blocks", "_scales"))]
    assert len(experts) == 2 * 4  # layers, tensors
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    added = {f"model.layers.{layer}.self_attn.{side}_scale" for layer in range(2) for side in "kv"}
    assert set(after) - set(before) == added
    assert (kept / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("dtype", "algo"), [("nvfp4", "NVFP4"), ("fp8", "FP8")])
def test_the_scales_are_those_of_the_whole_model(source: Path, dtype: str, algo: str) -> None:
    kept = quantize(source, dtype)
    ids = load_tokenizer(source)(TEXT, return_tensors="pt").input_ids
    window = 256  # of the model
    rows = -(-ids.shape[1] // window)
    assert rows > 1
    ids = ids[:, : ids.shape[1] // rows * rows].reshape(rows, -1)
    expected = measure_amax(load_model(source), ids)
    scales = read_kv_scales(kept)
    for layer, amax in enumerate(expected):
        assert scales[layer] == pytest.approx([x / 448 for x in amax], rel=1e-6)
    fields = json.loads((kept / "config.json").read_text())
    section = json.loads((source / "config.json").read_text())["quantization_config"]
    assert fields["quantization_config"] == {**section, "kv_cache_quant_algo": algo}
    declared = {"nvfp4": "nvfp4", "fp8": "fp8_e4m3"}[dtype]
    assert KVCacheDType.from_checkpoint(fields) == KVCacheDType(declared)


def test_tokens_are_those_of_the_source(source: Path) -> None:
    kept = quantize(source)
    prompts = [token_ids(length, seed=length).tolist() for length in (1, 7, 40)]
    params = SamplingParams(max_tokens=12, temperature=0)
    found = []
    for folder in (source, kept):
        model = load_model(folder, dtype="float32")
        assert isinstance(model.model.layers[0].mlp.experts, MxFp4Experts)
        llm = LLM(model, kv_cache_dtype="float32")
        found.append([output.token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1]
    assert all(len(tokens) == 12 for tokens in found[0])


def test_the_declared_cache_is_used(source: Path) -> None:
    model = load_model(quantize(source, "fp8"), dtype="float32")
    llm = LLM(model, kv_cache_dtype="auto", kv_recipe="plain")
    layouts = [llm.pool.layout(layer) for layer in range(2)]
    assert [layout.k_dtype for layout in layouts] == [KVCacheDType("fp8_e4m3")] * 2
    assert [layout.v_dtype for layout in layouts] == [KVCacheDType("fp8_e4m3")] * 2


def test_transformers_reads_the_same_model(source: Path) -> None:
    """It dequantizes the experts, as those of the source."""
    pytest.importorskip("accelerate")  # which transformers requires for MXFP4
    kept = quantize(source)
    prompt = token_ids(1, 11)
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32")(prompt).logits
        for folder in (source, kept)
    ]
    assert torch.equal(*logits)


def test_old_scales_of_the_cache_are_replaced(source: Path) -> None:
    file = source / "model.safetensors"
    old = {
        f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale": torch.tensor(0.5)
        for layer in range(2)
        for side in "kv"
    }
    save_file({**load_file(file), **old}, file, metadata={"format": "pt"})
    kept = quantize(source)
    assert not set(tensors_of(kept)) & set(old)
    assert all(0.5 not in pair for pair in read_kv_scales(kept).values())


def test_report(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = quantize_checkpoint(
        source,
        tmp_path / "kept",
        kv_cache_dtype="fp8",
        calibration_file=tmp_path / "text.txt",
        on_progress=lambda *step: seen.append(step),
    )
    assert json.loads((tmp_path / "kept" / "quantization_report.json").read_text()) == json.loads(
        json.dumps(asdict(report))
    )
    assert (report.format, report.weights, report.layers) == ("mxfp4", "mxfp4", ())
    assert report.kv_cache_dtype == "fp8_e4m3"
    assert str(report.calibration).endswith(" tokens of text.txt")
    assert "model.layers.1.self_attn.o_proj" in report.ignored
    total = len(load_file(source / "model.safetensors"))
    assert [step for step in seen if step[0] == "measuring"] == [
        ("measuring", 1, 2),
        ("measuring", 2, 2),
    ]
    assert seen[-1] == ("copying", total, total)
    assert report.bytes > report.source_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": None}, r"^kv_cache_dtype: expected nvfp4 or fp8, because without a fo"),
        ({"kv_cache_dtype": "int8"}, r"^kv_cache_dtype: expected one of nvfp4, fp8"),
        ({"weights": "nvfp4"}, r"^weights: got 'nvfp4', but without a format"),
        ({"recipe": "four_over_six"}, r"^recipe: got 'four_over_six', but without a format"),
        ({"method": "gptq"}, r"^method: got 'gptq', but without a format"),
        ({"ignore": ["lm_head"]}, r"^ignore: got \['lm_head'\], but without a format"),
        (
            {"dialect": "modelopt"},
            r"found one quantized by mxfp4; leave the format out to keep its experts in MXFP4$",
        ),
    ],
)
def test_arguments_that_have_no_effect(source: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(source, source.parent / "kept", **{"kv_cache_dtype": "fp8", **options})
    assert list(source.parent.iterdir()) == [source]


def test_another_source_needs_a_format(tmp_path: Path) -> None:
    make_model("llama", torch.bfloat16).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"^format: expected modelopt or compressed-tensors; only"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "target", kv_cache_dtype="fp8")
    assert list(tmp_path.iterdir()) == [tmp_path / "source"]


@pytest.mark.parametrize("what", ["absent", "NaN"])
def test_broken_experts_are_not_copied(source: Path, what: str) -> None:
    file = source / "model.safetensors"
    tensors = load_file(file)
    if what == "absent":
        del tensors[DOWN_SCALES]
    else:
        tensors[DOWN_SCALES][2, 5] = 0xFF
    save_file(tensors, file, metadata={"format": "pt"})
    found = {
        "absent": r"expected U8 .*found no such",
        "NaN": r"expert 2: expected finite block scales, found 3 NaN",
    }
    with pytest.raises(CheckpointError, match=f"{DOWN_SCALES}: {found[what]}"):
        quantize(source)
    assert list(source.parent.iterdir()) == [source]
