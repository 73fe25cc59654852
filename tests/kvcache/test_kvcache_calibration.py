"""A calibration and its file: a round trip is exact, and other files are refused."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfbyte.kvcache import KVRecipe, KVScales
from halfbyte.kvcache.calibration import ErrorCosts, KVCalibration, RopeAverages
from halfbyte.kvcache.identity import pages_identity
from halfbyte.kvcache.recipe import RECIPES
from halfbyte.layouts import KVCacheDType
from halfbyte.numerics.hadamard import hadamard
from kvcache.transforms import make_calibration, make_moment, without_costs

UNWEIGHTED = replace(RECIPES["balanced"], weighted_scales=False)
"""`balanced` without weighted errors, for calibrations without costs of errors."""


def make_scales(calibration: KVCalibration | None) -> KVScales:
    return KVScales((3.0, 2.0, 1.0), (1.0, 1.0, 1.0), "test", calibration)


def test_calibration_comes_back_from_its_file(tmp_path: Path) -> None:
    scales = make_scales(make_calibration())
    path = scales.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "kv_scales.calibration",
        "kv_scales.json",
    ]
    loaded = KVScales.load_file(path)
    assert loaded == scales
    assert hash(loaded) == hash(scales)
    assert loaded.calibration is not None
    assert loaded.calibration.first_tokens == (1, 17)
    assert loaded.calibration.layers[2].k_amax == (9.0, 6.0, 5.0, 4.0)
    first = loaded.calibration.layers[1].first_keys
    assert first.dtype == torch.bfloat16
    assert loaded != make_scales(make_calibration(1))
    assert loaded != make_scales(None)


def test_files_are_read_whatever_the_default_device(tmp_path: Path) -> None:
    """An engine may set the GPU as default device while it makes layers."""
    scales = make_scales(make_calibration())
    path = scales.save(tmp_path)
    (tmp_path / "again").mkdir()
    transform = make_calibration().transform(0, RECIPES["balanced"])
    expected = transform.pair_tables
    transform = make_calibration().transform(0, RECIPES["balanced"])
    with torch.device("meta"):
        loaded = KVScales.load_file(path)
        found = transform.pair_tables
        again = scales.save(tmp_path / "again")
    assert loaded == scales
    assert KVScales.load_file(again) == scales
    assert expected is not None
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_recipes_take_what_they_need() -> None:
    calibration = make_calibration()
    balanced = RECIPES["balanced"]
    assert calibration.amax(0, balanced) == (4.0, 0.1)
    assert calibration.amax(0, KVRecipe(rotate=True)) == (6.0, 0.1)
    assert calibration.amax(0, KVRecipe(center=True)) == (5.0, 0.1)
    transform = calibration.transform(1, balanced)
    assert transform.rotate
    assert transform.segment == 64
    assert transform.max_position == 5 * 64
    assert transform.cos is calibration.ropes[1].cos
    assert transform.partner is not None
    assert transform.partner.tolist() == [*range(16, 32), *range(16)]
    turned = calibration.transform(1, KVRecipe(rotate=True))
    assert turned.mean is None
    assert turned.first_keys is None
    assert turned.max_position is None


def test_recipes_that_weigh_errors_take_factors_and_weights() -> None:
    calibration = make_calibration()
    costs = calibration.layers[1].costs
    assert costs is not None
    accurate = RECIPES["accurate"]
    for rotate in (False, True):
        transform = calibration.transform(1, replace(accurate, rotate=rotate), heads=slice(1, 2))
        assert transform.weighs_errors
        assert transform.feedback is not None
        assert transform.k_weights is not None
        assert transform.v_weights is not None
        rows, columns = torch.triu_indices(32, 32, offset=1)
        assert torch.equal(transform.feedback[:, rows, columns], costs.factors[int(rotate), 1:])
        assert not transform.feedback.tril().any()
        assert torch.equal(transform.k_weights, costs.k_weights[int(rotate), 1:])
        assert torch.equal(transform.v_weights, costs.v_weights[1:])
    only = calibration.transform(1, KVRecipe(feedback=True))
    assert only.feedback is not None
    assert only.k_weights is only.v_weights is only.mean is None
    only = calibration.transform(1, KVRecipe(weighted_scales=True))
    assert only.feedback is None
    assert only.k_weights is not None
    balanced = calibration.transform(1, RECIPES["balanced"])
    assert balanced.feedback is None
    assert balanced.k_weights is not None
    assert torch.equal(balanced.k_weights, costs.k_weights[1])
    assert not calibration.transform(1, UNWEIGHTED).weighs_errors
    assert calibration.amax(1, accurate) == calibration.amax(1, RECIPES["balanced"])


def test_costs_of_rotated_k_are_those_of_rotated_queries() -> None:
    """K' H and q H have the same products as K' and q."""
    generator = torch.Generator().manual_seed(5)
    moment = make_moment(3, 96, generator)
    energy = torch.rand(3, 16, generator=generator).double()
    costs = ErrorCosts.of(moment, energy)
    turn = hadamard(torch.eye(96, dtype=torch.float64))
    turned = ErrorCosts.of(turn @ moment @ turn, energy)
    torch.testing.assert_close(costs.factors[1], turned.factors[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(costs.k_weights[1], turned.k_weights[0])
    assert not torch.allclose(costs.k_weights[0], costs.k_weights[1])


def test_recipes_that_weigh_errors_refuse_older_calibrations(tmp_path: Path) -> None:
    path = make_scales(without_costs(make_calibration())).save(tmp_path)
    scales = KVScales.load_file(path)
    assert scales.calibration is not None
    assert not scales.calibration.has_costs
    assert scales.suits(RECIPES["plain"])
    assert scales.suits(UNWEIGHTED)
    assert scales.calibration_for(UNWEIGHTED) is scales.calibration
    for name in ("balanced", "accurate"):
        assert not scales.suits(RECIPES[name])
        message = rf"kv_recipe {name}: .* scales from test is older; `halfbyte calibrate` measures"
        with pytest.raises(ValueError, match=message):
            scales.calibration_for(RECIPES[name])
    assert make_scales(make_calibration()).suits(RECIPES["balanced"])
    assert not make_scales(None).suits(UNWEIGHTED)
    assert scales.calibration.sha256() != make_calibration().sha256()


def test_file_with_another_sibling_is_refused(tmp_path: Path) -> None:
    path = make_scales(make_calibration()).save(tmp_path)
    sibling = tmp_path / "kv_scales.calibration"
    other = tmp_path / "other"
    other.mkdir()
    make_scales(make_calibration(1)).save(other)
    sibling.write_bytes((other / sibling.name).read_bytes())
    with pytest.raises(ValueError, match=r"kv_scales.json: .*kv_scales.calibration .* another"):
        KVScales.load_file(path)
    sibling.unlink()  # as of a file that was copied alone
    alone = KVScales.load_file(path)
    assert (alone.k_amax, alone.calibration) == (make_scales(None).k_amax, None)
    sibling.write_bytes((other / sibling.name).read_bytes())
    make_scales(None).save(tmp_path)  # names no sibling, and needs none
    assert KVScales.load_file(path).calibration is None
    assert not sibling.exists()
    sibling.write_bytes(b"weights")
    make_scales(None).save(tmp_path)
    assert sibling.read_bytes() == b"weights"
    alone.save_file(other / sibling.name)  # its own name is no sibling's
    assert KVScales.load_file(other / sibling.name).calibration is None


def test_calibration_replaces_no_other_file(tmp_path: Path) -> None:
    scales = make_scales(make_calibration())
    scales.save(tmp_path)
    scales.save(tmp_path)  # its own again
    other = tmp_path / "model.calibration"
    other.write_bytes(b"weights")
    for name, reason in (("model.json", "exists and is not"), ("model.calibration", "expected a")):
        with pytest.raises(ValueError, match=rf"model\.calibration: {reason}"):
            scales.save_file(tmp_path / name)
    assert other.read_bytes() == b"weights"
    assert not (tmp_path / "model.json").exists()
    assert not list(tmp_path.glob("*.safetensors"))  # which loaders take for weights


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 100, bytes(16)], ids=len)
def test_what_is_no_calibration_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no calibration"):
        KVCalibration.from_bytes(data)


COSTS = ErrorCosts.of(torch.eye(32).double().repeat(2, 1, 1), torch.ones(2, 16).double())


@pytest.mark.parametrize(
    "change",
    [
        {"mean": torch.full((2, 32), torch.nan)},
        {"mean": torch.zeros(2, 16)},
        {"v_amax": 0.0},
        {"k_amax": (1.0, -1.0, 1.0, 1.0)},
        {"first_keys": torch.zeros(1, 2, 32)},
        {"first_values": torch.zeros(2, 3, 16)},
        {"costs": replace(COSTS, factors=COSTS.factors[:, :, 1:])},
        {"costs": replace(COSTS, factors=COSTS.factors / 0)},
        {"costs": replace(COSTS, factors=COSTS.factors.double())},
        {"costs": replace(COSTS, k_weights=COSTS.k_weights[:, :, 1:])},
        {"costs": replace(COSTS, k_weights=COSTS.k_weights / 0)},
        {"costs": replace(COSTS, v_weights=COSTS.v_weights[:, 1:])},
        {"costs": replace(COSTS, k_weights=0 * COSTS.k_weights)},
        {"costs": replace(COSTS, v_weights=-COSTS.v_weights)},
        {"costs": replace(COSTS, v_weights=COSTS.v_weights.double())},
    ],
    ids=lambda change: next(iter(change)),
)
def test_numbers_that_cannot_be_are_refused(change: dict) -> None:
    calibration = make_calibration()
    broken = replace(calibration.layers[1], **change)
    layers = (calibration.layers[0], broken, calibration.layers[2])
    with pytest.raises(ValueError, match="no calibration"):
        KVCalibration.from_bytes(replace(calibration, layers=layers).to_bytes())


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"partner": torch.tensor([1, 2, 0, 3])}, False),  # no pairs
        ({"cos": torch.tensor([[0.5, 0.4, 1, 1]])}, False),
        ({"sin": torch.tensor([[0.5, 0.5, 0, 0]])}, False),
        ({"sin": torch.tensor([[0.5, -0.5, 0.1, 0]])}, False),  # of a channel without a partner
    ],
)
def test_rotary_embeddings_turn_pairs(change: dict[str, torch.Tensor], good: bool) -> None:
    cos, sin = torch.tensor([[0.5, 0.5, 1, 1]]), torch.tensor([[0.5, -0.5, 0, 0]])
    averages = RopeAverages(cos, sin, torch.tensor([1, 0, 2, 3]))
    assert replace(averages, **change).turns_pairs() == good


def test_scales_and_calibration_have_the_same_layers() -> None:
    with pytest.raises(ValueError, match="3 layers, and a calibration of 2"):
        make_scales(make_calibration(layers=2))


def test_identity_of_pages_knows_recipe_and_calibration() -> None:
    scales, others = (make_scales(make_calibration(seed)) for seed in (0, 1))
    balanced = RECIPES["balanced"]
    identities = [
        pages_identity("nvfp4", "nvfp4", scales),
        pages_identity("nvfp4", "nvfp4", scales, balanced),
        pages_identity("nvfp4", "nvfp4", others, balanced),
        pages_identity("nvfp4", "nvfp4", scales, replace(balanced, rotate=False)),
        pages_identity("nvfp4", "nvfp4", scales, RECIPES["accurate"]),
        pages_identity("nvfp4", "nvfp4", scales, UNWEIGHTED),
    ]
    assert len(set(identities)) == 6
    assert pages_identity("nvfp4", "nvfp4", others) == identities[0]
    assert pages_identity("nvfp4", "nvfp4", make_scales(None), KVRecipe()) == identities[0]


def test_recipes_have_names() -> None:
    for name in RECIPES:
        assert KVRecipe.parse(name).name == name
    assert KVRecipe(center=True, rotate=True).name == "center+rotate"
    assert RECIPES["balanced"].of_pages.name.endswith("+four_over_six+weighted_scales")
    assert RECIPES["accurate"].of_pages.name.endswith("+four_over_six+feedback+weighted_scales")
    for recipe in (KVRecipe(weighted_scales=True), RECIPES["accurate"]):
        assert recipe.format_of(KVCacheDType.NVFP4) == KVCacheDType.NVFP4_4OVER6
    assert KVRecipe(feedback=True).format_of(KVCacheDType.NVFP4) == KVCacheDType.NVFP4
    with pytest.raises(ValueError, match="unknown 'best'; expected one of plain, balanced, acc"):
        KVRecipe.parse("best")


@pytest.mark.parametrize(
    ("own", "ranks", "fits"),
    [(2, 1, True), (1, 2, True), (1, 4, True), (1, 1, False), (2, 2, False), (1, 3, False)],
)
def test_calibrations_of_other_heads_are_refused(own: int, ranks: int, fits: bool) -> None:
    """`own` KV heads of each rank; the calibration has two of 64."""
    scales = make_scales(make_calibration())
    total, size = make_calibration().layers[0].mean.shape
    assert total == 2
    with nullcontext() if fits else pytest.raises(ValueError, match="calibration for 2 KV heads"):
        scales.check_heads(0, own, size, ranks)
    with pytest.raises(ValueError, match="calibration for 2 KV heads"):
        scales.check_heads(0, own, size + 16, ranks)
    with pytest.raises(ValueError, match="no layer 99"):
        scales.check_heads(99, own, size, ranks)
