"""Identifies the model in a folder without reading all of it.

Calibrations of models in read-only folders are cached under this name.
"""

from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from halfbyte.checkpoints.dialects.modelopt import MODELOPT_FILE
from halfbyte.checkpoints.errors import CheckpointError

BLOCKS = 64
BLOCK_BYTES = 4096


def fingerprint(folder: str | Path) -> str:
    """Fingerprint of the model in a folder; independent of the folder's path.

    The SHA-256 of `config.json`, of `hf_quant_config.json` if there is one, and of each safetensors
    file's name, size, header and 64 blocks of 4 KiB spread evenly over its data: about 8 MB are
    read of 140 GB in 30 files.

    Fingerprints differ if the configuration, a tensor's name, dtype, shape or offset, or a byte in
    one of the blocks differs. A fine-tune of all weights changes nearly every block. A fine-tune
    that changes only a few tensors, all between the blocks, has the fingerprint of its original.
    Other files (tokenizer, index, chat template) are ignored.

    Args:
        folder: of a checkpoint in Hugging Face's layout.

    Returns:
        64 hexadecimal digits.

    Raises:
        CheckpointError: no config.json or no safetensors, or a file that cannot be read or is not a
            safetensors file; one line.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: expected safetensors files, found none")
    parts = [_read(folder / "config.json")]
    if (folder / MODELOPT_FILE).is_file():
        parts.append(_read(folder / MODELOPT_FILE))
    for file in files:
        parts += [file.name.encode(), _sampled(file)]
    total = sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from None


def _sampled(path: Path) -> bytes:
    """SHA-256 of a safetensors file's size, header and blocks."""
    try:
        size = path.stat().st_size
        total = sha256(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            length = file.read(8)
            start = 8 + int.from_bytes(length, "little")
            if len(length) < 8 or start > size:
                raise CheckpointError(
                    f"{path}: expected a whole safetensors file, found {size} bytes"
                )
            total.update(length + file.read(start - 8))
            for offset, count in _blocks(size - start):
                total.update(_block(file, start + offset, count))
    except OSError as error:
        raise _unreadable(path, error) from None
    return total.digest()


def _blocks(num_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the blocks: the first, the last, and evenly spaced between them."""
    if num_bytes <= BLOCKS * BLOCK_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - BLOCK_BYTES
    return [(i * last // (BLOCKS - 1), BLOCK_BYTES) for i in range(BLOCKS)]


def _block(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be read: {error.strerror or error}")
