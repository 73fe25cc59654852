"""The store kernel: the reference's bytes, in Triton's interpreter; compiled for every GPU."""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.dispatch import NoImplementationError
from halfbyte.kvcache import reshape_and_cache
from halfbyte.kvcache.store import StoreConfig, registry
from halfbyte.kvcache.transform import MARK, MATCH_TOLERANCE
from halfbyte.layouts import PageLayout
from kvcache.page_arithmetic import KERNEL_DTYPES, KERNEL_DTYPES_WITH_GLOBAL_SCALE, Geometry
from kvcache.store.recipe_cases import (
    RECIPE_OPTIONS,
    WEIGHTS_ALONE,
    assert_stored_as_by_the_reference,
)
from kvcache.store.store_cases import (
    GEOMETRIES,
    INPUT_DTYPES,
    StoreCase,
    assert_every_value_stored,
    is_unquantized,
    make_case,
    nasty_values,
    positional,
    values_next_to_ties,
)
from kvcache.store.weighted_cases import BOTH, SMALL, WeightedCase, assert_stored_by_weights
from triton_interpreter import interpreted

pytest.importorskip("triton")

import triton

from halfbyte.kvcache.store import triton_kernel as compiled
from halfbyte.kvcache.store.triton_rows import side_of
from slow import CAPABILITIES, one_in, slow

# NumPy, which the interpreter computes with, warns of 0 / 0 and of overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

QUANTIZED = [dtype for dtype in KERNEL_DTYPES if dtype not in ("float32", "float16", "bfloat16")]


@pytest.fixture(scope="module")
def store() -> Any:
    """`halfbyte.kvcache.store.triton_kernel` in the interpreter."""
    return interpreted("halfbyte.kvcache.store.triton_kernel")


@pytest.mark.parametrize(("seed", "geometry"), one_in(2, enumerate(GEOMETRIES)), ids=str)
def test_store_writes_the_references_bytes_and_no_others(
    store: Any, seed: int, geometry: Geometry
) -> None:
    make_case(geometry, seed, before=16, after=32).assert_stored(positional(store.store_tokens))


@pytest.mark.parametrize(
    ("geometry", "before", "after"),
    one_in(
        2,
        (
            (geometry, before, after)
            for geometry in GEOMETRIES[::3]
            for before, after in ((0, 0), (4, 12), (3, 6))
            if before % 4 == 0 or not is_unquantized(geometry)  # floats must be aligned
        ),
    ),
    ids=str,
)
def test_store_to_pages_of_every_alignment(
    store: Any, geometry: Geometry, before: int, after: int
) -> None:
    make_case(geometry, before=before, after=after).assert_stored(positional(store.store_tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "nvfp4", "mxfp4"])
def test_store_takes_inputs_of_any_strides(store: Any, dtype: str) -> None:
    case = make_case(Geometry(dtype, dtype, 64, 32, 3, 8))
    count = len(case.slots)
    fused = torch.zeros(count, 3 * 64 + 3 * 32 + 5, dtype=case.value.dtype)
    value = fused[:, 3 * 64 : -5].unflatten(1, (3, 32))
    value.copy_(case.value)
    inputs = {
        "transposed": (case.key.permute(1, 2, 0).contiguous().permute(2, 0, 1), value),
        "heads_first": (case.key.transpose(0, 1).contiguous().transpose(0, 1), value),
        "expanded": (case.key[:, :1].expand(-1, 3, -1), case.value[:1].expand(count, -1, -1)),
    }
    for key, value in inputs.values():
        replace(case, key=key, value=value).assert_stored(positional(store.store_tokens))


@pytest.mark.parametrize("dtype", ["float32", "nvfp4"])
def test_store_skips_slots_past_the_last_page_and_no_slots(store: Any, dtype: str) -> None:
    case = make_case(Geometry(dtype, dtype, 64, 64, 3, 8))
    slots = torch.tensor([[0, 9], [40, 9], [2**40, 9], [39, 9], [41, 9], [-1, 9]])[:, 0]
    replace(case, slots=slots).assert_stored(positional(store.store_tokens))
    for none in (slots[:0], torch.tensor([-1, 40])):
        nothing = replace(case, slots=none)
        assert torch.equal(nothing.stored(positional(store.store_tokens)), nothing.buffer)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES_WITH_GLOBAL_SCALE)
@pytest.mark.parametrize(
    "scale",
    [1.0, 2.0**-40, 2.0**-41, 2.0**41, 1e-20, 3e37, 1e-42, torch.tensor(0.3), torch.tensor([7e-4])],
    ids=str,
)
def test_store_with_global_scales_of_every_size(
    store: Any, dtype: str, scale: float | torch.Tensor
) -> None:
    geometry = Geometry(dtype, dtype, 64, 64, 3, 8)
    make_case(geometry, k_scale=scale, v_scale=0.011).assert_stored(positional(store.store_tokens))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES_WITH_GLOBAL_SCALE)
@pytest.mark.parametrize("scale", [0.0, -0.01, math.nan, math.inf])
def test_store_with_a_broken_scale_on_the_device(store: Any, dtype: str, scale: float) -> None:
    geometry = Geometry(dtype, dtype, 64, 64, 3, 8)
    case = make_case(geometry, k_scale=torch.tensor(scale), v_scale=torch.tensor(0.02))
    case.assert_stored(positional(store.store_tokens))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES_WITH_GLOBAL_SCALE)
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, torch.ones(2)], ids=str)
def test_store_refuses_bad_scales(store: Any, dtype: str, scale: float | torch.Tensor) -> None:
    case = make_case(Geometry(dtype, "float32", 64, 64, 3, 8), k_scale=scale)
    with pytest.raises(ValueError, match="k_scale"):
        case.stored(positional(store.store_tokens))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_store_refuses_pages_off_the_elements_alignment(store: Any, dtype: str) -> None:
    case = make_case(Geometry("nvfp4", dtype, 64, 64, 3, 8), before=1, after=3)
    with pytest.raises(ValueError, match="multiples of"):
        case.stored(positional(store.store_tokens))


def test_store_to_slots_beyond_32_bits(store: Any, tmp_path: Path) -> None:
    layout = PageLayout("nvfp4", "nvfp4", 16, None, 1, 16)
    shape = (2**27 + 3, layout.page_bytes)
    sparse = np.memmap(tmp_path / "pages", np.uint8, "w+", shape=shape)
    pages = torch.from_numpy(sparse)
    key, value = nasty_values((2, 6, 1, 16))
    slots = torch.tensor([2**31 + 5, 2**31 + 47, 2**31 + 48, 2**32 + 7, 7, -1])
    positional(store.store_tokens)(key, value, pages, slots, layout, 0.02, 0.01)
    expected = torch.zeros(4, layout.page_bytes, dtype=torch.uint8)
    near = torch.tensor([16 + 5, 48 + 15, -1, -1, 7, -1])
    reshape_and_cache(key, value, expected, near, layout, 0.02, 0.01, backend="reference")
    assert torch.equal(pages[[0, 2**27, 2**27 + 1, 2**27 + 2]], expected)


@pytest.mark.parametrize("k_dtype", ["fp8_e4m3", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_store_of_every_16_bit_value(
    store: Any, monkeypatch: pytest.MonkeyPatch, k_dtype: str, input_dtype: torch.dtype
) -> None:
    # Few large programs are fastest in the interpreter.
    monkeypatch.setattr(store, "_SMALL_TILE", (4096, 4))
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = bits.view(input_dtype)
    x = x[x.isfinite()]
    x = torch.cat([x, x.new_zeros(-len(x) % 256)])
    torch.manual_seed(3)
    for values in (x, x[torch.randperm(len(x))]):
        assert_every_value_stored(positional(store.store_tokens), k_dtype, values, 0.0137)


@pytest.mark.parametrize("k_dtype", ["fp8_e4m3", "nvfp4"])
def test_store_divides_truly_next_to_ties(
    store: Any, monkeypatch: pytest.MonkeyPatch, k_dtype: str
) -> None:
    monkeypatch.setattr(store, "_SMALL_TILE", (4096, 4))
    for x, scale in values_next_to_ties(k_dtype, 6):
        assert_every_value_stored(positional(store.store_tokens), k_dtype, x, scale)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("dtype", one_in(2, ["fp8_e5m2", "nvfp4", "nvfp4_4over6", "fp4_block16"]))
def test_store_of_any_float32(dtype: str, data: st.DataObject) -> None:
    floats = data.draw(st.sampled_from([st.floats(width=32), st.floats(width=16)]))
    row = torch.tensor(data.draw(st.lists(floats, min_size=32, max_size=32)))
    scale = data.draw(st.floats(2.0**-60, 2.0**60, width=32))
    layout = PageLayout(dtype, dtype, 32, None, 1, 2)
    key, value = row.reshape(1, 1, 32), row.bfloat16().reshape(1, 1, 32)
    case = StoreCase(layout, key, value, torch.tensor([1]), scale, scale, num_pages=1)
    kernel = interpreted("halfbyte.kvcache.store.triton_kernel")
    case.assert_stored(positional(kernel.store_tokens))


@pytest.mark.parametrize("architecture", CAPABILITIES)
@pytest.mark.parametrize(
    ("k_dtype", "v_dtype"),
    [("nvfp4", "nvfp4"), ("fp8_e4m3", "nvfp4_4over6"), ("mxfp4", "bfloat16")],
)
def test_kernel_compiles(
    architecture: int,
    k_dtype: str,
    v_dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    layout = PageLayout(k_dtype, v_dtype, 128, None, 8, 16)
    kernel = compile_for(architecture, layout)
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    ptx = kernel.asm["ptx"]
    # Subnormals are kept, no product is fused into a sum, and divisions are true ones or products
    # with a reciprocal that begins as an approximation, which a GPU test tries for every divisor.
    reciprocal = "rcp.approx.ftz.f32"
    assert (reciprocal in ptx) == (k_dtype != "mxfp4")
    ptx = ptx.replace(reciprocal, "")
    for inexact in (".ftz", "div.full", "div.approx", "rcp.approx", " mul.f32", " add.f32"):
        assert inexact not in ptx
    assert "ld.global.v4.b32" in ptx
    if k_dtype == v_dtype:
        # Threads that hold whole blocks exchange nothing, and write both words of a block at once.
        assert kernel.metadata.shared == 0
        assert "st.global.v2.b32" in ptx


RECIPE_CONSTANTS: dict[str, Any] = {
    "centred": True,
    "segment": 64,
    "block": 128,
    "norm": 0.08838834764,
    "knows_first": True,
    "mark": MARK,
    "tolerance": MATCH_TOLERANCE,
    "weighted": False,
    "weighted_v": False,
    "ring_size": 80,
    "pairs": 16,
    "padded": 128,
    "padded_v": 128,
}


def assert_exact(ptx: str) -> None:
    """All float operations round to nearest, except for the approximate reciprocals."""
    ptx = ptx.replace("rcp.approx.ftz.f32", "")
    for inexact in (".ftz", "div.full", "div.approx", "rcp.approx", " mul.f32", " add.f32"):
        assert inexact not in ptx


@pytest.mark.parametrize(
    ("architecture", "weighted"),
    [slow(80, True), (90, True), slow(90, False), slow(120, True)],
)
def test_kernel_for_recipes_compiles(
    architecture: int, weighted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    layout = PageLayout("nvfp4_4over6", "nvfp4_4over6", 128, None, 8, 16)
    constants = {**RECIPE_CONSTANTS, "weighted": weighted, "weighted_v": weighted}
    kernel = compile_for(architecture, layout, compiled.store_transformed_kernel, constants)
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    ptx = kernel.asm["ptx"]
    assert_exact(ptx)
    # Rows are exchanged by shuffles; only whether a program has a first token goes through memory.
    assert kernel.metadata.shared <= 16
    assert "st.global.v2.b32" in ptx


@pytest.mark.parametrize("tile", [slow(compiled._ROW_FEEDBACK), slow(compiled._LARGE_FEEDBACK)])
def test_kernel_for_error_feedback_compiles(
    tile: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tokens, rows, num_warps = tile
    constants = {
        **RECIPE_CONSTANTS,
        "weighted": True,
        "weighted_v": True,
        "parts": 8,
        "tokens": tokens,
        "rows": min(rows, 8 * tokens),
    }
    layout = PageLayout("nvfp4_4over6", "nvfp4_4over6", 128, None, 8, 16)
    kernel = compile_for(90, layout, compiled.store_feedback_kernel, constants, num_warps)
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert_exact(kernel.asm["ptx"])
    ptx = kernel.asm["ptx"]
    if tokens == 1:  # all threads get each value of a block at once
        assert ptx.count("redux.sync.xor.b32") == 16
    else:  # threads have whole tokens: the sixteen steps of a block exchange nothing
        steps = ptx.rpartition("div.rn.f32")[2].partition("st.global.b8")[0]
        assert "shfl" not in steps
        assert "ld.global.v4.b32" in steps
    assert kernel.metadata.shared <= 4096


def compile_for(
    architecture: int,
    layout: PageLayout,
    store_kernel: Any = compiled.store_kernel,
    more: dict[str, Any] | None = None,
    num_warps: int = 4,
) -> Any:
    """A kernel for bfloat16 inputs, heads side by side, and a float scale."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = store_kernel.arg_names
    (k_side, k_offsets), (v_side, v_offsets) = (side_of(layout, side, True) for side in "kv")
    constants = {
        "slot_stride": 1,
        "key_stride": 1,
        "value_stride": 1,
        "k_side": k_side,
        "v_side": v_side,
        "k_offsets": k_offsets,
        "v_offsets": v_offsets,
        "k_dense": True,
        "v_dense": True,
        "k_scale_on_device": False,
        "v_scale_on_device": False,
        "rows": 128,
        "overlaps": architecture >= 90,
        **(more or {}),
    }
    types = {"key": "*bf16", "value": "*bf16", "pages": "*u8", "slots": "*i64"}
    types |= {"k_scale": "fp32", "v_scale": "fp32", "positions": "*i64"}
    types |= dict.fromkeys(("cos", "sin", "mean", "partner_mean"), "*fp32")
    types |= dict.fromkeys(("feedback", "k_weights", "v_weights", "scratch"), "*fp32")
    types |= dict.fromkeys(("first_keys", "first_values", "ring_keys", "ring_values"), "*bf16")
    types |= dict.fromkeys(("ring_rows", "ring_owners", "ring_slots"), "*i64")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = [n for n in names if types.get(n, "").startswith("*") or "stride" in n]
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants
    }
    source = ASTSource(store_kernel, signature, constants, attributes)
    options = {
        "num_warps": num_warps,
        "enable_fp_fusion": False,
        "launch_pdl": architecture >= 90,
    }
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Selection as on a machine with an H100."""
    monkeypatch.setattr("halfbyte.dispatch.current_compute_capability", lambda *device: 90)
    for cached in (registry.select_store, registry._log_slow):
        cached.cache_clear()
    yield
    for cached in (registry.select_store, registry._log_slow):
        cached.cache_clear()


def chosen_on_a_gpu(
    dtype: str, key_dtype: torch.dtype, value_dtype: torch.dtype, backend: str | None = None
) -> str:
    layout = PageLayout(dtype, dtype, 64, None, 2, 16)
    config = StoreConfig(layout, key_dtype, value_dtype, "cuda")
    return registry.select_store(config, backend).name


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_kernel_is_chosen_for_every_format(dtype: str) -> None:
    for key_dtype, value_dtype in zip(INPUT_DTYPES, reversed(INPUT_DTYPES), strict=True):
        assert chosen_on_a_gpu(dtype, key_dtype, value_dtype) == "triton"


@pytest.mark.usefixtures("_on_a_gpu")
def test_kernel_is_not_chosen_for_float64_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "halfbyte"):
        for dtype in ("nvfp4", "fp8_e4m3"):
            assert chosen_on_a_gpu(dtype, torch.bfloat16, torch.float64) == "reference"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "value in bfloat16, float16 or float32, not torch.float64" in caplog.text
    with pytest.raises(NoImplementationError, match=r"'triton' cannot be used here.*float64"):
        chosen_on_a_gpu("nvfp4", torch.bfloat16, torch.float64, "triton")


@pytest.mark.usefixtures("_on_a_gpu")
def test_without_triton_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfbyte.dispatch.is_installed", lambda module: module != "triton")
    with caplog.at_level(logging.INFO, "halfbyte"):
        for dtype in KERNEL_DTYPES:
            assert chosen_on_a_gpu(dtype, torch.bfloat16, torch.bfloat16) == "reference"
    assert len(caplog.records) == 1
    assert "needs triton" in caplog.text


@pytest.mark.usefixtures("_on_a_gpu")
def test_unknown_store_backend_is_refused_with_the_names() -> None:
    with pytest.raises(
        NoImplementationError, match=r"'numba'; expected one of cuda, triton, cpu, ref"
    ):
        chosen_on_a_gpu("nvfp4", torch.bfloat16, torch.bfloat16, "numba")


def test_nasty_values_are_nasty() -> None:
    x = nasty_values((9, 3, 64))
    assert x.isnan().any()
    assert x.isinf().any()
    assert ((x != 0) & (x.abs() < 2.0**-126)).any()
    assert (torch.signbit(x) & (x == 0)).any()


@pytest.mark.parametrize(
    ("options", "input_dtype"),
    one_in(
        11,
        (
            (options, dtype)
            for options in (*RECIPE_OPTIONS, *WEIGHTS_ALONE)
            for dtype in INPUT_DTYPES
        ),
    ),
    ids=str,
)
def test_store_of_k_that_a_recipe_changes(
    store: Any, options: dict[str, Any], input_dtype: torch.dtype
) -> None:
    assert_stored_as_by_the_reference(
        positional(store.store_tokens), options, input_dtype, count=44
    )


@pytest.mark.parametrize("name", one_in(4, SMALL))
def test_store_by_weighted_error(store: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With large programs."""
    # Few large programs are fastest in the interpreter.
    monkeypatch.setattr(store, "_SMALL_FEEDBACK", (64, 128, 1))
    monkeypatch.setattr(store, "_SMALL_FEEDBACK_FROM", 0)
    assert_stored_by_weights(positional(store.store_tokens), SMALL[name], count=40)


@pytest.mark.slow
def test_store_of_few_tokens_by_weighted_error(store: Any) -> None:
    """One warp per token."""
    case = WeightedCase(PageLayout("nvfp4_4over6", "nvfp4_4over6", 32, 16, 1, 16), BOTH)
    assert_stored_by_weights(positional(store.store_tokens), case, count=8)


def test_store_by_weighted_error_with_first_tokens_and_rings(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_SMALL_FEEDBACK", (64, 128, 1))
    monkeypatch.setattr(store, "_SMALL_FEEDBACK_FROM", 0)
    options = {"feedback": True, "weighted": True, "head_size": 32, "heads": 1}
    assert_stored_as_by_the_reference(
        positional(store.store_tokens), options, torch.bfloat16, count=36
    )
