"""Which files `from_pretrained` reads, and broken ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints.folders import Folder, load_model
from halfbyte.checkpoints import CheckpointError, Dialect
from models.nvfp4.test_nvfp4_from_pretrained import logits, tagged


def negate_some(tensors: dict[str, torch.Tensor]) -> None:
    """Change quantized and unquantized tensors, so that a mix of both files would show."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.uint8:
            tensors[name] = tensor ^ 0x88  # the signs of both codes
        elif name.endswith("norm.weight"):
            tensors[name] = tensor * 1.5


def two_sets_of_files(folder: Path, dialect: Dialect) -> tuple[Folder, torch.Tensor, torch.Tensor]:
    """A folder with an index and shards beside another `model.safetensors`; the logits of both."""
    single = tagged(folder / "single", "qwen3", dialect)
    sharded = tagged(folder / "sharded", "qwen3", dialect, shards=2)
    single.change(negate_some)
    of_single, of_shards = (logits(load_model(each.quantized)) for each in (single, sharded))
    assert not torch.equal(of_single, of_shards)
    shutil.copytree(sharded.quantized, single.quantized, dirs_exist_ok=True)
    return single, of_single, of_shards


def test_all_tensors_come_from_the_files_that_transformers_chose(
    tmp_path: Path, dialect: Dialect
) -> None:
    folder, of_single, of_shards = two_sets_of_files(tmp_path, dialect)
    file = folder.quantized / "model.safetensors"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder.quantized)), of_single)
    both = r"expected model.safetensors or a model.safetensors.index.json .*found both"
    with pytest.raises(CheckpointError, match=both):
        load_model(folder.quantized)
    file.rename(file.with_name("model.other.safetensors"))
    for variant, expected in (("other", of_single), (None, of_shards)):
        model = AutoModelForCausalLM.from_pretrained(folder.quantized, variant=variant)
        assert torch.equal(logits(model), expected)


def index_of(folder: Path) -> tuple[Path, dict[str, str]]:
    file = folder / "model.safetensors.index.json"
    return file, json.loads(file.read_text())["weight_map"]


def outside(folder: Path, weight_map: dict[str, str]) -> None:
    shard = sorted(set(weight_map.values()))[1]
    shutil.move(folder / shard, folder.parent / shard)
    for name, file in weight_map.items():
        weight_map[name] = f"../{file}" if file == shard else file


def wrong_shard(folder: Path, weight_map: dict[str, str]) -> None:
    first, second, *_ = sorted(set(weight_map.values()))
    name = next(name for name, file in weight_map.items() if file == first)
    weight_map[name] = second


def second_copy(folder: Path, weight_map: dict[str, str]) -> None:
    """A second copy of a block scale, in the shard that transformers reads last."""
    first, *_, last = sorted(set(weight_map.values()))
    name = next(
        name for name, file in weight_map.items() if file == first and name.endswith("weight_scale")
    )
    scales = load_file(folder / first)[name].view(torch.uint8)
    tensors = {**load_file(folder / last), name: torch.zeros_like(scales).view(torch.float8_e4m3fn)}
    save_file(tensors, folder / last, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (outside, r"expected (names of safetensors files in the same folder|the files of one)"),
        (wrong_shard, "expected in .* found no such tensor there"),
        (second_copy, r"weight_scale: expected only in model-00001.*found one in model-00003"),
    ],
)
def test_an_index_counts_as_for_load_model(
    tmp_path: Path,
    dialect: Dialect,
    spoil: Callable[[Path, dict[str, str]], None],
    message: str,
) -> None:
    folder = tagged(tmp_path, "qwen3", dialect, shards=3).quantized
    expected = logits(load_model(folder))
    file, weight_map = index_of(folder)
    spoil(folder, weight_map)
    file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)
    if spoil is second_copy:
        assert torch.equal(logits(load_model(folder)), expected)
    else:
        with pytest.raises(CheckpointError, match=message):
            load_model(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "expected the shard {}, found no such file"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-100]),
            "{}: expected a whole safetensors file, found SafetensorError",
        ),
    ],
    ids=["absent", "truncated"],
)
def test_broken_shards(
    tmp_path: Path, dialect: Dialect, damage: Callable[[Path], object], message: str
) -> None:
    folder = tagged(tmp_path, "qwen3", dialect, shards=3)
    shard = "model-00002-of-00003.safetensors"
    damage(folder.quantized / shard)
    with pytest.raises(CheckpointError, match=message.format(shard)):
        AutoModelForCausalLM.from_pretrained(folder.quantized)


def test_pickled_weights_are_refused(tmp_path: Path, dialect: Dialect) -> None:
    folder = tagged(tmp_path, "qwen3", dialect)
    (folder.quantized / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"found pickled weights \(pytorch_model.bin\)"):
        AutoModelForCausalLM.from_pretrained(folder.quantized, use_safetensors=False)
