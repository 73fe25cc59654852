"""`NvFp4Linear`: construction, processing by repacking kernels and restoring, calls."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.linear import NvFp4Linear, NvFp4LinearLayerConfig
from halfbyte.numerics import nvfp4
from linear.cases import assert_close_enough, random_input, random_layer
from linear.files import assert_same


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


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_from_float_wants_finite_weights(value: float) -> None:
    linear = nn.Linear(32, 16)
    linear.weight.data[3, 5] = value
    with pytest.raises(ValueError, match="weight: expected finite values"):
        NvFp4Linear.from_float(linear)


def test_first_calls_of_several_threads() -> None:
    for _ in range(20):
        layer = random_layer(256, 256)
        x, barrier = random_input(4, 256), Barrier(3)

        def call(layer: NvFp4Linear = layer, x: torch.Tensor = x) -> torch.Tensor:
            barrier.wait()  # noqa: B023 (the threads end with the turn)
            return layer(x)

        with ThreadPoolExecutor(3) as pool:
            outs = [future.result() for future in [pool.submit(call) for _ in range(3)]]
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_from_float_shares_no_memory_with_the_layer() -> None:
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    before = linear.bias.detach().clone()
    layer = NvFp4Linear.from_float(linear)
    assert layer.bias is not None
    layer.load_state_dict(NvFp4Linear.from_float(nn.Linear(64, 32).bfloat16()).state_dict())
    assert torch.equal(linear.bias, before)
    assert not torch.equal(layer.bias, before)


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


@pytest.mark.parametrize("first", ["modelopt", "compressed-tensors"])
def test_parts_in_both_dialects_keep_their_values(first: Dialect) -> None:
    """Their global scales are reciprocals, and 1/(1/g) is not always g in float32."""
    second: Dialect = "modelopt" if first == "compressed-tensors" else "compressed-tensors"
    for seed in range(40):
        parts = [
            random_layer(4, 32, seed=seed, dialect=first),
            random_layer(4, 32, seed=1000 + seed, dialect=second),
        ]
        expected = torch.cat([part.dequantize(torch.float64) for part in parts])
        assert torch.equal(NvFp4Linear.from_parts(parts).dequantize(torch.float64), expected)


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
    with pytest.raises(ValueError, match="parts: expected NvFp4Linear, got Linear"):
        NvFp4Linear.from_parts([a, torch.nn.Linear(32, 16)])  # type: ignore[list-item]


@pytest.mark.parametrize("backend", ["reference", "rows_reversed"])
@pytest.mark.usefixtures("repacking")
def test_cast_keeps_codes_and_scales(backend: str) -> None:
    layer = random_layer(32, 64, bias=True, quantize_activations=True, backend=backend)
    before = dict(copy.deepcopy(layer).state_dict())
    layer(random_input(2, 64))
    model = nn.Sequential(layer).to(torch.bfloat16)
    assert layer.kernel is None
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
def test_kernel_without_restore_is_named_when_saving() -> None:
    layer = random_layer(32, 64, backend="irreversible")
    layer.state_dict()
    layer.process_weights_after_loading()
    with pytest.raises(RuntimeError, match="linear backend 'irreversible' cannot give back"):
        layer.state_dict()
    with pytest.raises(RuntimeError, match="linear backend 'irreversible' cannot give back"):
        layer.half()


def test_input_that_does_not_fit() -> None:
    layer = random_layer(32, 64, backend="reference")
    with pytest.raises(
        ValueError, match=r"expected float32 \[..., 64\] on cpu, got float32 \[2, 6"
    ):
        layer(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="got bfloat16"):
        layer(torch.zeros(2, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"\[..., 64\] on cpu, got float32 \[\] on cpu"):
        layer(torch.tensor(1.0))
    with pytest.raises(ValueError, match="on meta"):
        layer(torch.zeros(2, 64, device="meta"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_features": 40}, "k a positive multiple of 16"),
        ({"part_sizes": (8, 8)}, "sum to n=32"),
        ({"dtype": torch.float64}, "dtype: expected float16"),
        ({"m_hint": 0}, "m_hint: expected None or a number >= 1, got 0"),
        ({"dialect": "gguf"}, "dialect: expected one of modelopt, compressed-tensors, got 'gguf'"),
    ],
    ids=["k", "parts", "dtype", "m-hint", "dialect"],
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
