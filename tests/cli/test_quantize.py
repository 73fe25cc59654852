"""`halfbyte quantize`: options, written files and errors."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.mxfp4_folders import make_gpt_oss
from cli.running import Command, small_model
from halfbyte.assets import bundled_model_path
from halfbyte.checkpoints import CheckpointIndex
from halfbyte.models import load_model
from slow import slow


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small random model with the bundled model's tokenizer."""
    return small_model(tmp_path / "source")


def test_a_terminated_process_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """SIGTERM while writing, as a batch system sends it at the time limit."""
    target = tmp_path / "out" / "target"
    program = f"""
import os, sys
from halfbyte.checkpoints import output_folder
from halfbyte.cli import main
def end(*arguments):
    left = os.listdir({str(target.parent)!r})
    print(left, flush=True)
    os.kill(os.getpid(), {int(signal.SIGTERM)})
output_folder.write_json = output_folder._sync = end
sys.argv = ["halfbyte", "quantize", {str(source)!r}, {str(target)!r}, "--format", "modelopt"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert ".target.incomplete-" in done.stdout
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "then"),
    [(signal.SIGTERM, "raise RuntimeError('of a library')"), slow(signal.SIGINT, "pass")],
)
def test_a_library_may_catch_what_the_signal_raises(
    source: Path, tmp_path: Path, number: signal.Signals, then: str
) -> None:
    """As native code may that is running when the signal arrives."""
    target = tmp_path / "out" / "target"
    program = f"""
import os, sys
from halfbyte.checkpoints import output_folder
from halfbyte.cli import main
write = output_folder.write_json
def end(*arguments, **options):
    try:
        os.kill(os.getpid(), {int(number)})
    except BaseException:
        {then}
    return write(*arguments, **options)
output_folder.write_json = end
sys.argv = ["halfbyte", "quantize", {str(source)!r}, {str(target)!r}, "--format", "modelopt"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + number, done.stderr
    assert "RuntimeError" not in done.stderr
    assert [path for path in target.parent.iterdir() if path != target] == []


def test_quantize_json(halfbyte: Command, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    arguments = ("--format", "modelopt", "--weights", "nvfp4-a16", "--json")
    code, out, err = halfbyte("quantize", str(source), str(target), *arguments)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["destination"] == str(target)
    assert (report["format"], report["weights"]) == ("modelopt", "nvfp4-a16")
    assert (report["kv_cache_dtype"], report["calibration"]) == (None, None)
    assert len(report["layers"]) == 28
    assert report["ignored"] == ["lm_head"]
    errors = [layer["sqnr_db"] for layer in report["layers"]]
    assert report["mean_sqnr_db"] == pytest.approx(sum(errors) / 28)
    assert report["min_sqnr_db"] == min(errors)
    assert 19 < min(errors) < 22
    assert report["bytes"] == sum(f.stat().st_size for f in target.glob("*.safetensors"))
    stored = json.loads((target / "quantization_report.json").read_text())
    assert {"destination": str(target), **stored} == report


def test_quantize_prints_a_table(halfbyte: Command, source: Path, tmp_path: Path) -> None:
    arguments = ("--format", "compressed-tensors", "--recipe", "four_over_six")
    code, out, err = halfbyte("quantize", str(source), str(tmp_path / "target"), *arguments)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    projections = ("down", "gate", "up", "o", "k", "q", "v")
    assert set(lines[0].split()) == {"layer", *(f"{x}_proj" for x in projections)}
    assert re.fullmatch(r" +3( +\d\d\.\d\d){7}", lines[4])
    assert "28 layers in nvfp4 (four_over_six), 1 left as they were" in out
    assert re.search(r"calibrated on \d+ tokens of the built-in text", out)


def test_quantize_copies_what_is_not_weights(
    halfbyte: Command, source: Path, tmp_path: Path
) -> None:
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.bin").write_bytes(b"pickled")
    (source / ".cache").mkdir()
    link = source / "LICENSE"
    link.symlink_to(bundled_model_path() / "README.md")
    target = tmp_path / "target"
    code, _, _ = halfbyte("quantize", str(source), str(target), "--format", "modelopt")
    assert code == 0
    copied = {"chat_template.jinja", "LICENSE", "generation_config.json"}
    copied |= {file.name for file in source.glob("tokenizer*")}
    made = {"config.json", "hf_quant_config.json", "quantization_report.json", "model.safetensors"}
    assert {file.name for file in target.iterdir()} == copied | made
    for name in copied:
        assert (target / name).read_bytes() == (source / name).read_bytes()
        assert not (target / name).is_symlink()
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, target))
    assert after.pop("quantization_config")["provider"] == "halfbyte"
    assert after == before


def test_quantize_ignores(halfbyte: Command, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    patterns = ("--ignore", "*.layers.0.*", "--ignore", r"re:.*\.o_proj$")
    arguments = ("--format", "modelopt", "--weights", "nvfp4-a16", *patterns, "--json")
    code, out, _ = halfbyte("quantize", str(source), str(target), *arguments)
    assert code == 0
    ignored = json.loads(out)["ignored"]
    assert len(ignored) == 7 + 3 + 1
    config = json.loads((target / "hf_quant_config.json").read_text())
    assert config["quantization"]["exclude_modules"] == ignored
    before, after = (load_file(f / "model.safetensors") for f in (source, target))
    for module in ignored:
        assert torch.equal(before[f"{module}.weight"], after[f"{module}.weight"])
    load_model(target, device="cpu")


def test_quantize_shards(halfbyte: Command, source: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "many"]
    for folder, size in zip(folders, ("5", "0.0005"), strict=True):
        arguments = ("--format", "modelopt", "--weights", "nvfp4-a16", "--shard-size", size)
        assert halfbyte("quantize", str(source), str(folder), *arguments)[0] == 0
    files = list(folders[1].glob("*.safetensors"))
    assert len(files) > 2
    # The head and the embedding are larger than a shard, and lie alone.
    assert sorted(file.stat().st_size for file in files)[-3] < 510_000
    one, many = (CheckpointIndex.read(folder) for folder in folders)
    names = list(one.tensors)
    torch.testing.assert_close(dict(many.stream(names)), dict(one.stream(names)), rtol=0, atol=0)


def test_quantize_calibrates_on_a_file(halfbyte: Command, source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 20)
    scales = []
    for i, more in enumerate(([], ["--calibrate", str(text)])):
        target = tmp_path / str(i)
        arguments = ("--format", "modelopt", "--json", *more)
        code, out, _ = halfbyte("quantize", str(source), str(target), *arguments)
        assert code == 0
        name = "model.layers.0.self_attn.o_proj.input_scale"
        scales.append(float(load_file(target / "model.safetensors")[name]))
    assert json.loads(out)["calibration"].endswith("tokens of text.txt")
    assert scales[0] > scales[1] > 0  # more text holds larger magnitudes


def test_quantize_force_replaces(halfbyte: Command, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    arguments = (str(source), str(target), "--format", "modelopt", "--weights", "nvfp4-a16")
    assert halfbyte("quantize", *arguments)[0] == 0
    (target / "old").write_text("")
    code, _, err = halfbyte("quantize", *arguments)
    assert code == 1
    assert "exists already (--force replaces it)" in err
    assert (target / "old").exists()
    assert halfbyte("quantize", *arguments, "--force")[0] == 0
    assert not (target / "old").exists()


def test_quantize_force_keeps_what_is_no_checkpoint(
    halfbyte: Command, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "photos"
    target.mkdir()
    (target / "photo.jpg").write_text("")
    code, out, err = halfbyte(
        "quantize", str(source), str(target), "--format", "modelopt", "--force"
    )
    assert (code, out) == (1, "")
    assert err == f"error: {target}: expected a checkpoint to replace, found other files\n"
    assert [file.name for file in target.iterdir()] == ["photo.jpg"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "gguf"], "format: expected one of modelopt, compressed-tensors, got 'gguf'"),
        (["--weights", "int4"], "weights: expected one of nvfp4, nvfp4-a16, got 'int4'"),
        (["--recipe", "magic"], "recipe: expected one of amax6, four_over_six, got 'magic'"),
        (
            ["--kv-cache-dtype", "int3"],
            "kv_cache_dtype: expected one of nvfp4, fp8_e4m3, fp8, got 'int3'",
        ),
        (["--ignore", "*.nothing"], "ignore: '*.nothing' matches no linear layer"),
        (["--shard-size", "0"], "shard_size: expected a positive, finite number, got 0"),
        (["--shard-size", "inf"], "shard_size: expected a positive, finite number, got inf"),
        (
            ["--calibrate", "/no/such/file"],
            "calibrate: /no/such/file: cannot be read: No such file or directory",
        ),
        (["--calibrate", "{source}"], "source: cannot be read: Is a directory"),
        (["--calibrate", "{source}/model.safetensors"], "model.safetensors: is not UTF-8 text"),
        (["--weights", "nvfp4-a16", "--calibrate", "{source}/config.json"], "no calibration"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_quantize_bad_options(
    halfbyte: Command, source: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    target = tmp_path / "target"
    options = [argument.replace("{source}", str(source)) for argument in arguments]
    code, out, err = halfbyte(
        "quantize", str(source), str(target), "--format", "modelopt", *options
    )
    assert (code, out) == (1, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def quantized_config(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (source / "config.json").write_text(json.dumps(config))


def list_for_a_declaration(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": [1]}))


def packed_weight(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, source / "model.safetensors")


def absent_shard(source: Path) -> None:
    weight_map = dict.fromkeys(load_file(source / "model.safetensors"), "model-1.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (quantized_config, "expected an unquantized checkpoint, found one quantized by gptq"),
        (
            lambda source: (source / "hf_quant_config.json").write_text("{}"),
            "expected an unquantized checkpoint, found one quantized by modelopt",
        ),
        (list_for_a_declaration, "quantization_config: expected an object, found list"),
        (packed_weight, "q_proj.weight: expected BF16/F16/F32 [64, 64], found F8_E4M3 [64, 64]"),
        (
            lambda source: (source / "model.safetensors").rename(source / "pytorch_model.bin"),
            "found pickled weights (pytorch_model.bin)",
        ),
        (absent_shard, "expected the shard model-1.safetensors"),
        (
            lambda source: (source / "model.safetensors").write_bytes(b"\xff" * 100),
            "expected a whole safetensors file",
        ),
        (
            lambda source: (source / "config.json").write_text("{"),
            "config.json: expected a JSON object",
        ),
        (lambda source: (source / "config.json").unlink(), "has no config.json"),
        (
            lambda source: [file.unlink() for file in source.glob("tokenizer*")],
            "tokenizer",
        ),
    ],
    ids=[
        "quantized",
        "modelopt",
        "list",
        "fp8",
        "pickled",
        "absent shard",
        "broken",
        "config",
        "no config",
        "no tokenizer",
    ],
)
def test_quantize_bad_sources(
    halfbyte: Command,
    source: Path,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    message: str,
) -> None:
    spoil(source)
    code, out, err = halfbyte(
        "quantize", str(source), str(tmp_path / "target"), "--format", "modelopt"
    )
    assert (code, out) == (1, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("place", ["source/target", "source", "."])
def test_quantize_keeps_source_and_destination_apart(
    halfbyte: Command, source: Path, tmp_path: Path, place: str
) -> None:
    arguments = ("--format", "modelopt", "--force")
    before = {file: file.read_bytes() for file in source.iterdir()}
    code, _, err = halfbyte("quantize", str(source), str(tmp_path / place), *arguments)
    assert code == 1
    assert "found one inside the other" in err
    assert {file: file.read_bytes() for file in source.iterdir()} == before


def test_quantize_needs_a_format(halfbyte: Command, source: Path, tmp_path: Path) -> None:
    code, out, err = halfbyte("quantize", str(source), str(tmp_path / "target"))
    assert (code, out) == (1, "")
    assert err.startswith("error: format: expected modelopt or compressed-tensors; only GPT-OSS's")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [source]


def test_quantize_keeps_experts_in_mxfp4(halfbyte: Command, tmp_path: Path) -> None:
    """Without a format, the cache of GPT-OSS's own files is quantized."""
    source = make_gpt_oss(tmp_path / "source", vocab_size=4096)
    for file in bundled_model_path().glob("tokenizer*"):
        shutil.copyfile(file, source / file.name)
    text, target = tmp_path / "text.txt", tmp_path / "target"
    text.write_text("import os\n" * 20)
    arguments = ("--kv-cache-dtype", "nvfp4", "--calibrate", str(text))
    code, out, _ = halfbyte("quantize", str(source), str(target), *arguments)
    assert code == 0
    assert out.startswith("experts copied in mxfp4, bit for bit; 9 linear layers left as they were")
    assert "KV cache: nvfp4\n" in out
    assert "signal" not in out
    scales = load_file(target / "model.safetensors")["model.layers.1.self_attn.k_scale"]
    assert scales.dtype == torch.float32
    code, out, _ = halfbyte("quantize", str(source), str(target), *arguments, "--force", "--json")
    assert (code, json.loads(out)["format"]) == (0, "mxfp4")
