"""Transforms of K: means, rotation, constants of first tokens."""

import pytest
import torch

from halfbyte.kvcache import read_tokens, reshape_and_cache
from halfbyte.kvcache.transform import MARK, MATCH_TOLERANCE, KVTransform
from halfbyte.layouts import PageLayout
from halfbyte.numerics import nvfp4, weighted_rounding
from halfbyte.numerics.hadamard import hadamard
from kvcache.transforms import SEGMENT, make_transform

HEADS, HEAD_SIZE, TOKENS = 2, 64, 50
K_SCALE, V_SCALE = 0.01, 0.004


def layout_of(order: str = "HND", k_dtype: str = "nvfp4_4over6") -> PageLayout:
    return PageLayout(k_dtype, "nvfp4_4over6", HEAD_SIZE, None, HEADS, 16, order)  # type: ignore[arg-type]


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, TOKENS, HEADS, HEAD_SIZE, generator=generator)
    return key.to(dtype), value.to(dtype)


def stored(
    key: torch.Tensor, value: torch.Tensor, layout: PageLayout, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages, and the slots of the tokens, which are at positions 0, 1, ..."""
    pages = torch.zeros(5, layout.page_bytes, dtype=torch.uint8)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(1))[: len(key)]
    reshape_and_cache(key, value, pages, slots, layout, K_SCALE, V_SCALE, **options)  # type: ignore[arg-type]
    return pages, slots


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_what_is_packed_is_nvfp4_of_what_is_left_of_k(
    order: str, rotate: bool, center: bool
) -> None:
    transform = make_transform(rotate=rotate, center=center, first_tokens=0)
    key, value = tensors()
    layout = layout_of(order)
    positions = torch.arange(TOKENS)
    pages, slots = stored(key, value, layout, transform=transform, positions=positions)
    left = key.clone()
    if center:
        assert transform.cos is not None
        assert transform.sin is not None
        assert transform.mean is not None
        for position in range(TOKENS):
            s = position // SEGMENT
            turned = transform.mean.roll(HEAD_SIZE // 2, -1)
            left[position] -= transform.cos[s] * transform.mean + transform.sin[s] * turned
    left = hadamard(left) if rotate else left
    data, scales = nvfp4.quantize(left, K_SCALE, "four_over_six")
    views = layout.views(pages)
    assert views.k_scale is not None
    assert torch.equal(views.k_data[slots // 16, slots % 16], data)
    assert torch.equal(views.k_scale[slots // 16, slots % 16], scales.view(torch.uint8))
    plain, _ = stored(key, value, layout)
    k_bytes = HEADS * 16 * (HEAD_SIZE // 2 + HEAD_SIZE // 16)
    assert torch.equal(pages[:, k_bytes:], plain[:, k_bytes:])  # V is not changed


@pytest.mark.parametrize("k_dtype", ["nvfp4", "nvfp4_4over6"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("feedback", [False, True])
def test_what_is_packed_is_rounded_by_weighted_error(
    k_dtype: str, weighted: bool, feedback: bool
) -> None:
    """K and V as by the oracle with each head's factors and weights; read back as usual."""
    transform = make_transform(first_tokens=0, weighted=weighted, feedback=feedback)
    key, value = tensors()
    layout, positions = layout_of(k_dtype=k_dtype), torch.arange(TOKENS)
    options = {"transform": transform, "positions": positions}
    pages, slots = stored(key, value, layout, **options)
    left = transform.forward(key, positions)
    recipe: nvfp4.Recipe = "amax6" if k_dtype == "nvfp4" else "four_over_six"
    expected_k = weighted_rounding.quantize(
        left, K_SCALE, transform.k_weights, transform.feedback, recipe
    )
    expected_v = weighted_rounding.quantize(value, V_SCALE, transform.v_weights)
    k, v = read_tokens(pages, slots, layout, K_SCALE, V_SCALE, **options)  # type: ignore[arg-type]
    unpacked = nvfp4.dequantize(*expected_k, K_SCALE)
    assert torch.equal(k, transform.inverse(unpacked, positions))
    assert torch.equal(v, nvfp4.dequantize(*expected_v, V_SCALE))
    assert transform.weighs_errors == (weighted or feedback)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_read_is_k(dtype: torch.dtype) -> None:
    transform = make_transform(first_tokens=0)
    key, value = tensors()
    layout, positions = layout_of(), torch.arange(TOKENS)
    pages, slots = stored(key, value, layout, transform=transform, positions=positions)
    options = {"transform": transform, "positions": positions}
    k, v = read_tokens(pages, slots, layout, K_SCALE, V_SCALE, dtype, **options)  # type: ignore[arg-type]
    assert k.dtype == v.dtype == dtype
    # The error is that of the transformed K: the inverse rotation preserves its norm.
    packed, plain_v = read_tokens(pages, slots, layout, K_SCALE, V_SCALE, dtype)
    error = packed - transform.forward(key, positions).to(dtype)
    torch.testing.assert_close((k - key).norm(dim=-1), error.norm(dim=-1), rtol=1e-3, atol=1e-4)
    assert torch.equal(v, plain_v)
    assert (k - key).norm() < 0.15 * key.norm() * 3  # means are thrice as large as K is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_tokens_that_are_known_are_read_exactly(dtype: torch.dtype) -> None:
    transform = make_transform(dtype=dtype)
    assert transform.first_keys is not None
    assert transform.first_values is not None
    layout = layout_of()
    for index in range(2):
        key, value = tensors(dtype)
        noise = 1 + 2**-8 * torch.randn(HEADS, HEAD_SIZE)
        key[0] = transform.first_keys[index] * noise  # as another order of sums gives it
        value[0] = transform.first_values[index]
        options = {"transform": transform, "positions": torch.arange(TOKENS)}
        pages, slots = stored(key, value, layout, **options)
        k, v = read_tokens(pages, slots, layout, K_SCALE, V_SCALE, **options)  # type: ignore[arg-type]
        assert torch.equal(k[0], transform.first_keys[index].float())
        assert torch.equal(v[0], transform.first_values[index].float())
        views = layout.views(pages)
        assert views.k_scale is not None
        page, offset = int(slots[0]) // 16, int(slots[0]) % 16
        assert views.k_scale[page, offset].tolist() == [[MARK, 0, 0, 0]] * HEADS
        assert views.k_data[page, offset].tolist() == [[index] + [0] * 31] * HEADS


@pytest.mark.parametrize(
    ("rotated", "alone", "pairs"), [(2, 0, 16), (32, 0, 16), (34, 0, 32), (64, 0, 32), (32, 17, 64)]
)
def test_pair_tables_give_products_with_the_means(rotated: int, alone: int, pairs: int) -> None:
    """Also of channels without RoPE; padded with zeros to a power of two, at least 16."""
    generator = torch.Generator().manual_seed(0)
    size = rotated + alone
    angles = torch.rand(3, rotated // 2, generator=generator)
    sin = torch.cat([-angles.sin(), angles.sin(), torch.zeros(3, alone)], 1)
    cos = torch.cat([angles.cos(), angles.cos(), torch.ones(3, alone)], 1)
    partner = torch.cat(
        [torch.arange(rotated).roll(rotated // 2), torch.arange(rotated, rotated + alone)]
    )
    mean = torch.randn(2, size, generator=generator)
    transform = KVTransform(False, 16, mean=mean, partner=partner, cos=cos, sin=sin)
    tables = transform.pair_tables
    assert tables is not None
    assert [table.shape[-1] for table in tables] == [pairs] * 6
    assert tables.low.dtype == tables.high.dtype == torch.int32
    q = torch.randn(2, size, generator=generator)
    low, high = q[:, tables.low], q[:, tables.high]
    straight = low * tables.low_mean + high * tables.high_mean
    crossed = low * tables.high_mean - high * tables.low_mean
    for segment in range(3):
        found = (tables.cos[segment] * straight + tables.sin[segment] * crossed).sum(-1)
        means = transform.means(torch.tensor([16 * segment]))
        assert means is not None
        torch.testing.assert_close(found, (q * means[0]).sum(-1))
    split = transform.split_angles
    assert split is not None
    assert split.shape == (3 + 15, pairs, 2)
    assert torch.equal(split[3:], split[2:3].expand(15, -1, -1))
    split = split[:3]
    # A word is two bfloat16 numbers: cosine and sine, rounded, and what is left of them.
    cosines, sines = split.view(torch.bfloat16).double().unflatten(-1, (2, 2)).sum(-2).unbind(-1)
    for found, exact in ((cosines, tables.cos), (sines, tables.sin)):
        torch.testing.assert_close(found, exact.double(), rtol=2.0**-16, atol=0.0)


def test_constants_match_within_the_tolerance() -> None:
    """K and V of one constant both, each within 2^-6 of its absmax; the first of equals."""
    keys, values = torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)
    keys[:2, :, 0], keys[2, :, 0], values[:, :, 1] = 1.0, -4.0, 2.0
    transform = KVTransform(rotate=False, segment=16, first_keys=keys, first_values=values)

    def found(key: float = 0.0, value: float = 0.0, index: int = 0) -> list[list[int]]:
        k, v = keys[index].clone(), values[index].clone()
        k[0, 5] += key
        v[0, 5] -= value
        return transform.match_first(k[None], v[None]).tolist()

    unit = MATCH_TOLERANCE
    assert found() == found(unit, 2 * unit) == found(index=1) == [[0, 0]]
    assert found(4 * unit, 2 * unit, index=2) == [[2, 2]]
    assert found(1.01 * unit) == found(value=2.02 * unit) == [[-1, 0]]
    assert found(4.04 * unit, index=2) == found(float("nan"), index=2) == [[-1, 2]]
    without = KVTransform(rotate=False, segment=16)
    assert without.match_first(keys, values).tolist() == [[-1, -1]] * 3


def test_constants_are_converted_once_per_dtype() -> None:
    keys, values = torch.randn(2, 3, 16), torch.randn(2, 3, 32).transpose(0, 1).contiguous()
    transform = KVTransform(False, 16, first_keys=keys, first_values=values.transpose(0, 1))
    transform.prepare()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = transform.first_tokens(dtype)
        assert found is not None
        assert found is transform.first_tokens(dtype)
        assert all(x.is_contiguous() and x.dtype == dtype for x in found)
        assert torch.equal(found[0], keys.to(dtype))
        assert torch.equal(found[1], values.transpose(0, 1).to(dtype))
    assert KVTransform(rotate=False, segment=16).first_tokens(torch.float16) is None


def test_other_first_tokens_are_packed_like_the_rest() -> None:
    """Also if only one head, or only K or V, is a constant: heads are marked separately."""
    transform = make_transform()
    assert transform.first_keys is not None
    assert transform.first_values is not None
    key, value = tensors()
    key[0, 0] = transform.first_keys[1, 0]  # V of this head is not
    key[0, 1], value[0, 1] = transform.first_keys[1, 1], transform.first_values[1, 1]
    key[7], value[7] = transform.first_keys[0], transform.first_values[0]  # not at position 0
    layout, positions = layout_of(), torch.arange(TOKENS)
    options = {"transform": transform, "positions": positions}
    pages, slots = stored(key, value, layout, **options)
    k, v = read_tokens(pages, slots, layout, K_SCALE, V_SCALE, **options)  # type: ignore[arg-type]
    assert torch.equal(k[0, 1], transform.first_keys[1, 1])
    assert torch.equal(v[0, 1], transform.first_values[1, 1])
    without = make_transform(first_tokens=0)
    others, slots = stored(key, value, layout, transform=without, positions=positions)
    options["transform"] = without
    k_other, v_other = read_tokens(others, slots, layout, K_SCALE, V_SCALE, **options)  # type: ignore[arg-type]
    assert torch.equal(k[0, 0], k_other[0, 0])
    assert torch.equal(k[1:], k_other[1:])
    assert torch.equal(v[0, 0], v_other[0, 0])
    assert torch.equal(v[1:], v_other[1:])


def test_padding_is_skipped_whatever_its_position() -> None:
    transform = make_transform()
    key, value = tensors()
    layout = layout_of()
    pages = torch.zeros(5, layout.page_bytes, dtype=torch.uint8)
    slots = torch.tensor([3, -1, 5])
    for padding in (0, -1, 10**6):
        positions = torch.tensor([70, padding, 71])
        again = pages.clone()
        options = {"transform": transform, "positions": positions}
        reshape_and_cache(key, value, again, slots, layout, K_SCALE, V_SCALE, **options)  # type: ignore[arg-type]
        k, _ = read_tokens(
            again,
            slots[[0, 2]],
            layout,
            K_SCALE,
            V_SCALE,
            transform=transform,
            positions=positions[[0, 2]],
        )
        assert k.isfinite().all()


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (None, "a recipe other than plain needs them"),
        (torch.arange(3), r"expected int64 \(50,\), got torch.int64 \(3,\)"),
        (torch.arange(TOKENS, dtype=torch.int32), "got torch.int32"),
        (torch.arange(TOKENS) + 100, "expected 0 up to 127, for which the calibration has means"),
        (torch.arange(TOKENS) - 1, "got -1 up to 48"),
    ],
)
def test_positions_that_cannot_be_are_refused(positions: torch.Tensor | None, message: str) -> None:
    key, value = tensors()
    with pytest.raises(ValueError, match=f"positions: .*{message}"):
        stored(key, value, layout_of(), transform=make_transform(), positions=positions)
