"""`fingerprint` of the model in a folder."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.checkpoints import CheckpointError, fingerprint
from halfbyte.checkpoints.fingerprint import BLOCK_BYTES, BLOCKS

SIZE = 1 << 20  # bytes of data, of which blocks are a quarter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 255, (SIZE,), dtype=torch.uint8, generator=generator)
    save_file({"a": data}, folder / "model.safetensors")
    return folder


def change_byte(folder: Path, offset: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["a"][offset] += 1
    save_file(tensors, folder / "model.safetensors")


def rename_tensor(folder: Path) -> None:
    save_file({"b": load_file(folder / "model.safetensors")["a"]}, folder / "model.safetensors")


def test_it_is_the_same_wherever_the_folder_lies(folder: Path, tmp_path: Path) -> None:
    name = fingerprint(folder)
    assert len(name) == 64
    assert set(name) <= set("0123456789abcdef")
    shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(str(tmp_path / "copy")) == name
    (tmp_path / "links").mkdir()  # as in the cache of the hub
    for file in folder.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    assert fingerprint(tmp_path / "links") == name


def test_files_that_do_not_count(folder: Path) -> None:
    name = fingerprint(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "kv_scales.json").write_text("{}")
    assert fingerprint(folder) == name


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda f: (f / "config.json").write_text("{}"), id="config"),
        pytest.param(lambda f: (f / "hf_quant_config.json").write_text("{}"), id="modelopt"),
        pytest.param(
            lambda f: (f / "model.safetensors").rename(f / "x.safetensors"), id="name of a file"
        ),
        pytest.param(
            lambda f: shutil.copy(f / "model.safetensors", f / "x.safetensors"), id="another file"
        ),
        pytest.param(rename_tensor, id="name of a tensor"),
        pytest.param(lambda f: change_byte(f, 0), id="first byte"),
        pytest.param(lambda f: change_byte(f, SIZE - 1), id="last byte"),
        pytest.param(
            lambda f: change_byte(f, 20 * (SIZE - BLOCK_BYTES) // (BLOCKS - 1)), id="in a block"
        ),
        pytest.param(
            lambda f: save_file(
                {"a": torch.zeros(SIZE, dtype=torch.uint8)}, f / "model.safetensors"
            ),
            id="other weights",
        ),
    ],
)
def test_changes_that_it_tells(folder: Path, change: Callable[[Path], object]) -> None:
    before = fingerprint(folder)
    change(folder)
    assert fingerprint(folder) != before


def test_bytes_between_the_blocks_are_not_read(folder: Path) -> None:
    before = fingerprint(folder)
    change_byte(folder, BLOCK_BYTES + 1)
    assert fingerprint(folder) == before


def test_small_files_are_read_whole(folder: Path) -> None:
    seen = set()
    for offset in (0, 99, 100):
        data = torch.zeros(101, dtype=torch.uint8)
        data[offset] = 1
        save_file({"a": data}, folder / "model.safetensors")
        seen.add(fingerprint(folder))
    assert len(seen) == 3


def test_a_large_file_is_not_read_whole(folder: Path) -> None:
    """A sparse file of 64 GB: reading all of it would take minutes."""
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (1 << 36, 1 << 36)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 36))
    assert len(fingerprint(folder)) == 64


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json: cannot be read: No such file"),
        (lambda f: (f / "model.safetensors").unlink(), "expected safetensors files, found none"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"1234567"),
            r"model\.safetensors: expected a whole safetensors file, found 7 bytes",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 16),
            r"model\.safetensors: expected a whole safetensors file, found 16 bytes",
        ),
    ],
    ids=["no config", "no weights", "short", "header beyond the end"],
)
def test_refuses(folder: Path, break_: Callable[[Path], object], message: str) -> None:
    break_(folder)
    with pytest.raises(CheckpointError, match=message):
        fingerprint(folder)
