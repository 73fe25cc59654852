"""`halfbyte serve` without vLLM: KV cache scales, which are measured only if they are needed."""

import json
import os
import shutil
from pathlib import Path

import pytest

from cli.running import FILLED_IN, SCALES, Serve
from cli.test_calibrate import add_own_scales
from halfbyte.models import find_kv_scales


class TestScales:
    """Scales are measured only if they are needed."""

    def test_into_the_models_folder(self, serve: Serve, model: Path, cache: Path) -> None:
        result = serve(str(model))
        assert (model / "kv_scales.json").is_file()
        assert not cache.exists()
        lines = result.err.splitlines()
        assert lines[0] == f"no KV cache scales for {model}: measuring them"
        assert lines[1] == f"{model}/kv_scales.json: written"
        assert result.arguments == [str(model), *FILLED_IN]
        assert serve(str(model)).err == lines[2] + "\n"

    def test_into_the_cache_folder(
        self, serve: Serve, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != model and access(path, mode))
        result = serve(str(model))
        [file] = cache.rglob("*.json")
        assert f"{file}: written" in result.err
        assert not (model / "kv_scales.json").exists()
        scales = find_kv_scales(model, {})
        assert scales is not None
        assert str(file) in scales.source
        assert "written" not in serve(str(model)).err
        shutil.rmtree(cache)
        monkeypatch.setenv("HALFBYTE_CACHE_DIR", "")
        result = serve(str(model))
        assert (result.status, result.started) == (1, None)
        assert "halfbyte calibrate --out" in result.err

    def test_of_a_hub_id(
        self, serve: Serve, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[object, object]] = []

        def download(name: str, **options: object) -> str:
            assert name == "somebody/model"
            asked.append((options["revision"], options["cache_dir"]))
            return str(model)

        monkeypatch.setattr("halfbyte.models.local_files.snapshot_download", download)
        result = serve("somebody/model", "--revision", "r", "--download-dir=d")
        assert asked == [("r", "d")]
        assert len(list(cache.rglob("*.json"))) == 1
        assert result.arguments[0] == "somebody/model"

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--kv-cache-dtype", "auto"],
            ["--kv-cache-dtype", "bfloat16"],
            ["--kv-scales", SCALES],
            ["--load-format", "dummy"],
            ["--attention-backend", "FLASHINFER", "--kv-cache-dtype", "nvfp4"],
            ["--k-dtype", "mxfp4", "--v-dtype", "bfloat16"],
            ["--help=all"],
            ["-h"],
        ],
        ids=" ".join,
    )
    def test_not_where_none_are_needed(
        self, serve: Serve, model: Path, cache: Path, arguments: list[str]
    ) -> None:
        result = serve(str(model), *arguments)
        assert result.status == 0
        assert result.started is not None
        assert "written" not in result.err
        assert not cache.exists()
        assert not (model / "kv_scales.json").exists()

    @pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "nvfp4_4over6"])
    def test_for_all_formats_that_need_them(self, serve: Serve, model: Path, dtype: str) -> None:
        serve(str(model), "--kv-cache-dtype", dtype)
        assert (model / "kv_scales.json").is_file()

    def test_for_a_format_that_the_checkpoint_declares(self, serve: Serve, model: Path) -> None:
        file = model / "hf_quant_config.json"
        file.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "NVFP4"}}))
        add_own_scales(model)
        result = serve(str(model), "--kv-cache-dtype", "auto")
        assert result.status == 0
        assert "written" not in result.err

    def test_of_another_model_are_refused(self, serve: Serve, model: Path) -> None:
        shutil.copy(SCALES, model)
        file = model / "kv_scales.json"
        scales = json.loads(file.read_text())
        file.write_text("{}")
        assert serve(str(model)).status == 1
        scales["k_amax"] = scales["k_amax"][:2]
        scales["v_amax"] = scales["v_amax"][:2]
        file.write_text(json.dumps(scales))
        result = serve(str(model))
        assert (result.status, result.started) == (1, None)
        assert "of a model with " in result.err
        del scales["model"]
        file.write_text(json.dumps(scales))
        result = serve(str(model))
        assert (result.status, result.started) == (1, None)
        assert "2 layers, the model has 4" in result.err
