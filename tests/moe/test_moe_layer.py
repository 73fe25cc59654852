"""`NvFp4Experts`: loading, kernels, state dicts, moving, errors."""

import copy
from typing import Any

import pytest
import torch

from checkpoints.folders import pack, unpack
from halfbyte.checkpoints import TENSOR_NAMES, CheckpointError, Dialect
from halfbyte.moe import GPT_OSS, GatedActivation, NvFp4Experts, PackedExperts
from halfbyte.moe.separate_experts import PROJECTIONS, Projection
from moe.cases import assert_close_enough, dequantized, random_hidden, random_routing

NUM, H, MID = 3, 64, 48
SHAPES: dict[Projection, tuple[int, int]] = {
    "gate_proj": (MID, H),
    "up_proj": (MID, H),
    "down_proj": (H, MID),
}


def files(dialect: Dialect, bias: bool = False, scheme: Any = "nvfp4-a16") -> dict[str, Any]:
    """The tensors of a layer, by `<expert>.<projection>.<tensor>`."""
    torch.manual_seed(0)
    tensors: dict[str, Any] = {}
    for expert in range(NUM):
        for projection, shape in SHAPES.items():
            own = pack(torch.randn(shape) / 8 * (expert + 1), dialect, scheme)
            own |= {"bias": torch.randn(shape[0])} if bias else {}
            tensors |= {f"{expert}.{projection}.{name}": x for name, x in own.items()}
    return tensors


def loaded(tensors: dict[str, Any], **options: Any) -> NvFp4Experts:
    layer = NvFp4Experts(NUM, H, MID, "0.up_proj.bias" in tensors, **options)
    layer.load_state_dict(tensors)
    return layer


def expected(tensors: dict[str, Any], dialect: Dialect) -> list[torch.Tensor]:
    """gate_proj of every expert, dequantized."""
    return [
        unpack(
            {
                name.removeprefix(f"{e}.gate_proj."): x
                for name, x in tensors.items()
                if name.startswith(f"{e}.gate_proj.")
            },
            dialect,
            torch.float64,
        )
        for e in range(NUM)
    ]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("bias", [False, True])
def test_runs_what_files_hold(dialect: Dialect, bias: bool, backend: str) -> None:
    tensors = files(dialect, bias)
    layer = loaded(tensors, backend=backend)
    experts = layer.packed_experts()
    ids, weights = random_routing(9, 2, NUM)
    hidden = random_hidden(9, H)
    out = layer(hidden, ids, weights)
    layer.unprocess_weights()
    experts = layer.packed_experts()
    assert_close_enough(out, hidden, experts, ids, weights)

    gates = dequantized(experts.gate_up, False)[:, :MID]
    for found, wanted in zip(gates, expected(tensors, dialect), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("scheme", ["nvfp4-a16", "nvfp4"])
def test_state_dict_is_what_was_loaded(dialect: Dialect, scheme: str, processed: bool) -> None:
    tensors = files(dialect, True, scheme)
    layer = loaded(tensors, dialect=dialect)
    if processed:
        layer.process_weights_after_loading()
    saved = layer.state_dict()
    assert set(saved) == set(tensors)
    for name, tensor in tensors.items():
        assert saved[name].dtype == tensor.dtype
        bits = (x.reshape(-1).view(torch.uint8) for x in (saved[name], tensor))
        assert torch.equal(*bits), name


def test_state_dict_in_the_other_dialect() -> None:
    layer = loaded(files("compressed-tensors"))
    again = loaded(layer.state_dict(), dialect="compressed-tensors")
    first, second = layer.packed_experts(), again.packed_experts()
    assert torch.equal(first.gate_up.weight, second.gate_up.weight)
    names = TENSOR_NAMES["modelopt"]
    assert f"2.down_proj.{names.weight_global_scale}" in layer.state_dict()


def test_moves_keep_weights() -> None:
    layer = loaded(files("modelopt", True))
    ids, weights = random_routing(5, 2, NUM)
    before = layer(random_hidden(5, H), ids, weights)
    half = copy.deepcopy(layer).bfloat16()
    assert half.dtype == torch.bfloat16
    assert not any(p.dtype == torch.float32 for n, p in half.named_parameters() if "bias" in n)
    out = half(random_hidden(5, H, torch.bfloat16), ids, weights)
    torch.testing.assert_close(out.float(), before, rtol=0.05, atol=0.05)
    assert torch.equal(layer(random_hidden(5, H), ids, weights), before)


def test_from_meta(dialect: Dialect) -> None:
    layer = NvFp4Experts(NUM, H, MID, device="meta")
    tensors = files(dialect)
    for expert in range(NUM):
        for projection in PROJECTIONS:
            own = f"{expert}.{projection}."
            found = {n.removeprefix(own): x for n, x in tensors.items() if n.startswith(own)}
            assert not layer.is_complete
            layer.load_projection((expert, projection), found, dialect)
    assert layer.is_complete
    ids, weights = random_routing(5, 2, NUM)
    out = layer(random_hidden(5, H), ids, weights)
    assert torch.equal(out, loaded(tensors)(random_hidden(5, H), ids, weights))


@pytest.mark.parametrize("tensor", ["weight", "weight_scale", "weight_global_scale"])
def test_what_was_never_loaded_is_named(dialect: Dialect, tensor: str) -> None:
    tensors = files(dialect)
    name = f"1.up_proj.{getattr(TENSOR_NAMES[dialect], tensor)}"
    del tensors[name]
    layer = NvFp4Experts(NUM, H, MID, dialect=dialect)
    with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
        layer.load_state_dict(tensors)
    layer.load_state_dict(tensors, strict=False)
    with pytest.raises(CheckpointError, match=f"^{name}: expected a tensor, found none"):
        layer.process_weights_after_loading()


@pytest.mark.parametrize("value", [0x7F, 0x80])
def test_bad_block_scales_are_named(dialect: Dialect, value: int) -> None:
    tensors = files(dialect)
    tensors["2.down_proj.weight_scale"].view(torch.uint8)[3, 1] = value
    layer = loaded(tensors, dialect=dialect)
    with pytest.raises(CheckpointError, match=r"^2\.down_proj\.weight_scale: expected finite"):
        layer.process_weights_after_loading()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1.0])
def test_bad_global_scales_are_named(dialect: Dialect, value: float) -> None:
    tensors = files(dialect)
    name = f"2.down_proj.{TENSOR_NAMES[dialect].weight_global_scale}"
    tensors[name].fill_(value)
    layer = loaded(tensors, dialect=dialect)
    with pytest.raises(CheckpointError, match=f"^{name}: expected"):
        layer.process_weights_after_loading()


def test_tensors_that_do_not_fit_are_named() -> None:
    tensors = files("modelopt")
    tensors["1.up_proj.weight"] = tensors["1.up_proj.weight"][:5]
    with pytest.raises(RuntimeError, match=r"1\.up_proj\.weight: expected uint8 \[48, 32\]"):
        loaded(tensors)
    layer = NvFp4Experts(NUM, H, MID)
    layer.layer_name = "mlp.experts"
    with pytest.raises(CheckpointError, match=r"^mlp\.experts\.0\.up_proj\.bias: expected one of"):
        layer.load_projection((0, "up_proj"), {"bias": torch.zeros(MID)}, "modelopt")


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((0, H, MID), {}, "num_experts"),
        ((NUM, 40, MID), {}, "hidden_size: expected a positive multiple of 16"),
        ((NUM, H, MID), {"dtype": torch.float64}, "dtype"),
        ((NUM, H, MID), {"activation": GPT_OSS}, "activation: expected one that is not interl"),
    ],
)
def test_options_that_do_not_exist(
    sizes: tuple[int, int, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NvFp4Experts(*sizes, **options)


def test_arguments_that_do_not_fit() -> None:
    layer = loaded(files("modelopt"))
    ids, weights = random_routing(5, 2, NUM)
    with pytest.raises(ValueError, match=r"hidden: expected torch.float32, got torch.bfloat16"):
        layer(random_hidden(5, H, torch.bfloat16), ids, weights)
    with pytest.raises(ValueError, match=r"hidden: expected \[M, 64\]"):
        layer(random_hidden(5, 32), ids, weights)


def test_compiles_as_one_graph() -> None:
    layer = loaded(files("modelopt"))
    layer.process_weights_after_loading()
    ids, weights = random_routing(5, 2, NUM)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    hidden = random_hidden(5, H)
    assert torch.equal(compiled(hidden, ids, weights), layer(hidden, ids, weights))


def test_its_name_in_a_model() -> None:
    layer = loaded(files("modelopt"), activation=GatedActivation(1.702, 7.0, 1.0))
    assert "num_experts=3" in repr(layer)
    assert isinstance(layer.packed_experts(), PackedExperts)
    assert layer.packed_experts().activation.limit == 7.0
