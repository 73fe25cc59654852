"""The C++ store: the reference's bytes, on every instruction set that this CPU has."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.kernels.cpu.library import library
from halfbyte.kvcache.store import StoreConfig
from halfbyte.kvcache.store.cpu import CpuStore, run
from halfbyte.layouts import PageLayout
from kvcache.page_arithmetic import KERNEL_DTYPES, KERNEL_DTYPES_WITH_GLOBAL_SCALE, Geometry
from kvcache.store.recipe_cases import (
    RECIPE_OPTIONS,
    WEIGHTED_OPTIONS,
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
from kvcache.store.weighted_cases import (
    CASES,
    LAYOUTS,
    assert_stored_by_weights,
    assert_tokens_are_stored_alone,
)

cpu_store = positional(run)

pytestmark = [
    pytest.mark.skipif(library() is None, reason="built without a C++ compiler"),
    pytest.mark.usefixtures("level"),
    # Higher levels add nothing for the store.
    pytest.mark.parametrize("level", ["portable", "avx2", "avx512"], indirect=True),
]


@pytest.mark.parametrize(("seed", "geometry"), list(enumerate(GEOMETRIES)), ids=str)
def test_store_writes_the_references_bytes_and_no_others(seed: int, geometry: Geometry) -> None:
    make_case(geometry, seed, before=16, after=32).assert_stored(cpu_store)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_store_to_pages_of_every_alignment(geometry: Geometry) -> None:
    for before, after in ((0, 0), (4, 12), (3, 6)):
        if before % 4 == 0 or not is_unquantized(geometry):  # floats must be aligned
            make_case(geometry, before=before, after=after).assert_stored(cpu_store)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("input_dtype", INPUT_DTYPES, ids=str)
def test_store_takes_inputs_of_every_dtype_and_any_strides(
    dtype: str, input_dtype: torch.dtype
) -> None:
    case = make_case(Geometry(dtype, dtype, 64, 32, 3, 8))
    case = replace(case, key=case.key.to(input_dtype), value=case.value.to(input_dtype))
    count = len(case.slots)
    fused = torch.zeros(count, 3 * 64 + 3 * 32 + 5, dtype=input_dtype)
    value = fused[:, 3 * 64 : -5].unflatten(1, (3, 32))
    value.copy_(case.value)
    inputs = {
        "as it is": (case.key, case.value),
        "transposed": (case.key.permute(1, 2, 0).contiguous().permute(2, 0, 1), value),
        "heads_first": (case.key.transpose(0, 1).contiguous().transpose(0, 1), value),
        "expanded": (case.key[:, :1].expand(-1, 3, -1), case.value[:1].expand(count, -1, -1)),
    }
    for key, value in inputs.values():
        replace(case, key=key, value=value).assert_stored(cpu_store)


@pytest.mark.parametrize("dtype", ["float32", "nvfp4"])
def test_store_skips_negative_slots_and_tokens_without_slots(dtype: str) -> None:
    case = make_case(Geometry(dtype, dtype, 64, 64, 3, 8))
    slots = torch.tensor([[0, 9], [-1, 9], [-(2**40), 9], [39, 9], [12, 9]])[:, 0]
    replace(case, slots=slots).assert_stored(cpu_store)
    for none in (slots[:0], torch.tensor([-1, -40])):
        nothing = replace(case, slots=none)
        assert torch.equal(nothing.stored(cpu_store), nothing.buffer)


@pytest.mark.parametrize("slot", [40, 2**40])
def test_store_refuses_slots_past_the_last_page_before_it_writes(slot: int) -> None:
    case = make_case(Geometry("nvfp4", "nvfp4", 64, 64, 3, 8))
    case = replace(case, slots=torch.tensor([0, 7, slot]))
    buffer = case.buffer.clone()
    with pytest.raises(ValueError, match=f"slot {slot} is past the last, 39"):
        cpu_store(case.key, case.value, case.pages(buffer), case.slots, case.layout, 0.1, 0.1)
    assert torch.equal(buffer, case.buffer)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "nvfp4_4over6"])
def test_store_of_many_tokens_on_several_threads(dtype: str, threads: int) -> None:
    layout = PageLayout(dtype, "nvfp4", 64, 128, 8, 16)
    key, value = nasty_values((500, 8, 64)), nasty_values((500, 8, 128), 1).bfloat16()
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(0))[:500]
    slots[::7] = -1
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        StoreCase(layout, key, value, slots, num_pages=32).assert_stored(cpu_store)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES_WITH_GLOBAL_SCALE)
@pytest.mark.parametrize(
    "scale",
    [1.0, 2.0**-40, 2.0**-41, 2.0**41, 1e-20, 3e37, 1e-42, torch.tensor(0.3), torch.tensor([7e-4])],
    ids=str,
)
def test_store_with_global_scales_of_every_size(dtype: str, scale: float | torch.Tensor) -> None:
    geometry = Geometry(dtype, dtype, 64, 64, 3, 8)
    make_case(geometry, k_scale=scale, v_scale=0.011).assert_stored(cpu_store)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES_WITH_GLOBAL_SCALE)
@pytest.mark.parametrize("scale", [0.0, -0.01, math.nan, math.inf])
def test_store_with_a_broken_scale_equals_the_reference(dtype: str, scale: float) -> None:
    geometry = Geometry(dtype, dtype, 64, 64, 3, 8)
    case = make_case(geometry, k_scale=torch.tensor(scale), v_scale=torch.tensor(0.02))
    case.assert_stored(cpu_store)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES_WITH_GLOBAL_SCALE)
@pytest.mark.parametrize(
    "scale",
    [0.0, -1.0, math.nan, math.inf, 1e39, 1e-46, None, torch.ones(2), torch.tensor(1)],
    ids=str,
)
def test_store_refuses_bad_scales(dtype: str, scale: float | torch.Tensor) -> None:
    case = make_case(Geometry(dtype, "float32", 64, 64, 3, 8), k_scale=scale)
    with pytest.raises(ValueError, match="k_scale"):
        case.stored(cpu_store)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_store_refuses_pages_off_the_elements_alignment(dtype: str) -> None:
    case = make_case(Geometry("nvfp4", dtype, 64, 64, 3, 8), before=1, after=3)
    with pytest.raises(ValueError, match="multiples of"):
        case.stored(cpu_store)


@pytest.mark.parametrize("k_dtype", ["float16", "fp8_e4m3", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_store_of_every_16_bit_value(k_dtype: str, input_dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(input_dtype)
    torch.manual_seed(3)
    for values in (x, x[torch.randperm(len(x))]):
        assert_every_value_stored(cpu_store, k_dtype, values, 0.0137)


@pytest.mark.parametrize("k_dtype", ["float16", "fp8_e4m3", "nvfp4", "mxfp4"])
def test_store_of_random_bits(k_dtype: str) -> None:
    torch.manual_seed(5)
    x = torch.randint(-(2**31), 2**31, (2**17,), dtype=torch.int64).int().view(torch.float32)
    near = torch.randn(2**17) * 2.0 ** torch.randint(-30, 20, (2**13, 1)).expand(-1, 16).flatten()
    for values in (x, near, near.half().float()):
        assert_every_value_stored(cpu_store, k_dtype, values, 0.0137)


@pytest.mark.parametrize("k_dtype", ["fp8_e4m3", "nvfp4"])
def test_store_divides_truly_next_to_ties(k_dtype: str) -> None:
    for x, scale in values_next_to_ties(k_dtype, 20):
        assert_every_value_stored(cpu_store, k_dtype, x, scale)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
@pytest.mark.parametrize("dtype", ["fp8_e5m2", "nvfp4", "nvfp4_4over6", "fp4_block16"])
def test_store_of_any_float32(dtype: str, data: st.DataObject) -> None:
    floats = data.draw(st.sampled_from([st.floats(width=32), st.floats(width=16)]))
    row = torch.tensor(data.draw(st.lists(floats, min_size=32, max_size=32)))
    scale = data.draw(st.floats(2.0**-60, 2.0**60, width=32))
    layout = PageLayout(dtype, dtype, 32, None, 1, 2)
    key, value = row.reshape(1, 1, 32), row.bfloat16().reshape(1, 1, 32)
    case = StoreCase(layout, key, value, torch.tensor([1]), scale, scale, num_pages=1)
    case.assert_stored(cpu_store)


def test_cpu_store_says_what_it_takes() -> None:
    layout = PageLayout("nvfp4", "mxfp4", 64, None, 2, 16)
    config = StoreConfig(layout, torch.bfloat16, torch.float32, "cpu")
    assert CpuStore.can_implement(config)[0]
    can, reason = CpuStore.can_implement(replace(config, value_dtype=torch.float64))
    assert not can
    assert reason == "takes value in bfloat16, float16 or float32, not torch.float64"


@pytest.mark.parametrize("input_dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("options", RECIPE_OPTIONS + WEIGHTED_OPTIONS, ids=str)
def test_store_of_k_that_a_recipe_changes(options: dict, input_dtype: torch.dtype) -> None:
    """On every instruction set."""
    assert_stored_as_by_the_reference(cpu_store, options, input_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_store_by_weighted_error(name: str, dtype: torch.dtype) -> None:
    assert_stored_by_weights(cpu_store, CASES[name], dtype)


@pytest.mark.parametrize("layout", ["128", "64 NHD", "sm100"])
def test_store_by_weighted_error_is_of_each_token_alone(layout: str) -> None:
    assert_tokens_are_stored_alone(cpu_store, LAYOUTS[layout])
