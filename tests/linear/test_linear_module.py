"""`NvFp4Linear`: both dialects in and out, parts, handing weights over and taking them back."""

import copy
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfbyte.checkpoints.dialects import TENSOR_NAMES, CheckpointError, Dialect
from halfbyte.linear import (
    LINEAR_BACKENDS,
    NvFp4Linear,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
)
from halfbyte.linear.reference import ReferenceKernel
from halfbyte.numerics import nvfp4
from linear.cases import assert_close_enough, random_input, random_layer

DIALECT = pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
OTHER: dict[Dialect, Dialect] = {
    "modelopt": "compressed-tensors",
    "compressed-tensors": "modelopt",
}
# Neither for this x nor for 3 x is 1 / (1 / x) the same float32.
STUBBORN = 0.0303751328912064


class RowsReversedKernel(ReferenceKernel):
    """Keeps the rows in reverse order under names of its own, as a repacking kernel would."""

    name: ClassVar[str] = "rows_reversed"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for name in ("weight", "weight_scale"):
            rows = layer.get_parameter(name).view(torch.uint8).flip(0)
            delattr(layer, name)
            layer.register_parameter(f"packed_{name}", nn.Parameter(rows, requires_grad=False))
        del layer.weight_global_scale
        setattr(layer, "weights_padding_cols", 8)  # noqa: B010 (mypy takes it for a tensor)

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        weight, scales = (layer.get_parameter(f"packed_{n}") for n in ("weight", "weight_scale"))
        return weight.flip(0), scales.flip(0).view(torch.float8_e4m3fn)

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        plain = nn.Module()
        plain.weight, plain.weight_scale = (
            nn.Parameter(tensor, requires_grad=False) for tensor in self.restore_weights(layer)
        )
        plain.alpha, plain.input_global_scale = layer.alpha, layer.input_global_scale
        return super().apply_weights(plain, x, bias)


class OneWayKernel(RowsReversedKernel):
    """A repacking kernel that cannot go back."""

    name: ClassVar[str] = "one_way"
    restore_weights = NvFp4LinearKernel.restore_weights


@pytest.fixture
def repacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels that repack, by name."""
    for kernel in (RowsReversedKernel, OneWayKernel):
        monkeypatch.setitem(LINEAR_BACKENDS._targets, kernel.name, f"here:{kernel.__name__}")
        monkeypatch.setitem(LINEAR_BACKENDS._loaded, kernel.name, kernel)


def file_of(layer: NvFp4Linear, dialect: Dialect, *, w4a4: bool = False) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint whose scales have no exact reciprocal."""
    names = TENSOR_NAMES[dialect]
    shape = () if names.global_scale_is_decode else (1,)
    tensors = {
        names.weight: layer.weight.detach().clone(),
        names.weight_scale: layer.weight_scale.detach().clone(),
        names.weight_global_scale: torch.full(shape, STUBBORN),
    }
    if w4a4:
        tensors[names.input_global_scale] = torch.full(shape, 3 * STUBBORN)
    if layer.bias is not None:
        tensors["bias"] = layer.bias.detach().clone()
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        bits = torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype
        assert torch.equal(found[name].view(bits), tensor.view(bits)), name


def empty(dialect: Dialect = "modelopt", **options: object) -> NvFp4Linear:
    arguments: dict = {"bias": False, "dtype": torch.float32, "backend": "reference", **options}
    return NvFp4Linear(64, 32, dialect=dialect, **arguments)


def test_stubborn_is_stubborn() -> None:
    for scale in (torch.tensor(STUBBORN), torch.tensor(3 * STUBBORN)):
        assert 1 / (1 / scale) != scale


@DIALECT
@pytest.mark.parametrize("w4a4", [False, True], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("backend", ["reference", "rows_reversed"])
@pytest.mark.usefixtures("repacking")
def test_saving_gives_back_the_files_bits(
    dialect: Dialect, w4a4: bool, assign: bool, backend: str
) -> None:
    source = random_layer(32, 64, bias=True)
    tensors = file_of(source, dialect, w4a4=w4a4)
    layer = empty(dialect, bias=True, quantize_activations=w4a4, backend=backend)
    layer.load_state_dict(tensors, assign=assign)
    assert_same(dict(layer.state_dict()), tensors)
    before = layer(random_input(3, 64))
    assert layer.is_processed
    assert_same(dict(layer.state_dict()), tensors)
    again = empty(dialect, bias=True, quantize_activations=w4a4)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(random_input(3, 64)), before)


@DIALECT
def test_loading_either_dialect_gives_the_same_layer(dialect: Dialect) -> None:
    source = random_layer(32, 64)
    tensors = file_of(source, dialect, w4a4=True)
    layer = empty(OTHER[dialect], quantize_activations=True)
    layer.load_state_dict(tensors)
    layer.process_weights_after_loading()
    scale = torch.tensor(STUBBORN)
    decode = scale if dialect == "modelopt" else 1 / scale
    assert torch.equal(layer.weight_global_scale, decode.reshape(1))
    names = TENSOR_NAMES[OTHER[dialect]]
    saved = layer.state_dict()
    assert torch.equal(saved[names.weight_global_scale].reshape(()), 1 / scale)
    assert saved[names.input_global_scale].shape == (() if names.global_scale_is_decode else (1,))
    layer.dialect = dialect
    assert_same(dict(layer.state_dict()), tensors)


def test_attributes_after_loading() -> None:
    layer = random_layer(
        48, 64, bias=True, part_sizes=(32, 16), quantize_activations=True, backend="reference"
    )
    layer.process_weights_after_loading()
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.shape == (48, 32)
    assert layer.weight_scale.dtype == torch.float8_e4m3fn
    assert layer.weight_scale.shape == (48, 4)
    assert layer.weight_global_scale.shape == layer.alpha.shape == (2,)
    assert layer.input_global_scale is not None
    assert layer.input_global_scale_inv is not None
    assert torch.equal(layer.alpha, layer.weight_global_scale * layer.input_global_scale)
    assert torch.equal(layer.input_global_scale_inv, 1 / layer.input_global_scale)
    assert layer.weights_padding_cols == 0
    assert layer.part_sizes == (32, 16)
    assert not any(p.requires_grad for p in layer.parameters())
    w4a16 = random_layer(48, 64, backend="reference")
    w4a16.process_weights_after_loading()
    assert w4a16.input_global_scale is None
    assert w4a16.input_global_scale_inv is None
    assert torch.equal(w4a16.alpha, w4a16.weight_global_scale)


def test_encode_scale_of_a_file_is_not_recomputed() -> None:
    source = random_layer(32, 64)
    layer = empty(quantize_activations=True)
    layer.load_state_dict(file_of(source, "compressed-tensors", w4a4=True))
    layer.process_weights_after_loading()
    assert layer.input_global_scale_inv is not None
    assert layer.input_global_scale_inv == torch.tensor(3 * STUBBORN)


def test_w4a16_of_a_w4a4_file_keeps_the_input_scale_for_saving() -> None:
    tensors = file_of(random_layer(32, 64), "modelopt", w4a4=True)
    layer = empty()
    layer.load_state_dict(tensors)
    assert layer.input_global_scale is None
    assert_same(dict(layer.state_dict()), tensors)


def test_scale_written_into_the_layer_is_what_gets_saved() -> None:
    layer = empty()
    layer.load_state_dict(file_of(random_layer(32, 64), "modelopt"))
    layer.weight_global_scale.data.fill_(0.5)
    assert layer.state_dict()["weight_scale_2"] == 0.5


@DIALECT
def test_from_float_survives_its_dialects_file(dialect: Dialect) -> None:
    """Quantized with the very scale that a reader of the file will have."""
    layer = random_layer(32, 64, dialect=dialect, quantize_activations=True)
    again = empty(dialect, quantize_activations=True)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.weight_global_scale, layer.weight_global_scale)
    assert torch.equal(again.dequantize(), layer.dequantize())


@pytest.mark.parametrize("recipe", nvfp4.RECIPES)
def test_from_float_is_the_oracles_quantization(recipe: nvfp4.Recipe) -> None:
    linear = nn.Linear(64, 1100, dtype=torch.bfloat16)
    layer = NvFp4Linear.from_float(linear, recipe=recipe, part_sizes=(600, 500))
    assert layer.dtype == torch.bfloat16
    for rows, stored in ((slice(0, 600), 0), (slice(600, None), 1)):
        part = linear.weight.detach()[rows]
        scale = nvfp4.global_scale_from_amax(part.abs().amax().float(), recipe)
        data, scales = nvfp4.quantize(part, scale, recipe)
        assert torch.equal(layer.weight_global_scale[stored], scale)
        assert torch.equal(layer.weight[rows], data)
        assert torch.equal(layer.weight_scale.view(torch.uint8)[rows], scales.view(torch.uint8))
    with pytest.raises(ValueError, match="input_amax: W4A4 needs"):
        NvFp4Linear.from_float(linear, quantize_activations=True)


@pytest.mark.parametrize("w4a4", [False, True], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("backend", ["reference", "rows_reversed"])
@pytest.mark.usefixtures("repacking")
def test_fused_parts_give_what_the_parts_give(w4a4: bool, backend: str) -> None:
    parts = [
        random_layer(
            n, 128, bias=n != 16, seed=n, quantize_activations=w4a4, backend=backend,
            dialect="compressed-tensors",
        )
        for n in (64, 16, 32)
    ]  # fmt: skip
    for index, part in enumerate(parts):  # scales far apart, which `max()` would lose
        encode = part._stored_scale("weight_global_scale").value
        part.load_tensors({"weight_global_scale": encode * 30.0**index})
    parts[1].process_weights_after_loading()
    fused = NvFp4Linear.from_parts(parts)
    assert fused.part_sizes == (64, 16, 32)
    assert fused.backend == backend
    x = random_input(9, 128)
    assert_close_enough(fused, x, fused(x), torch.float32)
    assert torch.allclose(fused(x), torch.cat([part(x) for part in parts], -1), rtol=1e-5)
    saved = fused.state_dict()
    expected = torch.cat([part.state_dict()["weight_global_scale"] for part in parts])
    assert torch.equal(saved["weight_global_scale"], expected)
    again = NvFp4Linear(
        128, 112, part_sizes=(64, 16, 32), quantize_activations=w4a4, dtype=torch.float32,
        backend="reference",
    )  # fmt: skip
    again.load_state_dict(saved)
    assert torch.equal(again(x), fused(x))


def test_parts_share_one_scale_of_a_file_that_has_one() -> None:
    layer = empty(part_sizes=(16, 16))
    layer.load_state_dict(file_of(random_layer(32, 64), "modelopt"))
    assert torch.equal(layer.weight_global_scale, torch.full((2,), STUBBORN))
    assert layer.state_dict()["weight_scale_2"].shape == ()


def test_parts_that_cannot_be_one_layer() -> None:
    a = random_layer(16, 32, quantize_activations=True)
    b = random_layer(16, 32, quantize_activations=True)
    b.load_tensors({"input_scale": torch.tensor(0.5)})
    with pytest.raises(ValueError, match="input_global_scale differs"):
        NvFp4Linear.from_parts([a, b])
    with pytest.raises(ValueError, match="in_features differs: 32, 64"):
        NvFp4Linear.from_parts([a, random_layer(16, 64, quantize_activations=True)])
    with pytest.raises(ValueError, match="quantize_activations differs"):
        NvFp4Linear.from_parts([a, random_layer(16, 32)])
    with pytest.raises(ValueError, match="at least one"):
        NvFp4Linear.from_parts([])


@DIALECT
@pytest.mark.parametrize("role", ["weight_scale", "weight_global_scale", "input_global_scale"])
def test_scale_that_was_never_loaded_is_an_error(dialect: Dialect, role: str) -> None:
    names = TENSOR_NAMES[dialect]
    tensors = file_of(random_layer(32, 64), dialect, w4a4=True)
    missing = getattr(names, role)
    del tensors[missing]
    model = nn.Sequential(empty(dialect, quantize_activations=True))
    state = {f"0.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError, match=f'Missing key.*"0.{missing}"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == [f"0.{missing}"]
    with pytest.raises(CheckpointError, match=rf"^0\.{missing}: expected .*it was never loaded$"):
        model(random_input(1, 64))


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("weight_scale", lambda t: t.view(torch.uint8)[3, 1:3].fill_(0x7F), "found 2 NaN of 128"),
        ("weight_scale", lambda t: t.view(torch.uint8)[0, 0].fill_(0xB8), "1 of 128 with a sign"),
        ("weight_scale_2", lambda t: t.fill_(torch.nan), "found NaN only: it was never loaded"),
        ("weight_scale_2", lambda t: t.fill_(torch.inf), r"found the decode multiplier \[inf\]"),
        ("weight_scale_2", lambda t: t.fill_(-1), r"found the decode multiplier \[-1.0\]"),
        ("input_scale", lambda t: t.fill_(0), "found the decode multiplier 0.0"),
        ("input_scale", lambda t: t.fill_(torch.nan), "found NaN only"),
    ],
)
def test_scale_that_is_not_a_scale(
    name: str, spoil: Callable[[torch.Tensor], None], message: str
) -> None:
    tensors = file_of(random_layer(32, 64), "modelopt", w4a4=True)
    spoil(tensors[name])
    layer = empty(quantize_activations=True)
    layer.load_state_dict(tensors)
    with pytest.raises(CheckpointError, match=f"^{name}: expected .*{message}") as error:
        layer.process_weights_after_loading()
    assert "\n" not in str(error.value)


def test_all_zero_weight_is_no_error() -> None:
    tensors = file_of(random_layer(32, 64), "modelopt")
    tensors["weight_scale_2"].zero_()
    layer = empty()
    layer.load_state_dict(tensors)
    assert not layer(random_input(2, 64)).any()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("weight", torch.zeros(32, 64), r"expected uint8 \[32, 32\], found float32 \[32, 64\]"),
        ("weight", torch.zeros(32, 32).to(torch.float8_e4m3fn), "found float8_e4m3fn"),
        ("weight_scale", torch.zeros(32, 2).to(torch.float8_e4m3fn), r"\[32, 4\], found .*2\]"),
        ("weight_scale", torch.zeros(32, 4), r"float8_e4m3fn \[32, 4\], found float32"),
        ("weight_scale_2", torch.zeros(2), r"with 1 elements, found float32 \[2\]"),
        ("weight_scale_2", torch.zeros(1).to(torch.uint8), "found uint8"),
        ("bias", torch.zeros(31), r"expected float \[32\], found float32 \[31\]"),
    ],
)
def test_tensor_that_does_not_fit_changes_nothing(
    name: str, tensor: torch.Tensor, message: str
) -> None:
    source = random_layer(32, 64, bias=True)
    layer = empty(bias=True)
    layer.load_state_dict(file_of(source, "modelopt"))
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    other = file_of(random_layer(32, 64, bias=True, seed=9), "modelopt") | {name: tensor}
    with pytest.raises(RuntimeError, match=f"{name}: .*{message}"):
        layer.load_state_dict(other)
    with pytest.raises(CheckpointError, match=f"^{name}: .*{message}"):
        layer.load_tensors(other)
    assert_same(dict(layer.state_dict()), before)


def test_tensors_of_two_dialects_or_of_none() -> None:
    tensors = file_of(random_layer(32, 64), "modelopt")
    with pytest.raises(CheckpointError, match="expected the tensors of one dialect, found weight"):
        empty().load_tensors({**tensors, "weight_packed": tensors["weight"]})
    with pytest.raises(CheckpointError, match=r"^pre_quant_scale: expected one of weight, "):
        empty().load_tensors({**tensors, "pre_quant_scale": torch.ones(64)})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"pre_quant_scale"'):
        empty().load_state_dict({**tensors, "pre_quant_scale": torch.ones(64)})


def test_tensors_may_come_in_pieces() -> None:
    tensors = file_of(random_layer(32, 64), "compressed-tensors")
    layer = empty("compressed-tensors")
    for name, tensor in tensors.items():
        layer.load_tensors({name: tensor}, "compressed-tensors")
    assert_same(dict(layer.state_dict()), tensors)


def test_meta_device() -> None:
    with torch.device("meta"):
        layer = NvFp4Linear(64, 32, bias=False, dtype=torch.float32, backend="reference")
    assert all(p.is_meta for p in layer.parameters())
    assert layer.state_dict()["weight_scale"].shape == (32, 4)
    tensors = file_of(random_layer(32, 64), "modelopt")
    with pytest.raises(
        CheckpointError, match=r"^weight: expected a tensor, found none: it was never"
    ):
        layer.process_weights_after_loading()
    with pytest.raises(RuntimeError, match="assign=True"):
        layer.load_state_dict(tensors)
    elsewhere = copy.deepcopy(layer)
    scales = {name: tensors.pop(name) for name in ("weight_scale", "weight_scale_2")}
    elsewhere.load_tensors(tensors)
    with pytest.raises(CheckpointError, match=r"^weight_scale: .*never loaded"):
        elsewhere.process_weights_after_loading()
    tensors |= scales
    elsewhere.load_state_dict(tensors, assign=True)
    assert not any(p.is_meta for p in elsewhere.parameters())
    layer.to_empty(device="cpu")
    with pytest.raises(CheckpointError, match="never loaded"):
        layer.process_weights_after_loading()
    layer.load_state_dict(tensors)
    x = random_input(2, 64)
    assert torch.equal(layer(x), elsewhere(x))


@pytest.mark.parametrize("backend", ["reference", "rows_reversed"])
@pytest.mark.usefixtures("repacking")
def test_cast_keeps_codes_and_scales(backend: str) -> None:
    layer = random_layer(32, 64, bias=True, quantize_activations=True, backend=backend)
    before = dict(copy.deepcopy(layer).state_dict())
    layer(random_input(2, 64))
    model = nn.Sequential(layer).to(torch.bfloat16)
    assert not layer.is_processed
    assert layer.dtype == torch.bfloat16
    x = random_input(5, 64, torch.bfloat16)
    assert_close_enough(layer, x, model(x))
    assert_same(dict(layer.state_dict()), before | {"bias": before["bias"].bfloat16()})
    kernel = layer.kernel
    model.to(torch.bfloat16)  # nothing to do: the kernel keeps the weights
    assert layer.kernel is kernel
    with pytest.raises(ValueError, match="expected float16, bfloat16 or float32, got"):
        model.double()


@pytest.mark.usefixtures("repacking")
def test_processed_layer_can_be_loaded_anew_and_copied() -> None:
    layer = random_layer(32, 64, backend="rows_reversed")
    x = random_input(3, 64)
    layer(x)
    assert not hasattr(layer, "weight")
    twin = copy.deepcopy(layer)
    other = random_layer(32, 64, seed=7, backend="reference")
    layer.load_state_dict(other.state_dict())
    assert layer.weights_padding_cols == 0
    assert not hasattr(layer, "packed_weight")
    assert torch.equal(layer(x), other(x))
    assert not torch.equal(twin(x), other(x))


@pytest.mark.usefixtures("repacking")
def test_inference_mode_leaves_tensors_that_can_be_written() -> None:
    layer = random_layer(32, 64, backend="rows_reversed")
    with torch.inference_mode():
        layer(random_input(3, 64))
        layer.unprocess_weights()
    assert not any(p.is_inference() for p in layer.parameters())


@pytest.mark.usefixtures("repacking")
def test_kernel_without_a_way_back_is_named_when_saving() -> None:
    layer = random_layer(32, 64, backend="one_way")
    layer.state_dict()
    layer.process_weights_after_loading()
    with pytest.raises(RuntimeError, match="linear backend 'one_way' cannot give back"):
        layer.state_dict()
    with pytest.raises(RuntimeError, match="linear backend 'one_way' cannot give back"):
        layer.half()


def test_input_that_does_not_fit() -> None:
    layer = random_layer(32, 64, backend="reference")
    with pytest.raises(
        ValueError, match=r"expected float32 \[..., 64\] on cpu, got float32 \[2, 6"
    ):
        layer(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="got bfloat16"):
        layer(torch.zeros(2, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="on meta"):
        layer(torch.zeros(2, 64, device="meta"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_features": 40}, "k a positive multiple of 16"),
        ({"part_sizes": (8, 8)}, "sum to n=32"),
        ({"dtype": torch.float64}, "dtype: expected float16"),
        ({"dialect": "gguf"}, "dialect: expected one of modelopt, compressed-tensors, got 'gguf'"),
    ],
    ids=["k", "parts", "dtype", "dialect"],
)
def test_impossible_layers(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NvFp4Linear(**{"in_features": 64, "out_features": 32, **options})


def test_stands_in_for_nn_linear() -> None:
    linear = nn.Linear(64, 32)
    layer = NvFp4Linear.from_float(linear, backend="reference")
    x = random_input(10, 64)
    error = (layer(x) - linear(x)).norm() / linear(x).norm()
    assert error < 0.12  # 4 bits
    assert torch.allclose(layer(x), F.linear(x, layer.dequantize(), linear.bias), atol=1e-5)
    assert "in_features=64, out_features=32, bias=True, W4A16" in repr(layer)
    assert layer.config() == NvFp4LinearLayerConfig(
        32, 64, torch.float32, has_bias=True, part_sizes=(32,)
    )
