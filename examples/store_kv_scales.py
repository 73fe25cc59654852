"""Calibrate a model's KV scales once and store them beside its weights, as `kv_scales.json`.

    python examples/store_kv_scales.py PATH

Whoever loads the folder later gets these scales and needs no calibration pass.
"""

import argparse
from pathlib import Path

import torch

from halfbyte.layouts import KVCacheDType
from halfbyte.models import load_model, load_tokenizer, resolve_kv_scales


def main() -> None:
    """Parse the command line, calibrate, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path, help="folder of a checkpoint")
    path = parser.parse_args().path
    (path / "kv_scales.json").unlink(missing_ok=True)
    # float32, so that the figures do not depend on how a machine rounds bfloat16 products.
    model = load_model(path, dtype=torch.float32)
    scales = resolve_kv_scales(model, {KVCacheDType.NVFP4}, tokenizer=load_tokenizer(path))
    assert scales is not None
    print(f"{scales.save(path)}: {scales.num_layers} layers, {scales.source}")


if __name__ == "__main__":
    main()
