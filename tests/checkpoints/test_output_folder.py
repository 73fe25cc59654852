"""Folders are written atomically; shards and their index."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.assets import bundled_model_path
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import INDEX_FILE, CheckpointIndex
from halfbyte.checkpoints.output_folder import ShardWriter, copy_file, new_folder, write_json
from halfbyte.quantization import quantize_checkpoint


def quantize_in_a_process(destination: Path, before: str) -> str:
    """Quantize the bundled model in a child process that first runs `before`; returns stderr."""
    code = (
        "import os, resource, signal, sys\n"
        "from halfbyte.quantization import quantize_checkpoint\n"
        f"progress = lambda what, done, total: None\n{before}\n"
        f"quantize_checkpoint({str(bundled_model_path())!r}, {str(destination)!r},"
        "dialect='modelopt', weights='nvfp4-a16', max_shard_bytes=2**20, on_progress=progress)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


def test_new_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    destination = tmp_path / "a" / "b"
    with new_folder(destination) as folder:
        (folder / "file").write_text("x")
        assert not destination.exists()
    assert [path.name for path in destination.parent.iterdir()] == ["b"]
    assert (destination / "file").read_text() == "x"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_new_folder_leaves_nothing_behind_an_error(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def write_half() -> None:
        with new_folder(tmp_path / "x") as folder:
            (folder / "file").write_text("x")
            raise error

    with pytest.raises(error):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_new_folder_refuses_what_exists(tmp_path: Path) -> None:
    destination = tmp_path / "x"
    destination.mkdir()
    with pytest.raises(CheckpointError, match="exists already"), new_folder(destination):
        pytest.fail("must not get here")
    assert list(tmp_path.iterdir()) == [destination]


@pytest.mark.parametrize(
    "names",
    [[], ["config.json", "model-1.safetensors", "notes"], ["quantization_report.json"]],
    ids=["empty", "checkpoint", "report"],
)
def test_new_folder_replaces_a_checkpoint(tmp_path: Path, names: list[str]) -> None:
    destination = tmp_path / "x"
    destination.mkdir()
    for name in names:
        (destination / name).write_text("")
    with new_folder(destination, replace=True) as folder:
        (folder / "new").write_text("")
    assert [path.name for path in destination.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination, rename = tmp_path / "x", Path.rename
    destination.mkdir()
    (destination / "quantization_report.json").write_text("old")

    def full(path: Path, target: Path) -> Path:
        if target == destination and not str(path).endswith(".old"):
            raise OSError("no room")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with (
        pytest.raises(CheckpointError, match="no room"),
        new_folder(destination, replace=True) as folder,
    ):
        (folder / "new").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (destination / "quantization_report.json").read_text() == "old"


def photos(destination: Path) -> None:
    destination.mkdir()
    (destination / "photo.jpg").write_text("")


def weights_alone(destination: Path) -> None:
    destination.mkdir()
    (destination / "model.safetensors").write_text("")


def config_alone(destination: Path) -> None:
    destination.mkdir()
    (destination / "config.json").write_text("")


def link_to_a_checkpoint(destination: Path) -> None:
    config_alone(destination.with_name("elsewhere"))
    weights = destination.with_name("elsewhere") / "model.safetensors"
    weights.write_text("")
    destination.symlink_to(weights.parent)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (photos, "other files"),
        (weights_alone, "other files"),
        (config_alone, "other files"),
        (lambda destination: destination.write_text(""), "a file"),
        (link_to_a_checkpoint, "a link"),
        (lambda destination: destination.symlink_to("nowhere"), "a link"),
    ],
    ids=["photos", "weights", "config", "file", "link", "dangling"],
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_new_folder_replaces_nothing_else(
    tmp_path: Path, make: Callable[[Path], object], found: str, when: str
) -> None:
    """Neither existing files, nor files that appear while the new folder is written."""
    destination = tmp_path / "x"
    if when == "before":
        make(destination)

    def write() -> None:
        with new_folder(destination, replace=True):
            assert when == "meanwhile"
            make(destination)

    with pytest.raises(CheckpointError, match=f"expected a checkpoint to replace, found {found}"):
        write()
    left = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    made = tmp_path / "made"
    made.mkdir()
    make(made / "x")
    assert left == sorted(path.relative_to(made) for path in made.rglob("*"))


def test_new_folder_refuses_what_appears_meanwhile(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "x"):
            (tmp_path / "x").mkdir()

    with pytest.raises(CheckpointError, match="exists already"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_new_folder_keeps_what_exists_when_it_fails(tmp_path: Path) -> None:
    destination = tmp_path / "x"
    destination.mkdir()
    (destination / "quantization_report.json").write_text("")
    with pytest.raises(ValueError, match="halfway"), new_folder(destination, replace=True):
        raise ValueError("halfway")
    assert (destination / "quantization_report.json").exists()


def test_new_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match="cannot be written"),
        new_folder(tmp_path / "file" / "x"),
    ):
        pytest.fail("must not get here")


def tensors(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"t{i}": torch.randn(8, 8, generator=generator) for i in range(count)}


def test_shard_writer_writes_one_file(tmp_path: Path) -> None:
    expected = tensors(3)
    writer = ShardWriter(tmp_path)
    for name, tensor in expected.items():
        writer.add(name, tensor)
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_shard_writer_writes_shards_and_their_index(tmp_path: Path) -> None:
    expected = {"empty": torch.zeros(0, 4), **tensors(5), "large": torch.zeros(64, 64)}
    writer = ShardWriter(tmp_path, max_bytes=600)
    for name, tensor in expected.items():
        writer.add(name, tensor)
    writer.finish()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)
    ]
    fields = json.loads((tmp_path / INDEX_FILE).read_text())
    assert fields["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    assert set(fields["weight_map"]) == set(expected)
    found = dict(CheckpointIndex.read(tmp_path).stream(list(expected)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kib", "shards"),
    [([1, 1, 1, 1], [2, 2]), ([4, 1, 1], [1, 2]), ([1, 4, 1], [1, 1, 1]), ([2], [1])],
)
def test_shards_are_filled_to_the_byte(tmp_path: Path, kib: list[int], shards: list[int]) -> None:
    writer = ShardWriter(tmp_path, max_bytes=2048)
    for i, size in enumerate(kib):
        writer.add(f"t{i}", torch.zeros(size << 10, dtype=torch.uint8))
    writer.finish()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [len(load_file(file)) for file in files] == shards


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_is_flushed_before_the_folder_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, int]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        size = path.stat().st_size if path.is_file() else len(list(path.iterdir()))
        flushed.append((path.name.split(".incomplete")[0], size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with new_folder(tmp_path / "x") as folder:
        write_json(folder / "config.json", {})
        copy_file(folder / "config.json", folder / "copy.json")
        writer = ShardWriter(folder)
        writer.add("t", torch.zeros(2))
        writer.finish()
    size = (tmp_path / "x" / "model.safetensors").stat().st_size
    assert flushed == [
        *[("config.json", 3), ("copy.json", 3), ("shard-00000", size)],
        *[(".x", 3), (tmp_path.name, 1)],  # the new folder's entries, then its name
    ]


def test_shard_writer_holds_one_shard(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, max_bytes=600)
    for name, tensor in tensors(9).items():
        writer.add(name, tensor)
        assert sum(t.nbytes for t in writer._pending.values()) <= 600
    assert len(list(tmp_path.iterdir())) == 4


def test_written_files_are_readable_as_others_are(tmp_path: Path) -> None:
    with new_folder(tmp_path / "x") as folder:
        writer = ShardWriter(folder)
        writer.add("t", torch.zeros(2))
        writer.finish()
        write_json(folder / "config.json", {})
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "x").iterdir()}
    assert len(modes) == 1


def test_a_killed_process_leaves_no_destination(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    destination = tmp_path / "x"
    stderr = quantize_in_a_process(
        destination,
        "progress = lambda what, done, total: done * 2 > total and os.kill(os.getpid(), "
        f"{int(signal.SIGKILL)})",
    )
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".x.incomplete-"), stderr
    assert list(left.iterdir())  # it was killed in the middle of writing
    others = [f".x.incomplete-0123456{end}" for end in ("", "7.old", "x")]
    others.append(".y.incomplete-01234567")
    for name in others:
        (tmp_path / name).mkdir()
    quantize_checkpoint(bundled_model_path(), destination, dialect="modelopt", weights="nvfp4-a16")
    assert (destination / "config.json").is_file()
    assert sorted(os.listdir(tmp_path)) == sorted(["x", *others])
    assert f"{left}: removed, an earlier run was killed while it wrote it" in caplog.text


def test_folders_that_a_process_still_writes_stay(tmp_path: Path) -> None:
    with new_folder(tmp_path / "x") as first:
        (first / "file").write_text("1")
        with new_folder(tmp_path / "x") as second:
            (second / "file").write_text("2")
        assert (first / "file").read_text() == "1"
        (tmp_path / "x").rename(tmp_path / "z")
    assert (tmp_path / "x" / "file").read_text() == "1"
    assert sorted(os.listdir(tmp_path)) == ["x", "z"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A file size limit (RLIMIT_FSIZE) makes the write fail, as a full disk would."""
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({2**19}, {resource.RLIM_INFINITY}))"
    stderr = quantize_in_a_process(tmp_path / "x", limit)
    last = stderr.strip().splitlines()[-1]
    assert "CheckpointError" in last
    assert f"{tmp_path / 'x'}: cannot be written: " in last
    assert "File too large" in last
    assert os.listdir(tmp_path) == []
