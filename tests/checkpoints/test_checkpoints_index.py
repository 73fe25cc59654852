import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.checkpoints import CheckpointError, CheckpointIndex

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.uint8).view(3, 4),
    "a.weight_scale": torch.ones(3, 1).to(torch.float8_e4m3fn),
    "b.weight": torch.randn(5, 2).bfloat16(),
    "b.bias": torch.tensor(0.5),
}
SHARDS = {"a.weight": 1, "a.weight_scale": 2, "b.weight": 2, "b.bias": 1}


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00002.safetensors"


def write_index(folder: Path, weight_map: object) -> None:
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for number in (1, 2):
        part = {name: tensor for name, tensor in TENSORS.items() if SHARDS[name] == number}
        save_file(part, tmp_path / shard(number))
    write_index(tmp_path, {name: shard(number) for name, number in SHARDS.items()})
    return tmp_path


@pytest.mark.parametrize("kind", [str, Path])
def test_reads_headers(single: Path, kind: type) -> None:
    index = CheckpointIndex.read(kind(single))
    assert index.folder == single
    assert {name: str(entry) for name, entry in index.tensors.items()} == {
        "a.weight": "U8 [3, 4]",
        "a.weight_scale": "F8_E4M3 [3, 1]",
        "b.weight": "BF16 [5, 2]",
        "b.bias": "F32 []",
    }
    assert index.names_of("a") == {"weight", "weight_scale"}
    assert index.names_of("c") == set()
    assert "a.weight" in index


def test_streams_copies_shard_by_shard(sharded: Path) -> None:
    index = CheckpointIndex.read(sharded)
    mapped, tensors = [], {}
    for name, tensor in index.stream(["b.weight", "a.weight", "a.weight_scale", "b.bias"]):
        tensors[name] = tensor
        mapped.append({n for n in (1, 2) if shard(n) in Path("/proc/self/maps").read_text()})
    assert list(tensors) == ["a.weight", "b.bias", "b.weight", "a.weight_scale"]
    if sys.platform == "linux":
        assert mapped == [{1}, {1}, {2}, {2}]
        assert "model-0000" not in Path("/proc/self/maps").read_text()
    for name, tensor in tensors.items():
        assert tensor.dtype == TENSORS[name].dtype
        expected = TENSORS[name].flatten().view(torch.uint8)
        assert torch.equal(tensor.flatten().view(torch.uint8), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_of_host_memory_is_one_shard(tmp_path: Path) -> None:
    mib, count = 24, 8
    weight_map: dict[str, str] = {}
    for i in range(count):
        name = f"model-{i}.safetensors"
        part = {f"{i}.{j}": torch.zeros(mib << 18, dtype=torch.uint8) for j in range(4)}
        save_file(part, tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(tmp_path, weight_map)
    code = f"""
import re
from pathlib import Path
from halfbyte.checkpoints import CheckpointIndex

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

list(CheckpointIndex.read({str(tmp_path)!r}).stream(["0.0"]))  # whatever is allocated once
index = CheckpointIndex.read({str(tmp_path)!r})
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
for name, tensor in index.stream(list(index.tensors)):
    pass
print(status("VmHWM") - before)
"""
    # glibc keeps freed memory below a threshold that it moves; fixed, what is freed is gone.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    # One shard, two copies of a quarter of it, and room for noise; the files are 192 MiB.
    assert int(result.stdout) < mib + 2 * mib // 4 + 8


def test_tensors_outside_of_the_index_are_seen(sharded: Path) -> None:
    write_index(sharded, {name: shard(n) for name, n in SHARDS.items() if name != "b.bias"})
    assert "b.bias" in CheckpointIndex.read(sharded)


@pytest.mark.parametrize("chosen", [1, 2])
def test_of_two_copies_of_a_tensor_the_index_chooses(sharded: Path, chosen: int) -> None:
    copies = {1: TENSORS["b.bias"], 2: torch.tensor([1.5, 2.5])}
    second = {n: tensor for n, tensor in TENSORS.items() if SHARDS[n] == 2}
    save_file({**second, "b.bias": copies[2]}, sharded / shard(2))
    weight_map = {name: shard(number) for name, number in {**SHARDS, "b.bias": chosen}.items()}
    write_index(sharded, weight_map)
    index = CheckpointIndex.read(sharded)
    assert index.tensors["b.bias"].file == sharded / shard(chosen)
    assert torch.equal(dict(index.stream(["b.bias"]))["b.bias"], copies[chosen])
    files = [sharded / shard(1), sharded / shard(2)]
    if chosen == 2:  # which transformers reads last
        assert CheckpointIndex.read_chosen(files).tensors == index.tensors
        return
    with pytest.raises(CheckpointError, match=rf"b.bias: .*{shard(1)}.*found one in {shard(2)}"):
        CheckpointIndex.read_chosen(files)


def test_chosen_files_other_than_those_of_the_index(sharded: Path) -> None:
    save_file({"b.bias": torch.ones(3)}, sharded / "model.safetensors")
    index = CheckpointIndex.read_chosen([sharded / "model.safetensors"])
    assert {name: entry.shape for name, entry in index.tensors.items()} == {"b.bias": (3,)}
    (sharded / "elsewhere").mkdir()
    save_file(TENSORS, sharded / "elsewhere" / shard(2))
    with pytest.raises(CheckpointError, match=r"files of one folder, found .*elsewhere"):
        CheckpointIndex.read_chosen([sharded / shard(1), sharded / "elsewhere" / shard(2)])


def test_a_file_that_has_changed_since(single: Path) -> None:
    index = CheckpointIndex.read(single)
    save_file({"c": torch.ones(3)}, single / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected a whole safetensors file, found"):
        list(index.stream(["b.bias"]))


def test_index_names_an_absent_shard(sharded: Path) -> None:
    (sharded / shard(2)).unlink()
    expected = rf"expected the shard {shard(2)} with 2 tensors \(a.weight_scale.*found no such file"
    with pytest.raises(CheckpointError, match=expected):
        CheckpointIndex.read(sharded)


def test_index_names_a_tensor_that_is_elsewhere(sharded: Path) -> None:
    write_index(sharded, {name: shard(1) for name in ("a.weight", "b.weight")})
    expected = rf"b.weight: expected in {shard(1)}.* found no such tensor"
    with pytest.raises(CheckpointError, match=expected):
        CheckpointIndex.read(sharded)


def test_a_single_file_beside_an_index_of_others(sharded: Path) -> None:
    save_file(TENSORS, sharded / "model.safetensors")
    expected = "expected model.safetensors or a model.safetensors.index.json .*, found both"
    with pytest.raises(CheckpointError, match=expected):
        CheckpointIndex.read(sharded)


def test_an_index_of_the_single_file(single: Path) -> None:
    """Some tools write an index even for a single file."""
    write_index(single, dict.fromkeys(TENSORS, "model.safetensors"))
    assert set(CheckpointIndex.read(single).tensors) == set(TENSORS)


def test_reads_these_files_and_no_others(sharded: Path) -> None:
    save_file({"b.weight": torch.ones(3)}, sharded / "model.other.safetensors")
    index = CheckpointIndex.read_files([sharded / shard(2)])
    assert set(index.tensors) == {name for name, number in SHARDS.items() if number == 2}
    index = CheckpointIndex.read_files([sharded / shard(2), sharded / "model.other.safetensors"])
    assert {name: str(entry) for name, entry in index.tensors.items()} == {
        "a.weight_scale": "F8_E4M3 [3, 1]",
        "b.weight": "F32 [3]",
    }
    assert torch.equal(dict(index.stream(["b.weight"]))["b.weight"], torch.ones(3))


def test_files_that_cannot_be_read(single: Path) -> None:
    for name, found in [
        ("absent.safetensors", "expected the shard absent.safetensors, found no such file"),
        ("pytorch_model.bin", r"found pickled weights \(pytorch_model.bin\)"),
    ]:
        with pytest.raises(CheckpointError, match=found) as error:
            CheckpointIndex.read_files([single / "model.safetensors", single / name])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        *("../model.safetensors", "/etc/passwd", "model.bin", "..", 3),
        *("a\n.safetensors", "a\0.safetensors", "a" * 244 + ".safetensors"),
    ],
)
def test_index_names_files_elsewhere(sharded: Path, name: object) -> None:
    write_index(sharded, {"a.weight": name})
    with pytest.raises(CheckpointError, match="in the same folder, found"):
        CheckpointIndex.read(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": 3}'])
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"expected a JSON object.* found"):
        CheckpointIndex.read(sharded)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:20], lambda b: b"", lambda b: b"\xff" * 100]
)
def test_broken_files(single: Path, damage: Callable[[bytes], bytes]) -> None:
    file = single / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match="expected a whole safetensors file") as error:
        CheckpointIndex.read(single)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=rf"found pickled weights \({name}\)"):
        CheckpointIndex.read(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected model.safetensors or .*found neither"):
        CheckpointIndex.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtypes", "shape", "message"),
    [
        ("c.weight", ("U8",), (3, 4), r"c.weight: expected U8 \[3, 4\], found no such tensor"),
        ("a.weight", ("BF16", "F32"), (3, 4), r"expected BF16/F32 \[3, 4\], found U8 \[3, 4\]"),
        ("a.weight", ("U8",), (3, 8), r"expected U8 \[3, 8\], found U8 \[3, 4\]"),
    ],
)
def test_require(
    single: Path, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], message: str
) -> None:
    index = CheckpointIndex.read(single)
    assert index.require("b.bias", ("F32",), (1,), ()).shape == ()
    with pytest.raises(CheckpointError, match=message):
        index.require(name, dtypes, shape)
