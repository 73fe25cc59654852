"""`halfbyte calibrate`: measured scales, output files and errors."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cli.running import Command, run, small_model
from halfbyte import LLM, Cache
from halfbyte.assets import calibration_text
from halfbyte.kvcache import KVScales
from halfbyte.models import calibrate, find_kv_scales, load_model, load_tokenizer, local_files
from halfbyte.models.kv_calibration import calibration_tokens, usual_first_tokens
from kvcache.transforms import without_costs


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def halfbyte(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return lambda *arguments: run(capsys, monkeypatch, "calibrate", *arguments)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small random model with the bundled model's tokenizer."""
    return small_model(tmp_path / "model")


@pytest.fixture
def read_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's folder, which cannot be written; root may write anywhere."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != model and access(path, mode))
    return model


def add_own_scales(model: Path) -> None:
    names = [f"model.layers.{i}.self_attn.{side}_scale" for i in range(4) for side in "kv"]
    save_file({name: torch.tensor(0.01) for name in names}, model / "scales.safetensors")


def test_writes_into_the_models_folder(halfbyte: Command, model: Path) -> None:
    """The scales equal those of `calibrate` with the whole model, and are used afterwards."""
    code, out, err = halfbyte(str(model), "--device", "cpu")
    assert (code, err) == (0, "")
    loaded = load_model(model, device="cpu")
    tokenizer = load_tokenizer(model)
    ids, source = calibration_tokens(tokenizer, loaded.config, calibration_text())
    stored = KVScales.load(model)
    assert stored == calibrate(loaded, ids, source, first_tokens=usual_first_tokens(tokenizer))
    assert source == "calibration on 256 tokens of the built-in text"
    lines = out.splitlines()
    assert lines[0].split() == ["amax", "layers", "min", "median", "max"]
    side, layers, low, middle, high = lines[1].split()
    assert (side, layers) == ("K", "4")
    assert (low, high) == (f"{min(stored.k_amax):.4g}", f"{max(stored.k_amax):.4g}")
    assert float(low) <= float(middle) <= float(high)
    assert lines[3:] == [source, f"{model}/kv_scales.json: written"]
    llm = LLM(model, kv_cache_dtype="nvfp4", device="cpu")
    assert llm.kv_scales is not None
    assert llm.kv_scales.source == f"kv_scales.json ({source})"
    assert llm.kv_scales.k_amax == stored.k_amax


def test_text_and_max_tokens(halfbyte: Command, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os, sys\n" * 400)
    arguments = (str(model), "--text", str(text), "--device", "cpu", "--json")
    code, out, err = halfbyte(*arguments, "--max-tokens", "600")
    assert (code, err) == (0, "")
    loaded = load_model(model, device="cpu")
    tokenizer = load_tokenizer(model)
    ids, source = calibration_tokens(tokenizer, loaded.config, text.read_text(), "text.txt", 600)
    assert ids.shape == (3, 200)
    expected = calibrate(loaded, ids, source, first_tokens=usual_first_tokens(tokenizer))
    result = json.loads(out)
    assert result == {
        "path": f"{model}/kv_scales.json",
        "layers": 4,
        "source": "calibration on 600 tokens of text.txt",
        "k_amax": list(expected.k_amax),
        "v_amax": list(expected.v_amax),
    }
    assert KVScales.load(model) == expected
    assert json.loads(halfbyte(*arguments)[1])["source"].startswith("calibration on 256 tokens")


def test_few_tokens(halfbyte: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are said to be few; statistics of earlier runs do not outlive their scales."""
    # Handlers of earlier tests have their standard error.
    monkeypatch.setattr(logging.getLogger("halfbyte"), "handlers", [])
    sibling = model / "kv_scales.calibration"
    assert halfbyte(str(model))[0] == 0
    assert sibling.is_file()
    code, out, err = halfbyte(str(model), "--max-tokens", "5")
    assert (code, err.count("\n")) == (0, 1)
    assert "calibration on only 5 tokens: K and V of other text may exceed" in err
    assert "only for kv_recipe plain" not in out + err
    assert sibling.is_file()
    code, out, err = halfbyte(str(model), "--max-tokens", "1")
    assert code == 0
    assert "calibration on only 1 tokens: " in err
    assert "no recipe statistics, so only for kv_recipe plain: " in err
    assert not sibling.exists()
    scales = KVScales.load(model)
    assert scales is not None
    assert scales.calibration is None


def test_out(halfbyte: Command, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    code, out, _ = halfbyte(str(model), "--out", str(file), "--dtype", "float32")
    assert code == 0
    assert f"{file}: written" in out
    assert not (model / "kv_scales.json").exists()
    assert KVScales.load_file(file).num_layers == 4


def test_a_folder_that_cannot_be_written(halfbyte: Command, read_only: Path, cache: Path) -> None:
    before = sorted(read_only.iterdir())
    code, out, _ = halfbyte(str(read_only), "--json")
    assert code == 0
    path = Path(json.loads(out)["path"])
    assert path.parent == cache / "kv_scales"
    assert re.fullmatch(r"[0-9a-f]{64}\.json", path.name)
    assert sorted(read_only.iterdir()) == before
    found = find_kv_scales(read_only, json.loads((read_only / "config.json").read_text()))
    assert found is not None
    assert found.source == f"{path} (calibration on 256 tokens of the built-in text)"


def test_a_hub_id(
    halfbyte: Command, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot in the hub's cache is not changed."""
    asked = {}

    def download(name: str, *, revision: str, cache_dir: Path, **_: object) -> str:
        asked[name] = (revision, str(cache_dir))
        return str(model)

    monkeypatch.setattr(local_files, "snapshot_download", download)
    of_hub = ("--revision", "v2", "--download-dir", "/models")
    code, out, _ = halfbyte("somebody/model", "--json", *of_hub)
    assert code == 0
    assert asked == {"somebody/model": ("v2", "/models")}
    assert Path(json.loads(out)["path"]).parent == cache / "kv_scales"
    assert not (model / "kv_scales.json").exists()


def test_scales_of_its_own_come_first_for_plain_alone(halfbyte: Command, model: Path) -> None:
    """The default recipe uses the measured ones."""
    add_own_scales(model)
    loaded = load_model(model)
    assert Cache(loaded, "nvfp4").recipe.name == "plain"
    code, out, _ = halfbyte(str(model))
    assert code == 0
    assert f"{model / 'kv_scales.json'}: written" in out
    for dtype, recipe, source in (
        ("nvfp4", None, "kv_scales.json"),
        ("nvfp4", "plain", "checkpoint"),
        ("fp8", None, "checkpoint"),
    ):
        cache = Cache(loaded, dtype, kv_recipe=recipe)
        assert cache.kv_scales is not None
        assert cache.kv_scales.source.startswith(source)
        assert cache.recipe.name == ("balanced" if source == "kv_scales.json" else "plain")


def test_a_file_in_a_folder_that_cannot_be_written_comes_first(
    halfbyte: Command, read_only: Path, model: Path, cache: Path
) -> None:
    """If it has a calibration that suits the default recipe."""
    KVScales((1.0,) * 4, (1.0,) * 4, "published").save(read_only)
    code, out, _ = halfbyte(str(read_only))
    assert code == 0
    (written,) = cache.glob("kv_scales/*.json")
    scales = KVScales.load_file(written)
    assert scales.calibration is not None
    replace(scales, calibration=without_costs(scales.calibration)).save(read_only)
    code, out, _ = halfbyte(str(read_only))
    assert code == 0
    assert f"{written}: written" in out
    scales.save(read_only)
    for file in cache.glob("kv_scales/*"):
        file.unlink()
    code, out, _ = halfbyte(str(read_only))
    assert code == 0
    assert (
        "nothing to do: its folder has a kv_scales.json with a calibration, which takes precedence"
        in out
    )
    assert "(--force measures anyway)" in out
    assert not list(cache.glob("kv_scales/*"))
    code, out, _ = halfbyte(str(read_only), "--json")
    assert json.loads(out)["path"] is None
    code, out, _ = halfbyte(str(read_only), "--force")
    assert code == 0
    assert "used only if passed as kv_scales, because its folder has a kv_scales.json" in out


def test_a_model_without_a_tokenizer(halfbyte: Command, model: Path, tmp_path: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()
    code, out, _ = halfbyte(str(model))
    assert code == 0
    assert "256 fixed token ids (the model has no tokenizer)" in out
    (tmp_path / "text").write_text("import os")
    code, _, err = halfbyte(str(model), "--text", str(tmp_path / "text"))
    assert code == 1
    assert err == f"error: {model}: has no tokenizer, which a text needs\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/model"], "/no/such/model: no such folder"),
        (["{tmp}"], "{tmp}: the folder has no config.json"),
        (
            ["{model}", "--text", "/no/file"],
            "text: /no/file: cannot be read: No such file or directory",
        ),
        (["{model}", "--text", "{tmp}/empty"], "text: {tmp}/empty: is empty, expected a text"),
        (
            ["{model}", "--text", "{model}/model.safetensors"],
            "model.safetensors: is not UTF-8 text",
        ),
        (["{model}", "--max-tokens", "0"], "max_tokens: expected a number above 0, got 0"),
        (["{model}", "--device", "gpu"], "device: "),
        (["{model}", "--dtype", "int8"], "dtype: expected one of auto, float32"),
        (["{model}", "--out", "{tmp}"], "out: {tmp}: is a folder, expected the name of a file"),
        (["{model}", "--out", "{tmp}/null"], "null: expected the name of a regular file"),
        (["{model}", "--out", "/no/such/file.json"], "out: /no/such: no such folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refuses_in_one_line(
    halfbyte: Command, model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "null").symlink_to("/dev/null")
    places = {"model": model, "tmp": tmp_path}
    code, out, err = halfbyte(*(argument.format(**places) for argument in arguments))
    assert (code, out) == (1, "")
    assert message.format(**places) in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (model / "kv_scales.json").exists()


def test_nowhere_to_write(
    halfbyte: Command, read_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", "")
    code, _, err = halfbyte(str(read_only))
    assert code == 1
    assert "there is no cache folder (HALFBYTE_CACHE_DIR is empty): say where" in err


def test_usage(halfbyte: Command) -> None:
    assert halfbyte()[0] == 2
    code, out, _ = halfbyte("--help")
    assert code == 0
    assert "--max-tokens" in out


def test_a_terminated_process_leaves_what_was_there(model: Path) -> None:
    """SIGTERM while writing."""
    KVScales((1.0,) * 4, (1.0,) * 4, "before").save(model)
    before = {file.name for file in model.iterdir()}
    program = f"""
import os, signal, sys
from halfbyte.cli import main
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["halfbyte", "calibrate", {str(model)!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 128 + signal.SIGTERM
    scales = KVScales.load(model)
    assert scales is not None
    assert scales.source == "before"
    assert {file.name for file in model.iterdir()} == before


def test_a_copy_of_the_model_finds_what_was_kept(
    halfbyte: Command, read_only: Path, tmp_path: Path
) -> None:
    assert halfbyte(str(read_only))[0] == 0
    copy = tmp_path / "copy"
    shutil.copytree(read_only, copy)
    assert find_kv_scales(copy, json.loads((copy / "config.json").read_text())) is not None
