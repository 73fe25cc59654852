"""Calibration by layers: the same scales as with the whole model, in the memory of one layer."""

import gc
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from checkpoints.folders import Folder, load_model, make_folder, make_mixed_folder
from checkpoints.mxfp4_folders import make_gpt_oss
from halfbyte.checkpoints import CheckpointError, CheckpointIndex, Dialect
from halfbyte.models import calibrate
from halfbyte.models.amax import AmaxRecorder
from halfbyte.models.kv_calibration import calibration_tokens, measure_amax
from halfbyte.models.layerwise import StreamedModel, calibrate_checkpoint
from halfbyte.models.local_files import read_model_config
from models.zoo import ARCHITECTURES, make_model, token_ids
from slow import slow

IDS = token_ids(2, 40)


def streamed(folder: Path, dtype: str = "auto") -> StreamedModel:
    return StreamedModel(folder, read_model_config(folder), torch.device("cpu"), dtype)


def amax_of(model: StreamedModel, ids: torch.Tensor) -> list[tuple[float, float]]:
    recorder = AmaxRecorder()
    model.run(ids, recorder)
    return recorder.result()


def assert_same_amax(folder: Path, dtype: str = "auto") -> None:
    """The amax equals that of the whole model, bit for bit."""
    expected = measure_amax(load_model(folder, dtype=dtype), IDS)
    assert len(expected) == 4
    assert amax_of(streamed(folder, dtype), IDS) == expected


@pytest.fixture(params=[slow(torch.float32), torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    result: torch.dtype = request.param
    return result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_unquantized(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    make_model(architecture, dtype).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_amax(tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvfp4(tmp_path: Path, architecture: str, dialect: Dialect, dtype: torch.dtype) -> None:
    assert_same_amax(make_folder(tmp_path, architecture, dialect, dtype=dtype, shards=3).quantized)


def test_nvfp4_activations_and_fp8_layers(tmp_path: Path, dialect: Dialect) -> None:
    assert_same_amax(make_folder(tmp_path / "a", dialect=dialect, scheme="nvfp4").quantized)
    assert_same_amax(make_mixed_folder(tmp_path / "b", dialect).quantized)


def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_gpt_oss(tmp_path, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    assert_same_amax(folder)
    calibrate_checkpoint(folder, device="cpu", max_tokens=256)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text"])
def test_tied_embeddings(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    make_model(architecture, dtype, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in CheckpointIndex.read(tmp_path)
    assert_same_amax(tmp_path)


def test_another_dtype_than_the_files(tmp_path: Path) -> None:
    make_model("qwen3", torch.bfloat16).save_pretrained(tmp_path)
    assert_same_amax(tmp_path, "float32")


def test_a_declared_cache_alone(tmp_path: Path) -> None:
    """The section declares only the cache; weights are not quantized."""
    make_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    section = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "quant_algo": None}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    assert_same_amax(tmp_path)


def test_progress_and_order(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    seen: list[tuple[int, int]] = []
    streamed(tmp_path).run(IDS, AmaxRecorder(), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_output_embeddings_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama").save_pretrained(tmp_path)
    asked: list[str] = []
    stream = CheckpointIndex.stream

    def noted(self: CheckpointIndex, names: Any, device: Any) -> Any:
        asked.extend(names)
        return stream(self, names, device)

    monkeypatch.setattr(CheckpointIndex, "stream", noted)
    streamed(tmp_path).run(IDS, AmaxRecorder())
    tensors = set(load_file(tmp_path / "model.safetensors"))
    assert sorted(asked) == sorted(tensors - {"lm_head.weight"})


def live_bytes() -> int:
    """Bytes of all live tensors on the host, by the garbage collector."""
    storages = {}
    for found in gc.get_objects():
        # Not FakeTensors, which other tests may have left and which hold nothing.
        if type(found) in (torch.Tensor, nn.Parameter) and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Bytes of live tensors after the call of each layer's MLP, over those there before."""
    gc.collect()
    gc.disable()  # what is only freed by a collection counts
    before, seen = live_bytes(), []

    def note(module: nn.Module, *call: Any) -> None:
        if type(module).__name__ in ("Qwen3MLP", "Qwen3MoeSparseMoeBlock"):
            seen.append(live_bytes() - before)

    handle = register_module_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
        gc.enable()


@pytest.mark.parametrize(
    ("architecture", "quantized"),
    [slow("qwen3", False), slow("qwen3", True), slow("qwen3_moe", False), ("qwen3_moe", True)],
)
def test_memory_does_not_grow_with_the_layers(
    tmp_path: Path, architecture: str, quantized: bool
) -> None:
    peaks = {}
    for layers in (2, 8):
        folder = make_folder(tmp_path / str(layers), architecture, num_hidden_layers=layers)
        path = folder.quantized if quantized else folder.plain
        with watched_memory() as seen:
            amax_of(streamed(path), token_ids(1, 8))
        assert len(seen) == layers
        peaks[layers] = max(seen)
    total = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
    assert peaks[8] < 1.02 * peaks[2]
    assert peaks[8] < total / 4


class TestCalibrateCheckpoint:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        make_model("llama").save_pretrained(tmp_path)
        return tmp_path

    def test_is_calibrate_of_the_whole_model(self, folder: Path) -> None:
        model = load_model(folder)
        ids, source = calibration_tokens(None, model.config, "")
        assert calibrate_checkpoint(folder, device="cpu") == calibrate(model, ids, source)

    def test_what_cannot_be_streamed_is_loaded_whole(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        expected = calibrate_checkpoint(folder, device="cpu")
        # A base model's file, whose names lack the prefix: transformers adds it.
        file = folder / "model.safetensors"
        tensors = {k.removeprefix("model."): v for k, v in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(
            CheckpointError, match=r"embed_tokens\.weight: expected .* no such tensor"
        ):
            streamed(folder)
        assert calibrate_checkpoint(folder, device="cpu") == expected
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.message.startswith("calibrated with the whole model in memory: ")
        assert "\n" not in record.message

    def test_other_quantization_is_refused_with_a_way_out(self, folder: Path) -> None:
        file = folder / "config.json"
        section = {"quant_method": "gptq", "bits": 4}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": section}))
        with pytest.raises(
            CheckpointError, match=r"found quant_method 'gptq'; use the unquantized checkpoint$"
        ):
            streamed(folder)

    @pytest.mark.parametrize("tensor", ["model.layers.2.mlp.up_proj.weight", "lm_head.weight"])
    def test_missing_weights_are_an_error(
        self, folder: Path, tensor: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[tensor]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"{tensor}: expected .*, found no such tensor"):
            calibrate_checkpoint(folder, device="cpu")
        assert not [record for record in caplog.records if record.name == "halfbyte"]

    def test_scales_that_cannot_be(self, tmp_path: Path, dialect: Dialect) -> None:
        folder: Folder = make_folder(tmp_path, dialect=dialect)
        name = "model.layers.3.self_attn.o_proj.weight_scale"
        folder.change(lambda tensors: tensors[name].view(torch.uint8).fill_(0x7F))
        with pytest.raises(CheckpointError, match=name):
            calibrate_checkpoint(folder.quantized, device="cpu")
