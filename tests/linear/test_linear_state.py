"""The state of `NvFp4Linear`: reading and writing both dialects, errors, layers on meta."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.linear import NvFp4Linear
from linear.cases import random_input, random_layer
from linear.files import STUBBORN, assert_same, empty, file_of

DIALECT = pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
OTHER: dict[Dialect, Dialect] = {
    "modelopt": "compressed-tensors",
    "compressed-tensors": "modelopt",
}


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
    assert layer.kernel is not None
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
    """The weight is quantized with exactly the decode scale that a reader of the file computes."""
    layer = random_layer(32, 64, dialect=dialect, quantize_activations=True)
    again = empty(dialect, quantize_activations=True)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.weight_global_scale, layer.weight_global_scale)
    assert torch.equal(again.dequantize(), layer.dequantize())


def test_parts_share_one_scale_of_a_file_that_has_one() -> None:
    layer = empty(part_sizes=(16, 16))
    layer.load_state_dict(file_of(random_layer(32, 64), "modelopt"))
    assert torch.equal(layer.weight_global_scale, torch.full((2,), STUBBORN))
    assert layer.state_dict()["weight_scale_2"].shape == ()


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
    with pytest.raises(CheckpointError, match=rf"^0\.{missing}: expected .*: never loaded, or"):
        model(random_input(1, 64))


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("weight_scale", lambda t: t.view(torch.uint8)[3, 1:3].fill_(0x7F), "found 2 NaN of 128"),
        ("weight_scale", lambda t: t.view(torch.uint8)[0, 0].fill_(0xB8), "1 of 128 with a sign"),
        ("weight_scale", lambda t: t.view(torch.uint8)[0, 0].fill_(0x80), "1 of 128 with a sign"),
        (
            "weight_scale_2",
            lambda t: t.fill_(torch.nan),
            "found NaN only: never loaded, or loaded as NaN",
        ),
        ("weight_scale_2", lambda t: t.fill_(torch.inf), r"found the decode scale \[inf\]"),
        ("weight_scale_2", lambda t: t.fill_(-1), r"found the decode scale \[-1.0\]"),
        ("input_scale", lambda t: t.fill_(0), "found the decode scale 0.0"),
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


def test_an_infinite_divisor_is_no_scale() -> None:
    """Its inverse is 0, which the scale of an all-zero weight may be."""
    tensors = file_of(random_layer(32, 64), "compressed-tensors")
    tensors["weight_global_scale"].fill_(torch.inf)
    layer = empty()
    layer.load_state_dict(tensors)
    with pytest.raises(CheckpointError, match=r"expected a finite scale, found \[inf\]"):
        layer.process_weights_after_loading()


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
        ("weight_scale_2", torch.ones(1).bfloat16(), "expected float32 .*found bfloat16"),
        ("weight_scale_2", torch.ones(1).double(), "expected float32 .*found float64"),
        ("weight_scale", torch.zeros(32, 4).to(torch.uint8), "found uint8"),
        ("weight", torch.zeros(32, 32).to(torch.int8), "found int8"),
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


def test_tensors_may_be_loaded_in_parts() -> None:
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


def test_weights_that_never_came_are_an_error() -> None:
    """Otherwise they would be zeros."""
    layer = NvFp4Linear.from_float(torch.nn.Linear(32, 16))
    state = layer.state_dict()
    (weight,) = (name for name in state if name in ("weight", "weight_packed"))
    for name in (weight, "bias"):
        fresh = NvFp4Linear(32, 16)
        fresh.load_state_dict({k: v for k, v in state.items() if k != name}, strict=False)
        with pytest.raises(CheckpointError, match=f"^{name}: expected a tensor, found none"):
            fresh(torch.zeros(1, 32))


def test_a_bias_that_never_came_to_a_layer_on_meta() -> None:
    state = NvFp4Linear.from_float(torch.nn.Linear(32, 16)).state_dict()
    del state["bias"]
    fresh = NvFp4Linear(32, 16, device="meta")
    fresh.load_state_dict(state, strict=False, assign=True)
    with pytest.raises(CheckpointError, match=r"^bias: expected a tensor, found none"):
        fresh(torch.zeros(1, 32))


def test_a_bias_may_be_zero_or_set() -> None:
    state = NvFp4Linear.from_float(torch.nn.Linear(32, 16)).state_dict()
    fresh = NvFp4Linear(32, 16)
    fresh.load_state_dict({**state, "bias": torch.zeros(16)})
    assert not fresh(torch.zeros(1, 32)).any()
    fresh = NvFp4Linear(32, 16)
    del state["bias"]
    fresh.load_tensors(state)
    assert fresh.bias is not None
    fresh.bias.data.fill_(2)
    assert (fresh(torch.zeros(1, 32)) == 2).all()
