"""The figures that README and docs show are those of the committed runs."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attention.cases import CASES, WITHOUT_PEERS, of_row
from benchmarks.pages import put_table, table_in

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["accuracy", "attention_decode", "kv_peers", "linear", "weight_rounding", "weights"]
)
def test_numbers_show_the_committed_run(name: str) -> None:
    benchmark = import_module(f"benchmarks.{name}")
    report = json.loads(benchmark.RESULT.read_text())
    assert table_in(benchmark.PAGE, benchmark.TABLE) == benchmark.table(report)


def test_docs_show_the_committed_run_of_experts() -> None:
    benchmark = import_module("benchmarks.moe")
    committed = benchmark.RESULT.is_file()
    table = benchmark.table(json.loads(benchmark.RESULT.read_text())) if committed else ""
    assert table_in(benchmark.PAGE, benchmark.TABLE) == table


def test_tables_of_the_docs_show_the_committed_runs() -> None:
    tables = import_module("benchmarks.docs_tables")
    for name, (page, make) in tables.TABLES.items():
        assert table_in(tables.NUMBERS / page, name) == make()


def test_every_run_says_what_wrote_it() -> None:
    """A program of the same name, or a line of the folder's page."""
    folder = REPOSITORY / "benchmarks" / "results"
    programs = {file.stem for file in folder.parent.glob("*.py")}
    listed = set(re.findall(r"`(\w+)`", (folder / "README.md").read_text()))
    runs = {file.stem for file in folder.glob("*.json")}
    assert runs <= programs | listed
    assert not programs & listed


def test_numbers_have_no_table_written_by_hand() -> None:
    pages = list((REPOSITORY / "docs" / "numbers").glob("*.md"))
    assert len(pages) >= 5
    for page in pages:
        generated = re.compile(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", re.DOTALL)
        by_hand = [x for x in generated.sub("", page.read_text()).splitlines() if x[:1] == "|"]
        assert by_hand == [], page.name


def test_a_table_is_put_in_its_one_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n<!-- xx -->\n<!-- /xx -->\n"
    page.write_text(text)
    put_table(page, "x", "| \\1 |\n")
    assert page.read_text() == text.replace("old\n", "| \\1 |\n")
    assert (table_in(page, "x"), table_in(page, "xx")) == ("| \\1 |\n", "")
    page.write_text(text + text)
    for name in ("x", "y"):
        with pytest.raises(ValueError, match=f"expected one place for the table {name}"):
            put_table(page, name, "")


def test_readme_is_short_and_has_the_picture_of_steps_in_vllm() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    picture = import_module("benchmarks.vllm_figures").PICTURE.relative_to(REPOSITORY)
    assert f"]({picture})" in readme
    assert len(readme.splitlines()) <= 150
    for link in re.findall(r"\]\(([^)#]+)", readme):
        assert (REPOSITORY / link).exists(), link


def test_docs_show_the_committed_run_of_recipes() -> None:
    """The run has all models, formats and recipes, and the pages show it."""
    benchmark = import_module("benchmarks.kv_recipes")
    report = json.loads(benchmark.RESULT.read_text())
    assert set(report["models"]) == set(report["long"]) == set(benchmark.MODELS)
    name = benchmark.TABLE_OF_README
    assert table_in(benchmark.README, name) == benchmark.TABLES[name](report)
    for name, table in benchmark.TABLES.items():
        assert table_in(benchmark.PAGE, name) == table(report)
    assert set(report["greedy"]) == set(report["layers"]) == set(benchmark.MODELS)
    for rows in [*report["models"].values(), *report["small_chunks"].values()]:
        assert len(rows) == len(benchmark.FORMATS) + len(benchmark.RECIPES) - 1


def test_pictures_of_recipes_are_those_of_the_committed_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = import_module("benchmarks.kv_recipe_plots")
    benchmark = import_module("benchmarks.kv_recipes")
    plots.draw(json.loads(benchmark.RESULT.read_text()), tmp_path)
    for name in plots.PICTURES:
        committed = (benchmark.PICTURES / name).read_text()
        assert texts_of(committed) == texts_of((tmp_path / name).read_text())
        assert f"]({name})" in benchmark.PAGE.read_text()


def texts_of(svg: str) -> list[str]:
    """Labels of a matplotlib picture, and the positions of its marks."""
    found: list[str] = re.findall(r"(?<=>)[^<>\n]+(?=</text>)|<use [^>]*>", svg)
    return found


def test_docs_show_the_committed_runs_inside_vllm() -> None:
    figures = import_module("benchmarks.vllm_figures")
    report = json.loads(figures.RESULT.read_text())
    assert table_in(figures.PAGE, "vllm-step") == figures.table(report)
    for name, file in figures.OTHERS.items():
        assert table_in(figures.PAGE, name) == figures.table(json.loads(file.read_text()))
    recipes = json.loads(figures.RECIPES.read_text())
    assert table_in(figures.RECIPES_PAGE, "recipe-speed") == figures.recipes_table(recipes)
    svg = figures.PICTURE.read_text()
    results = report["results"]
    for row in results.values():
        for case in figures.cases_of(report):
            assert case not in row or f">{row[case]['step_ms']:.1f}<" in svg
    profile = json.loads(figures.PROFILE.read_text())
    assert table_in(figures.PAGE, "vllm-profile") == figures.profile_table(profile)
    online = json.loads(figures.ONLINE.read_text())
    assert table_in(figures.PAGE, "vllm-online") == figures.online_table(online)
    svg = figures.ONLINE_PICTURE.read_text()
    for rates in online["results"].values():
        for row in rates.values():
            assert f">{row['mean_tpot_ms']:.1f}<" in svg


@pytest.fixture
def accuracy() -> Any:
    return import_module("benchmarks.accuracy")


def test_committed_run_says_what_it_was_measured_on(accuracy: Any) -> None:
    report = json.loads(accuracy.RESULT.read_text())
    assert report["command"].startswith("halfbyte eval --kv-cache-dtype bfloat16,")
    assert report["date"]
    assert report["versions"]["torch"]
    assert {row["kv_cache_dtype"] for row in report["results"]} == set(accuracy.FORMATS.split(","))


def test_committed_weights_run_has_the_script_s_cases() -> None:
    weights = import_module("benchmarks.weights")
    report = json.loads(weights.RESULT.read_text())
    measured = [(row["weights"], row["recipe"]) for row in report["results"]]
    assert measured == [(name, recipe) for name, _, recipe in weights.CASES]
    for row in report["results"]:
        assert tuple(cache["kv_cache_dtype"] for cache in row["caches"]) == weights.CACHES
    assert report["date"]
    assert report["versions"]["torch"]


@pytest.fixture
def attention_decode() -> Any:
    return import_module("benchmarks.attention_decode")


def test_picture_shows_the_committed_run(attention_decode: Any) -> None:
    report = json.loads(attention_decode.RESULT.read_text())
    svg = attention_decode.PICTURE.read_text()
    assert f"](../{attention_decode.PICTURE.name})" in attention_decode.PAGE.read_text()
    assert report["gpu"] in svg
    for row in report["microseconds"]:
        if row["name"] in WITHOUT_PEERS:
            continue
        for name in ("halfbyte_nvfp4", "flashinfer_fp8", "flashinfer_bf16"):
            if row["kind"] == "decode" and "single" in row.get(name, {}):
                assert f">{row[name]['single']:.0f}<" in svg


def test_committed_attention_run_has_the_script_s_cases(
    attention_decode: Any,
) -> None:
    report = json.loads(attention_decode.RESULT.read_text())
    cases = {case.name: case for case in CASES}
    for row in report["microseconds"]:
        assert of_row(row) == cases[row["name"]]
        assert row["halfbyte_nvfp4"]["single"] > 0
    assert report["date"]
    assert report["versions"]["flashinfer"]


def test_committed_prefill_variants_have_the_script_s_cases() -> None:
    variants = import_module("benchmarks.prefill_variants")
    report = json.loads(variants.RESULT.read_text())
    assert report["machine"]["gpu"]
    assert report["versions"]["torch"]
    assert len(report["microseconds"]) == len(variants.CASES)
    for row, case in zip(report["microseconds"], variants.CASES, strict=True):
        assert {name: row[name] for name in case._fields} == case._asdict()
        assert row.keys() - set(case._fields) == set(case.variants())


def test_variants_of_prefill_are_timed() -> None:
    """On a CPU, where one backend runs all variants."""
    variants = import_module("benchmarks.prefill_variants")
    row = variants.measure(
        variants.Prefill(1, 2, 32, 2, 128, 8), torch.device("cpu"), ["own", "pytorch"]
    )
    assert row["own"]["single"] > 0
    assert row["pytorch"]["back_to_back"] > 0


@pytest.mark.gpu
def test_every_variant_of_prefill_is_timed_on_a_gpu() -> None:
    variants = import_module("benchmarks.prefill_variants")
    case = variants.Prefill(2, 2, 64, 2, 128, 8)
    assert case.variants() == ["own", "pytorch", "general"]
    row = variants.measure(case, torch.device("cuda"), case.variants())
    for name in case.variants():
        assert row[name]["single"] > 0
