"""The file of a calibration, beside that of the scales (`scales.KVScales.save_file`)."""

import hashlib
from pathlib import Path

from halfbyte.kvcache.calibration import KVCalibration


def sibling_of(path: Path) -> Path:
    """The sibling of a file of scales that has the calibration.

    It is in the format of safetensors, but not named so: loaders take every such file in a model's
    folder for weights.
    """
    return path.with_suffix(".calibration")


def check_sibling(path: Path) -> None:
    """Raise ValueError where a calibration beside a file of scales would replace something else."""
    sibling = sibling_of(path)
    if sibling == path:
        raise ValueError(
            f"{path}: expected a name such as *.json; *.calibration is the second file"
        )
    if sibling.exists():
        try:
            KVCalibration.from_bytes(sibling.read_bytes())
        except ValueError:
            raise ValueError(
                f"{sibling}: exists and is not a calibration; move it, or write elsewhere"
            ) from None


def remove_calibration(path: Path) -> None:
    """Remove the calibration beside a file of scales; another file of that name stays."""
    sibling = sibling_of(path)
    if sibling == path or not sibling.is_file():
        return
    try:
        KVCalibration.from_bytes(sibling.read_bytes())
    except ValueError:
        return
    sibling.unlink()


def load_calibration(path: Path, sha256: object) -> KVCalibration | None:
    """The calibration beside a file of scales that has its hash; None without a hash.

    None also if the calibration's file does not exist, such as after copying only the scales: they
    are valid without it, and recipes that need a calibration raise an error.
    """
    sibling = sibling_of(path)
    if sha256 is None or not sibling.exists():
        return None
    data = sibling.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{sibling.name} beside it has another SHA-256 than it names")
    return KVCalibration.from_bytes(data)
