"""The rules of the house: imports point down, in no circle; nothing heavy happens at import."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "halfbyte"
FLOORS = {
    "cli": 9,
    "server": 8,
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
    "kernels": 2,
    "layouts": 1,
    "dispatch": 1,
    "files": 0,
    "numerics": 0,
    "assets": 0,
    "after_import": 0,
}
# The package's own `__init__` and `__main__` are the door, not a room.
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem in FLOORS)


def _room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def _imported_files(file: Path) -> set[Path]:
    """Of the package, also those that only types need, or that a function imports."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {_file(name) for name in names if name.split(".")[0] == "halfbyte"}
    return found


def _file(name: str) -> Path:
    """Of a module, or of something in one."""
    place = PACKAGE.parent.joinpath(*name.split("."))
    folders = place, place.parent
    candidates = [(path.with_suffix(".py"), path / "__init__.py") for path in folders]
    return next(path for pair in candidates for path in pair if path.is_file())


def _imported_rooms(file: Path) -> set[str]:
    door = PACKAGE / "__init__.py"
    return {_room(path.relative_to(PACKAGE).parts) for path in _imported_files(file) - {door}}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down_never_sideways(file: Path) -> None:
    room = _room(file.relative_to(PACKAGE).parts)
    for imported in _imported_rooms(file) - {room}:
        assert FLOORS[imported] < FLOORS[room], f"{room} must not import {imported}"


def test_files_do_not_import_one_another_in_a_circle() -> None:
    TopologicalSorter({file: _imported_files(file) for file in FILES}).prepare()


def test_every_room_has_a_floor_and_a_sentence() -> None:
    rooms = {_room(file.relative_to(PACKAGE).parts) for file in FILES}
    structure = (PACKAGE.parents[1] / "docs" / "structure.md").read_text()
    assert rooms <= set(FLOORS)
    assert [room for room in rooms if f"`{room}" not in structure] == []


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
    """Or they would be where the caller's default device is, and read by code that is not."""
    factories = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"}
    factories |= {"randint", "randn", "randperm", "tensor", "zeros", "tril_indices", "triu_indices"}
    factories |= {"as_tensor", "asarray", "scalar_tensor"}
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in factories:
            named = {keyword.arg for keyword in node.keywords}
            assert named & {"device", None}, f"line {node.lineno}: {ast.unparse(node)}"
