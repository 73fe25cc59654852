"""Backends that call other libraries: their arguments, and the layers that they reject.

`documented_peers` replaces the libraries on the CPU; the tests at the end run the real ones on
a GPU that they support.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.linear_layers.weights import PeerWeights
from halfbyte.layouts import swizzle_128x4
from halfbyte.layouts.gemm_layouts import pad_weight
from halfbyte.linear import LINEAR_BACKENDS, NvFp4Linear, NvFp4LinearLayerConfig
from halfbyte.linear.base import NvFp4LinearKernel
from halfbyte.linear.w4a4 import fbgemm
from halfbyte.linear.w4a4.native_fp4 import NativeFp4Kernel
from halfbyte.linear.w4a16 import humming
from linear import documented_peers, documented_weight_only
from linear.cases import assert_close_enough, random_input, random_layer, reference64
from linear.peers import BF16, FP16, W4A4, W4A16, dtypes_of


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Play = Callable[..., None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Install a backend's library as documented, and let layers on the CPU use the backend."""

    def forget() -> None:
        fbgemm._options.cache_clear()
        fbgemm._quantizer.cache_clear()

    def install(name: str, release: str = "1.9") -> None:
        if name == "torch_scaled_mm":
            documented_peers.install_torch(monkeypatch)
        elif name.startswith("flashinfer"):
            documented_peers.install_flashinfer(monkeypatch)
        elif name == "cutlass":
            documented_peers.install_vllm_cutlass(monkeypatch)
        elif name == "fbgemm":
            documented_peers.install_fbgemm(monkeypatch, release)
        elif name == "marlin":
            documented_weight_only.install_marlin(monkeypatch, with_workspace=False)
        else:
            documented_weight_only.install_humming(monkeypatch)
        use(monkeypatch)

    forget()
    yield install
    forget()


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make layers use the named kernel, without checking whether it runs here."""

    def init(config: NvFp4LinearLayerConfig, backend: str | None) -> NvFp4LinearKernel:
        assert backend is not None
        return LINEAR_BACKENDS.get(backend)(config)

    monkeypatch.setattr("halfbyte.linear.layer.init_nvfp4_linear_kernel", init)


def layer_for(name: str, n: int, k: int, **options: Any) -> NvFp4Linear:
    return random_layer(n, k, backend=name, quantize_activations=name in W4A4, **options)


def assert_right(name: str, n: int, k: int, x: torch.Tensor, **options: Any) -> NvFp4Linear:
    """The layer's result equals that of a second layer with the loaded weights."""
    layer = layer_for(name, n, k, dtype=x.dtype, **options)
    twin = layer_for(name, n, k, dtype=x.dtype, **options)
    assert_close_enough(twin, x, layer(x), x.dtype)
    return layer


@pytest.mark.parametrize(
    ("n", "k", "m", "parts"),
    [
        (256, 128, 5, None),  # no backend pads
        (130, 144, 200, None),  # N and K padded, more than one tile of scales
        (96, 208, 33, (64, 32)),  # scales that differ
        (40, 16, 1, (1, 32, 7)),
    ],
    ids=["fits", "padded", "parts", "odd-parts"],
)
@pytest.mark.parametrize("name", W4A4 + W4A16)
def test_as_documented_gives_the_product(
    play: Play, name: str, n: int, k: int, m: int, parts: tuple[int, ...] | None
) -> None:
    play(name)
    for dtype in dtypes_of(name):
        assert_right(name, n, k, random_input(m, k, dtype), part_sizes=parts)
        assert_right(name, n, k, random_input(m, k, dtype), part_sizes=parts, bias=True)


@pytest.mark.parametrize("name", W4A4 + W4A16)
def test_any_shape_and_strides(play: Play, name: str) -> None:
    play(name)
    layer = layer_for(name, 64, 128, dtype=BF16, bias=True)
    x = random_input(24, 256, BF16)[:, ::2].unflatten(0, (2, 3, 4)).transpose(0, 2)
    assert_close_enough(layer_for(name, 64, 128, dtype=BF16, bias=True), x, layer(x), BF16)
    row = random_input(128, 1, BF16).t()  # strides (1, 1)
    assert_close_enough(layer_for(name, 64, 128, dtype=BF16, bias=True), row, layer(row), BF16)
    assert layer(x[:0]).shape == (0, 3, 2, 64)
    assert layer(x[0, 0, 0]).shape == (64,)


@pytest.mark.parametrize("name", W4A4 + W4A16)
def test_parts_of_equal_scale_are_one_call(play: Play, name: str) -> None:
    play(name)
    layer = layer_for(name, 96, 128, dtype=BF16, part_sizes=(32, 32, 32))
    layer.weight_global_scale.data.copy_(torch.tensor([0.5, 0.5, 0.25]))
    layer.process_weights_after_loading()
    kernel: Any = layer.kernel
    assert [(run.part, run.start, run.rows) for run in kernel.runs] == [(0, 0, 64), (2, 64, 32)]
    assert hasattr(layer, "weight_run1")
    assert not hasattr(layer, "weight_run2")


@pytest.mark.parametrize("name", W4A4)
def test_padding_is_reported_and_weights_come_back(play: Play, name: str) -> None:
    play(name)
    kernel = LINEAR_BACKENDS.get(name)
    assert issubclass(kernel, NativeFp4Kernel)
    layer = layer_for(name, 90, 80, dtype=BF16, part_sizes=(50, 40))
    weight, scales = layer.weight.clone(), layer.weight_scale.clone()
    layer.process_weights_after_loading()
    assert layer.weights_padding_cols == (-80 % kernel.k_multiple) // 2
    assert layer.weight.shape == (
        -(-50 // kernel.row_multiple) * kernel.row_multiple,
        40 + (layer.weights_padding_cols),
    )
    assert layer.weight_scale.shape[0] == 128
    restored, restored_scales = layer.loaded_weights()
    assert torch.equal(restored, weight)
    assert torch.equal(restored_scales.view(torch.uint8), scales.view(torch.uint8))
    layer.unprocess_weights()
    assert set(dict(layer.named_parameters())) == {
        "weight", "weight_scale", "weight_global_scale", "input_global_scale",
        "input_global_scale_inv", "alpha",
    }  # fmt: skip


@pytest.mark.parametrize("name", W4A4)
def test_a_wrong_order_would_be_noticed(
    play: Play, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    play(name)
    x = random_input(3, 128, BF16)
    right = layer_for(name, 256, 128, dtype=BF16)(x)

    def linear(scales: torch.Tensor) -> torch.Tensor:
        padded = pad_weight(torch.zeros(scales.shape[0], 8 * scales.shape[1]), scales, 128, 64)[1]
        return padded.contiguous()

    module = "flashinfer_trtllm" if name == "flashinfer_trtllm" else "native_fp4"
    monkeypatch.setattr(f"halfbyte.linear.w4a4.{module}.swizzle_128x4", linear)
    assert not torch.equal(layer_for(name, 256, 128, dtype=BF16)(x), right)


def test_trtllm_takes_8x4_scales_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = documented_peers.install_flashinfer(monkeypatch)
    use(monkeypatch)
    for rows in (1, 32, 33, 200):
        assert_right("flashinfer_trtllm", 128, 192, random_input(rows, 192, BF16))
    assert [(call["rows"], call["is_8x4"]) for call in calls] == [
        (1, True), (32, True), (33, False), (200, False),
    ]  # fmt: skip
    assert {call["backend"] for call in calls} == {"trtllm"}


@pytest.mark.parametrize("release", documented_peers.FBGEMM_SCHEMAS)
def test_fbgemm_by_the_arguments_of_its_release(play: Play, release: str) -> None:
    play("fbgemm", release)
    assert_right("fbgemm", 64, 128, random_input(3, 128, BF16))


def test_marlin_with_the_workspace_of_older_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    documented_weight_only.install_marlin(monkeypatch, with_workspace=True)
    use(monkeypatch)
    layer = assert_right("marlin", 96, 208, random_input(7, 208, FP16), part_sizes=(64, 32))
    assert layer.workspace.dtype == torch.int32


@pytest.mark.parametrize(
    ("dtype", "largest", "lost"), [(BF16, 448.0, 1), (BF16, 1.0, 0), (FP16, 1.0, 1)], ids=str
)
def test_marlin_names_scales_that_it_loses(
    play: Play, dtype: torch.dtype, largest: float, lost: int
) -> None:
    play("marlin")
    layer = layer_for("marlin", 64, 128, dtype=dtype)
    scales = torch.full((64, 8), largest)
    scales[3, 2] = 2.0**-9
    layer.weight_scale.data.copy_(scales.to(torch.float8_e4m3fn))
    if lost:
        with pytest.warns(UserWarning, match="marlin.*: 1 of 512 block scales of a 64 x 128 layer"):
            layer.process_weights_after_loading()
    else:
        layer.process_weights_after_loading()


def test_humming_asks_for_one_float32_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """K is not split, except within `splitting_k`."""
    calls = documented_weight_only.install_humming(monkeypatch)
    use(monkeypatch)
    assert_right("humming", 64, 128, random_input(3, 128, FP16))
    assert len(calls) == 2, "one at load, which compiles"
    wanted = {"use_batch_invariant": True, "use_f16_accum": False, "gemm_type": "dense"}
    assert calls[-1] == wanted
    with humming.HummingKernel.splitting_k():
        for batch_invariant in (False, True):
            x = random_input(3, 128, FP16)
            assert_right("humming", 64, 128, x, batch_invariant=batch_invariant)
            assert calls[-1] == {**wanted, "use_batch_invariant": batch_invariant}


def test_the_benchmark_lets_humming_split_k(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = documented_weight_only.install_humming(monkeypatch)
    use(monkeypatch)
    PeerWeights((64, 128), torch.device("cpu"), FP16).layer("humming")
    assert calls[-1]["use_batch_invariant"] is False
    layer_for("humming", 64, 128, dtype=FP16).process_weights_after_loading()
    assert calls[-1]["use_batch_invariant"] is True


@pytest.mark.parametrize("name", W4A16)
def test_repacked_weights_cannot_come_back(play: Play, name: str) -> None:
    play(name)
    layer = layer_for(name, 64, 128, dtype=BF16)
    layer.process_weights_after_loading()
    with pytest.raises(RuntimeError, match=f"'{name}' cannot give back"):
        layer.state_dict()


@pytest.mark.parametrize("name", W4A4 + W4A16)
def test_compiles_as_one_graph(play: Play, name: str) -> None:
    play(name)
    layer = layer_for(name, 96, 128, dtype=BF16, part_sizes=(64, 32), bias=True)
    layer.process_weights_after_loading()
    x = random_input(3, 128, BF16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def assert_near(layer: NvFp4Linear, x: torch.Tensor, out: torch.Tensor) -> None:
    """For quantizers that may round near ties differently: within 2 % of each part's norm."""
    wanted = reference64(layer, x)
    sizes = list(layer.part_sizes)
    for o, w in zip(out.double().split(sizes, -1), wanted.split(sizes, -1), strict=True):
        assert (o - w).norm() <= 0.02 * w.norm()


@pytest.mark.gpu
@pytest.mark.slow  # libraries compile
@pytest.mark.parametrize(
    ("n", "k", "parts"),
    [(256, 512, None), (136, 144, None), (640, 1024, (512, 128)), (4096, 4096, None)],
    ids=["fits", "padded", "parts", "large"],
)
@pytest.mark.parametrize("name", W4A4 + W4A16)
def test_on_this_gpu(name: str, n: int, k: int, parts: tuple[int, ...] | None) -> None:
    usable, reason = LINEAR_BACKENDS.get(name).is_supported()
    if not usable:
        pytest.skip(reason)
    for dtype in dtypes_of(name):
        options: dict[str, Any] = {"dtype": dtype, "part_sizes": parts, "bias": True}
        layer = layer_for(name, n, k, **options).cuda()
        twin = layer_for(name, n, k, **options).cuda()
        assert layer(random_input(0, k, dtype).cuda()).shape == (0, n)
        for m in (1, 17, 300):
            x = random_input(m, k, dtype).cuda()
            if name in W4A4 and name != "torch_scaled_mm":
                assert_near(twin, x, layer(x))
            else:
                assert_close_enough(twin, x, layer(x), dtype)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=short)
def test_humming_multiplies_every_scale_and_code_exactly(dtype: torch.dtype) -> None:
    usable, reason = humming.HummingKernel.is_supported()
    if not usable:
        pytest.skip(reason)
    layer = layer_for("humming", 128, 256, dtype=dtype)
    # Row n has block scale byte n (0x7F, NaN, replaced), each block every code.
    scales = torch.arange(128, dtype=torch.uint8).clamp(max=0x7E)[:, None].expand(128, 16)
    layer.weight_scale.data.copy_(scales.contiguous().view(torch.float8_e4m3fn))
    codes = torch.arange(0, 16, 2) | (torch.arange(1, 16, 2) << 4)
    layer.weight.data.copy_(codes.to(torch.uint8).repeat(128, 16))
    layer.weight_global_scale.data.fill_(0.001)
    layer = layer.cuda()
    values = layer.dequantize().t()
    out = layer(torch.eye(256, dtype=dtype, device="cuda"))
    assert torch.equal(out, values.to(dtype))


def test_swizzled_scales_are_where_the_documentation_says() -> None:
    """Our swizzle equals the formula of the libraries' documentation."""
    scales = torch.randint(0, 256, (200, 9), dtype=torch.uint8)
    where = documented_peers.positions(200, 9, 128)
    assert torch.equal(swizzle_128x4(scales).flatten()[where], scales)
