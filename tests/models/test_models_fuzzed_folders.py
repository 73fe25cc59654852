"""Corrupted checkpoint folders: a one-line error each, without side effects.

A few dozen cases in CI. `HALFBYTE_FUZZ_CASES=5000` in the environment runs that many, from the
seed `HALFBYTE_FUZZ_SEED` (0) on. A failure names its seed.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import halfbyte
from checkpoints.folders import make_folder
from checkpoints.mutations import mutate
from halfbyte.assets import bundled_model_path
from halfbyte.checkpoints import CheckpointError
from halfbyte.kvcache import KVScales
from halfbyte.models import UnsupportedModelError, load_model, load_tokenizer
from halfbyte.models.layerwise import calibrate_checkpoint
from halfbyte.quantization import quantize_checkpoint
from models.test_models_foreign_cache import write as write_foreign
from models.zoo import make_model
from side_effects import GIB, Watch, bounds, forget_peak, peak

CASES = int(os.environ.get("HALFBYTE_FUZZ_CASES", "60"))
SEED = int(os.environ.get("HALFBYTE_FUZZ_SEED", "0"))
LONGEST = 1000
EXPECTED = (CheckpointError, UnsupportedModelError)
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
}
CODE = "from pathlib import Path\nPath({marker!r}).write_text('ran')\nclass Evil: pass\nE = Evil\n"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Valid folders, one of each kind."""
    root = tmp_path_factory.mktemp("bases")
    plain = make_folder(root / "a", "llama", "modelopt", shards=2, **SMALL)
    moe = make_folder(root / "b", "qwen3_moe", "modelopt", "nvfp4", num_experts=4, **SMALL)
    foreign = make_folder(root / "c", "qwen3", "compressed-tensors", "nvfp4", **SMALL)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    foreign.declare(kv_cache_scheme=scheme)
    foreign.change(lambda tensors: tensors.update(kv_scales()))
    moe.declare(kv_cache_quant_algo="NVFP4")
    section = json.loads((moe.quantized / "config.json").read_text())["quantization_config"]
    declared = {"quantization": {k: v for k, v in section.items() if k != "quant_method"}}
    (moe.quantized / "hf_quant_config.json").write_text(json.dumps(declared))
    layer_types = ["sliding_attention", "full_attention"]
    gemma = make_model("gemma3_text", torch.bfloat16, layer_types=layer_types, **SMALL)
    gemma.save_pretrained(root / "d")
    KVScales((1.0, 2.0), (3.0, 4.0), "calibration").save(root / "d")
    write_foreign(root / "e", SMALL, kv_cache_scheme=scheme)
    found = [root / "e", plain.quantized, plain.plain, moe.quantized, foreign.quantized, root / "d"]
    for folder in found:
        for file in bundled_model_path().glob("tokenizer*"):
            shutil.copy(file, folder)
        if not (folder / "generation_config.json").exists():
            (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    return found


def kv_scales() -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{i}.self_attn.{side}_scale": torch.tensor([0.05])
        for i in range(2)
        for side in "kv"
    }


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.is_on = False


def load_and_use(folder: Path, _: Path) -> None:
    """Load the folder, and use all that could be loaded."""
    try:
        load_tokenizer(folder)
    except EXPECTED as error:
        check_line(str(error))
    halfbyte.Cache(load_model(folder, device="cpu"), "auto", kv_recipe="plain")


def calibrate(folder: Path, _: Path) -> None:
    calibrate_checkpoint(folder, device="cpu", max_tokens=64)


def quantize(folder: Path, out: Path) -> None:
    quantize_checkpoint(folder, out, dialect="modelopt", weights="nvfp4-a16")


USES = (load_and_use, load_and_use, load_and_use, calibrate, quantize)


def outcome(use: Callable[[Path, Path], None], folder: Path, out: Path) -> str:
    """`used`, or the error's line."""
    try:
        use(folder, out)
    except EXPECTED as error:
        check_line(str(error))
        return str(error)
    except ValueError as error:  # formats and scales that a model cannot have
        if type(error) is not ValueError:
            raise
        check_line(str(error))
        return str(error)
    return "used"


def check_line(line: str) -> None:
    assert line.isprintable(), repr(line)
    assert len(line) <= LONGEST, f"{len(line)} characters: {line[:300]}"
    assert len(line) > 20, line


@pytest.mark.skipif(sys.platform != "linux", reason="bounds and peaks are Linux's")
def test_one_clear_line(
    bases: list[Path], tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", "")
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - closed with the process
    out = tmp_path / "out"
    for base in bases:
        assert outcome(load_and_use, base, out) == "used", base
    assert outcome(quantize, bases[2], out) == "used"
    watch.allowed = (str(tmp_path),)
    marker = tmp_path / "ran"
    used, failures = 0, []
    for seed in range(SEED, SEED + CASES):
        random = Random(seed)
        folder = tmp_path / "case"
        shutil.copytree(random.choice(bases), folder, symlinks=True)
        (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
        done = mutate(folder, random)
        use = random.choice(USES)
        shutil.rmtree(out, ignore_errors=True)
        forget_peak()
        before = peak()
        watch.seen, watch.is_on = [], True
        try:
            with bounds():
                used += outcome(use, folder, out) == "used"
            problem = ""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            problem = f"{type(error).__name__}: {str(error)[:400]}"
        finally:
            watch.is_on = False
        if peak() - before > GIB:
            problem += f" {(peak() - before) >> 20} MiB"
        problem += " ".join(watch.seen)
        problem += " ran code" if marker.exists() else ""
        if problem:
            failures.append(f"seed {seed}: {use.__name__}: {done}: {problem}")
            print(failures[-1], flush=True)
        shutil.rmtree(folder)
    print(f"{CASES} cases, {used} used")
    assert not failures, "\n".join(failures)
    assert CASES < 30 or 0 < used < CASES, f"{used} of {CASES} were used"
