"""Rules of the tree: imports point down, files and functions are short, nothing is hidden."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "halfbyte"
LAYERS = {
    "cli": 9,
    "evaluation": 8,
    "bench": 8,
    "plugins": 8,
    "engine": 7,
    "quantization": 7,
    "models": 6,
    "moe": 5,
    "attention": 4,
    "linear": 4,
    "kvcache": 3,
    "checkpoints": 3,
    "elementwise": 3,
    "measure": 3,
    "kernels": 2,
    "layouts": 1,
    "dispatch": 1,
    "files": 0,
    "numerics": 0,
    "assets": 0,
    "after_import": 0,
    "transformers_hook": 7,
    "__init__": 10,
    "__main__": 10,
}
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = PACKAGE / "__init__.py"
"""Imports the public names when they are used, so that every layer may import its version."""

FILE_LINES, MEDIAN_LINES = 400, 130
LONG_FILES = {
    "kernels/cpu/attention/attend.cpp": "one item of attention: all works on the same buffers",
    "attention/decode/decode_wgmma.cu": "one kernel: its warps share registers and barriers",
}
CUDA_SOURCES = sorted(path for path in PACKAGE.rglob("*.cu*") if path.suffix in (".cu", ".cuh"))
_INCLUDE = re.compile(r'^ *# *include +"(.*)"', re.MULTILINE)
BENCH_LINES = 800
TEST_NAME_LETTERS = 60
BODY_LINES = 60
"""Of a function, without its arguments and docstring; kernels in Triton have no helpers with state
and may be longer."""
POSITIONAL = 8
"""Max parameters that a caller may give by position."""
MANY_POSITIONAL = {
    "kvcache/quant_methods/base.py quantize_and_store": "SGLang's signature",
    "models/attention_functions.py engine_attention": "transformers' signature",
    "models/attention_functions.py generate_attention": "transformers' signature",
    "plugins/vllm/attention.py __init__": "vLLM's signature",
    "plugins/vllm/attention.py forward": "vLLM's signature",
}


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _package(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def _imported_files(file: Path) -> set[Path]:
    """Of the package without `ROOT`, also those that only types need, or that a function
    imports."""
    found: set[Path] = set()
    for node in ast.walk(_tree(file)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {_file(name) for name in names if name.split(".")[0] == "halfbyte"}
    return found - {ROOT}


def _file(name: str) -> Path:
    """Of a module, or of something in one."""
    place = PACKAGE.parent.joinpath(*name.split("."))
    folders = place, place.parent
    candidates = [(path.with_suffix(".py"), path / "__init__.py") for path in folders]
    return next(path for pair in candidates for path in pair if path.is_file())


def _imported_packages(file: Path) -> set[str]:
    return {_package(path.relative_to(PACKAGE).parts) for path in _imported_files(file)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down_never_sideways(file: Path) -> None:
    package = _package(file.relative_to(PACKAGE).parts)
    for imported in _imported_packages(file) - {package}:
        assert LAYERS[imported] < LAYERS[package], f"{package} must not import {imported}"


def test_cuda_sources_include_from_their_own_or_lower_layers() -> None:
    found = [
        f"{source.relative_to(PACKAGE)} must not include {name}"
        for source in CUDA_SOURCES
        for name in _INCLUDE.findall(source.read_text())
        if not _may_include(_package(source.relative_to(PACKAGE).parts), name)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("package", "name", "may"),
    [
        ("moe", "linear/w4a16/values.cuh", True),
        ("moe", "moe/cuda/values.cuh", True),
        ("linear", "moe/cuda/values.cuh", False),
        ("attention", "linear/w4a16/values.cuh", False),
        ("kernels", "attention/decode/formats.cuh", False),
        ("moe", "cuda/values.cuh", False),
    ],
)
def test_layers_of_includes(package: str, name: str, may: bool) -> None:
    assert _may_include(package, name) is may


def _may_include(package: str, name: str) -> bool:
    """Whether sources of a package may include a file, named by its path in `halfbyte`."""
    included = name.split("/")[0]
    if included not in LAYERS or not (PACKAGE / name).is_file():
        return False
    return included == package or LAYERS[included] < LAYERS[package]


def test_files_do_not_import_one_another_in_a_circle() -> None:
    TopologicalSorter({file: _imported_files(file) for file in FILES}).prepare()


def test_every_package_has_a_layer_and_a_sentence() -> None:
    packages = {_package(file.relative_to(PACKAGE).parts) for file in FILES}
    structure = (PACKAGE.parents[1] / "docs" / "structure.md").read_text()
    assert packages == set(LAYERS)
    assert [package for package in packages if f"`{package}" not in structure] == []


def test_import_touches_neither_cuda_nor_transformers() -> None:
    code = (
        "import sys, torch, halfbyte, halfbyte.numerics, halfbyte.kvcache, halfbyte.attention;"
        "assert not torch.cuda.is_initialized();"
        "assert 'transformers' not in sys.modules, 'transformers was imported'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_parts_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, halfbyte; assert 'torch' not in sys.modules;"
        "halfbyte.numerics.nvfp4.quantize, halfbyte.kvcache.reshape_and_cache;"
        "halfbyte.attention.paged_attention, halfbyte.layouts.PageLayout;"
        "halfbyte.linear.NvFp4Linear, halfbyte.checkpoints.read_declaration;"
        "assert 'transformers' not in sys.modules; halfbyte.models.load_model;"
        "assert not hasattr(halfbyte, 'nonsense')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_new_tensors_name_their_device(file: Path) -> None:
    """Otherwise the caller's default device would apply, which other code does not expect."""
    factories = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"}
    factories |= {"randint", "randn", "randperm", "tensor", "zeros", "tril_indices", "triu_indices"}
    factories |= {"as_tensor", "asarray", "scalar_tensor"}
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in factories:
            named = {keyword.arg for keyword in node.keywords}
            assert named & {"device", None}, f"line {node.lineno}: {ast.unparse(node)}"


def test_files_are_short() -> None:
    kinds = {".py", ".cu", ".cuh", ".cpp", ".h", ".inc"}
    files = [path for path in PACKAGE.rglob("*") if path.suffix in kinds]
    lines = {path: path.read_text().count("\n") for path in files}
    long = {str(path.relative_to(PACKAGE)) for path in files if lines[path] > FILE_LINES}
    assert long == set(LONG_FILES)
    assert median(lines[path] for path in FILES) < MEDIAN_LINES


def test_bench_is_small() -> None:
    """Peers, bounds, tables and pictures are in `benchmarks/`."""
    files = (PACKAGE / "bench").rglob("*.py")
    assert sum(file.read_text().count("\n") for file in files) <= BENCH_LINES


def test_names_of_tests_can_be_grepped() -> None:
    names = [
        name
        for file in Path(__file__).parent.rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    ]
    assert [name for name in names if len(name) > TEST_NAME_LETTERS] == []


def test_functions_are_short_and_take_few_arguments() -> None:
    long, greedy = [], set()
    for file, node in _nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        place = f"{file.relative_to(PACKAGE)} {node.name}"
        decorators = {ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list}
        if "triton.jit" in decorators:
            continue
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if body and body[-1].end_lineno - body[0].lineno >= BODY_LINES:
            long.append(place)
        arguments = [argument.arg for argument in node.args.posonlyargs + node.args.args]
        count = len(arguments) - (arguments[:1] in (["self"], ["cls"]))
        # Typer makes options of arguments, and operators of torch take tensors and numbers only.
        is_flat = place.startswith("cli/") or decorators & {"linear_op", "operator"}
        if count > POSITIONAL and not is_flat:
            greedy.add(place)
    assert long == []
    assert greedy == set(MANY_POSITIONAL)


def test_launches_of_kernels_name_their_arguments() -> None:
    """In `kernel[grid](...)`; the shortest calls may give them by position."""
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file, node in _nodes(ast.Call)
        if isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).endswith("kernel")
        and (len(node.args) > POSITIONAL or any(isinstance(x, ast.Starred) for x in node.args))
    ]
    assert found == []


def test_calls_of_triton_functions_name_their_arguments() -> None:
    functions = {
        node.name
        for _, node in _nodes(ast.FunctionDef)
        if any(ast.unparse(x).startswith("triton.jit") for x in node.decorator_list)
    }
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file, node in _nodes(ast.Call)
        if isinstance(node.func, ast.Name)
        and node.func.id in functions
        and len(node.args) > POSITIONAL
    ]
    assert found == []


def test_frozen_dataclasses_are_not_written_once_they_are_made() -> None:
    makers = {"__init__", "__post_init__"}
    makers_of_own = {
        id(node)
        for _, function in _nodes(ast.FunctionDef)
        if function.name in makers
        for node in ast.walk(function)
    }
    found = [
        f"{file}:{node.lineno}"
        for file, node in _nodes(ast.Call)
        if ast.unparse(node.func) == "object.__setattr__" and id(node) not in makers_of_own
    ]
    found += [
        f"{file}:{node.lineno}"
        for file, node in _nodes(ast.Subscript)
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value).endswith("__dict__")
    ]
    assert found == []


def test_frozen_dataclasses_have_no_caches_to_fill() -> None:
    """Fields or properties that begin as an empty dict or list."""
    found = []
    for file, node in _nodes(ast.ClassDef):
        if not any("frozen=True" in ast.unparse(x) for x in node.decorator_list):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.AnnAssign | ast.Return):
                text = ast.unparse(part)
                if "init=False" in text or text in ("return {}", "return []"):
                    found.append(f"{file}:{part.lineno}")
    assert found == []


def test_backends_are_chosen_by_what_they_can_do() -> None:
    """Not by names in the code."""
    found = [
        f"{file}:{node.lineno}"
        for file, node in _nodes(ast.Call)
        if re.search(r"_BACKENDS\.(get|select)$", ast.unparse(node.func))
        for given in (*node.args, *(keyword.value for keyword in node.keywords))
        if isinstance(given, ast.Constant) and isinstance(given.value, str)
    ]
    assert found == []


def test_plans_have_typed_keys() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file, node in _nodes(ast.Call)
        if ast.unparse(node.func).endswith("plans.get") and isinstance(node.args[0], ast.Tuple)
    ]
    assert found == []


def test_keys_of_dicts_are_named_tuples() -> None:
    """Not bare ones, whose fields have no names."""
    aliases = {
        target.id
        for _, node in _nodes(ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and _is_tuple_type(node.value, set())
    }
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file, node in _nodes(ast.Subscript)
        if re.search(r"([dD]ict|Mapping|Counter)$", ast.unparse(node.value))
        and _is_tuple_type(_key_of(node), aliases)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("annotation", "is_tuple"),
    [
        ("dict[tuple[int, str], float]", True),
        ("defaultdict[Place, list[int]]", True),
        ("Mapping['tuple[int, ...]', int]", True),
        ("Counter[tuple[int, int]]", True),
        ("dict[tuple[int, str] | None, float]", True),
        ("dict[str, tuple[int, int]]", False),
        ("dict[Name, int]", False),
    ],
)
def test_bare_tuples_are_found_in_annotations(annotation: str, is_tuple: bool) -> None:
    node = ast.parse(annotation, mode="eval").body
    assert isinstance(node, ast.Subscript)
    assert _is_tuple_type(_key_of(node), {"Place"}) is is_tuple


def _key_of(node: ast.Subscript) -> ast.expr:
    """Type of the keys of `dict[...]`."""
    return node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice


def _is_tuple_type(node: ast.expr, aliases: set[str]) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a forward reference
        return node.value.split("[")[0] in {"tuple", *aliases}
    if isinstance(node, ast.BinOp):
        return _is_tuple_type(node.left, aliases) or _is_tuple_type(node.right, aliases)
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) in ("tuple", "Tuple")
    return isinstance(node, ast.Name) and node.id in aliases


def _nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, Any]]:
    """Nodes of the package's files."""
    for file in FILES:
        yield from ((file, node) for node in ast.walk(_tree(file)) if isinstance(node, kinds))
