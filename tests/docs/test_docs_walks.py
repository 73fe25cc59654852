"""The walks of docs/walks/ name files and functions in the order in which code reaches them."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from typer.testing import CliRunner

import halfbyte
from halfbyte.assets import bundled_model_path
from halfbyte.cli import app
from halfbyte.kvcache import (
    PageLayout,
    get_kv_cache_quant_method,
    read_tokens,
    reshape_and_cache,
)
from halfbyte.kvcache.store import reference, registry
from halfbyte.linear import NvFp4Linear

WALKS = Path(__file__).parents[2] / "docs" / "walks"
PACKAGE = Path(halfbyte.__file__).parent
_ROW = re.compile(r"^\| `([\w./]+)` \| (?:`([\w.]+)`)? ?\|", re.MULTILINE)


class Step(NamedTuple):
    """A row of a walk; sources in other languages have no function."""

    file: str
    function: str


def steps(name: str) -> list[Step]:
    """The rows of a walk."""
    rows = [Step(*row) for row in _ROW.findall((WALKS / f"{name}.md").read_text())]
    assert len(rows) > 10
    assert len({row.file for row in rows}) == len(rows), "a file comes twice"
    for row in rows:
        assert (PACKAGE / row.file).is_file(), row.file
        assert bool(row.function) == row.file.endswith(".py")
    return rows


def called(work: Callable[[], object]) -> list[Step]:
    """The package's functions that some work calls, in the order of their first calls."""
    found: dict[Step, None] = {}
    root = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            found.setdefault(Step(code.co_filename.removeprefix(root), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return list(found)


def assert_in_order(name: str, work: Callable[[], object]) -> None:
    walk = [step for step in steps(name) if step.function]
    reached = [step for step in called(work) if step in walk]
    assert reached == walk


def test_prompt_to_token() -> None:
    llm = halfbyte.LLM(bundled_model_path(), max_model_len=128, max_num_seqs=2)
    params = halfbyte.SamplingParams(max_tokens=1, temperature=0.5, seed=1)
    assert_in_order("prompt-to-token", lambda: llm.generate(["import os"], params))


def test_kv_to_page() -> None:
    def work() -> None:
        layout = PageLayout("nvfp4", "nvfp4", 64, None, num_kv_heads=2, block_size=16)
        key, value = torch.randn(2, 16, 2, 64)
        scale = get_kv_cache_quant_method("nvfp4").global_scale_from_amax(4.0)
        pages, slots = torch.zeros(1, layout.page_bytes, dtype=torch.uint8), torch.arange(16)
        reshape_and_cache(key, value, pages, slots, layout, scale, scale)
        read, _ = read_tokens(pages, slots, layout, scale, scale)
        assert float((read - key).norm() / key.norm()) < 0.2

    registry.select_store.cache_clear()
    reference._method.cache_clear()
    assert_in_order("kv-to-page", work)


def test_checkpoint_to_layer(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    arguments = ["quantize", str(bundled_model_path()), str(folder)]
    options = ["--format", "modelopt", "--weights", "nvfp4-a16"]
    assert CliRunner().invoke(app, [*arguments, *options]).exit_code == 0

    def work() -> None:
        model = halfbyte.load_model(folder, device="cpu")
        layer = next(x for x in model.modules() if isinstance(x, NvFp4Linear))
        layer(torch.zeros(1, layer.in_features, dtype=layer.dtype))

    assert_in_order("checkpoint-to-layer", work)
