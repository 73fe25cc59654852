"""The guide to new cache dtypes: its example passes its tests in a copy of the package."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import halfbyte

REPOSITORY = Path(__file__).parents[2]
PACKAGE = Path(halfbyte.__file__).parent
GUIDE = (REPOSITORY / "docs" / "guides" / "format.md").read_text()
NAME = "int8_block32"
TESTS = {
    "kvcache/test_kvcache_quant_methods.py::test_registry_has_every_format",
    "kvcache/test_kvcache_quant_methods.py::test_quantize_and_dequantize_are_the_oracles",
    "kvcache/test_kvcache_quant_methods.py::test_quantize_and_store_round_trip",
    "bench/test_bench_data.py::test_caches_hold_finite_values_of_both_signs_and_sane_size",
}
"""Some of the tests that the example's rows add cases to, or that check its registration."""


def blocks(language: str) -> list[str]:
    """The guide's code blocks of a language ("" for commands)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    return [block for of, block in fenced if of == language]


def append_row(path: Path, table: str, row: str) -> None:
    """Add a line at the end of a dict that is assigned at the top of a module."""
    text, count = re.subn(
        rf"^({table}\b[^\n]*\{{\n.*?)^\}}$",
        lambda found: f"{found[1]}    {row}\n}}",
        path.read_text(),
        count=1,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert count == 1, (path, table)
    path.write_text(text)


def row_of(block: str) -> str:
    """The row in a block, which may have several lines."""
    return block[block.index(f'"{NAME}"') :].rpartition("\n}")[0] or block.strip()


def apply_example(package: Path, tests: Path) -> None:
    """Steps 1, 2 and 4 of the guide: two files of the package, and one of the tests."""
    row, method, test_row = blocks("python")
    append_row(package / "layouts" / "formats.py", "KV_FORMATS", row_of(row))
    (package / "kvcache" / "quant_methods" / "int8.py").write_text(method)
    append_row(tests / "kvcache" / "page_arithmetic.py", "QUANTIZED", row_of(test_row))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of package and tests with the guide's example."""
    folder = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "src" / "halfbyte", ignore=skip)
    shutil.copytree(REPOSITORY / "tests", folder / "tests", ignore=skip)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    apply_example(folder / "src" / "halfbyte", folder / "tests")
    return folder


def run_tests(checkout: Path, *arguments: str) -> tuple[int, set[str], str]:
    """Exit status, tests that passed with the example or without parameters, end of the output."""
    paths = os.pathsep.join(str(checkout / name) for name in ("src", "tests"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.findall(r"^PASSED tests/(.+)$", done.stdout, re.MULTILINE)
    of_example = {test.partition("[")[0] for test in passed if "[" not in test or NAME in test}
    return done.returncode, of_example, done.stdout[-4000:] + done.stderr[-2000:]


def test_example_passes_tests_of_formats(checkout: Path) -> None:
    files = sorted({f"tests/{test.partition('::')[0]}" for test in TESTS})
    status, passed, output = run_tests(checkout, *files, "-k", f"{NAME} or registry_has")
    assert status == 0, output
    assert passed >= TESTS


@pytest.mark.slow
def test_example_passes_the_tests_that_the_guide_names(checkout: Path) -> None:
    (command,) = (block for block in blocks("") if block.startswith("pytest "))
    status, passed, output = run_tests(checkout, *shlex.split(command)[1:])
    assert status == 0, output
    assert passed >= TESTS


def test_no_kernel_takes_the_example(checkout: Path) -> None:
    """Its row has no ids of kernels, so each one says that it does not know the format."""
    code = f"""
import torch
from halfbyte.attention import flashinfer_views
from halfbyte.attention.decode import variant
from halfbyte.kernels import formats
from halfbyte.kernels.cpu import library
from halfbyte.kvcache.store.cuda.variant import V_KINDS
from halfbyte.layouts import KVCacheDType, PageLayout

for known in (library.FORMATS, formats.FORMATS, variant._KINDS, V_KINDS):
    assert KVCacheDType.NVFP4 in known and "{NAME}" not in known
layout = PageLayout("nvfp4", "{NAME}", 64, None, 2, 16)
print(variant.unsupported_reason(layout, torch.bfloat16))
assert flashinfer_views.flashinfer_dtype(PageLayout("{NAME}", "{NAME}", 64, None, 2, 16)) is None
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"not V in {NAME}" in done.stdout
