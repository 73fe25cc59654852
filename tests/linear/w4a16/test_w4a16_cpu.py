"""The CPU kernel behind `NvFp4Linear`."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from halfbyte.dispatch import CPU
from halfbyte.kernels.cpu.library import library
from halfbyte.linear import LINEAR_BACKENDS, NvFp4LinearLayerConfig
from halfbyte.linear.w4a16 import cpu as launcher
from halfbyte.linear.w4a16.cpu import CpuKernel
from linear.cases import assert_close_enough, random_input, random_layer

needs_library = pytest.mark.skipif(library() is None, reason="built without a C++ compiler")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CONFIG = NvFp4LinearLayerConfig(n=40, k=64, dtype=torch.bfloat16)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "parts"),
    [
        (1, 1, 16, None),
        (3, 33, 48, (1, 31, 1)),
        (17, 96, 256, (64, 16, 16)),
        (100, 130, 1040, (50, 80)),
    ],
)
def test_error_is_that_of_a_matmul_in_the_same_dtype(
    level: str, m: int, n: int, k: int, parts: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    for bias in (False, True):
        layer = random_layer(n, k, bias=bias, part_sizes=parts, dtype=dtype, backend="cpu")
        x = random_input(m, k, dtype)
        assert_close_enough(layer, x, layer(x), dtype)
        assert layer.extra_repr().endswith("backend=cpu")


@needs_library
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (32,), (2, 3, 32)], ids=str)
def test_shapes_of_x(shape: tuple[int, ...]) -> None:
    layer = random_layer(8, 32, bias=True, backend="cpu")
    x = random_input(6, 32).reshape(-1)[: torch.Size(shape).numel()].reshape(shape)
    out = layer(x)
    assert out.shape == (*shape[:-1], 8)
    assert out.is_contiguous()
    if x.numel():
        assert_close_enough(layer, x, out, torch.float32)


@needs_library
def test_strided_x() -> None:
    layer = random_layer(8, 32, backend="cpu")
    x = random_input(32, 12).t()[::2]
    assert torch.equal(layer(x), layer(x.contiguous()))
    fused = random_input(6, 96).view(2, 3, 96)
    assert torch.equal(layer(fused[..., 32:64]), layer(fused[..., 32:64].contiguous()))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_invariance(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch-invariant layer never uses PyTorch's dense product."""
    monkeypatch.setattr(launcher, "_is_dense_faster", lambda dtype: True)
    layer = random_layer(96, 336, bias=True, dtype=dtype, backend="cpu", batch_invariant=True)
    x = random_input(1000, 336, dtype)
    whole = layer(x)
    assert_close_enough(layer, x, whole, dtype)
    for m in (1, 2, 7, 64, 513):
        assert torch.equal(layer(x[3 : 3 + m]), whole[3 : 3 + m])


@needs_library
@pytest.mark.parametrize(("n", "k"), [(1, 16), (33, 80), (48, 128)])
def test_weights_come_back_as_loaded(n: int, k: int) -> None:
    layer = random_layer(n, k, bias=True, part_sizes=(n,), backend="cpu")
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    loaded = layer.weight_scale.shape
    layer.process_weights_after_loading()
    assert layer.weight_scale.shape != loaded
    after = layer.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # As bytes: there is no comparison of float8.
        bits, wanted = after[name].reshape(-1).view(torch.uint8), tensor.reshape(-1)
        assert torch.equal(bits, wanted.view(torch.uint8)), name
    x = random_input(3, k)
    out = layer(x)
    layer.unprocess_weights()
    assert layer.weight.shape == (n, k // 2)
    assert torch.equal(layer(x), out)


@needs_library
def test_no_second_copy_of_the_weights_stays() -> None:
    layer = random_layer(64, 256, backend="cpu")
    layer.process_weights_after_loading()
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert held == 64 * 256 * 9 // 16 + 64 * 4 + sum(
        scale.numel() * 4 for scale in (layer.weight_global_scale, layer.alpha)
    )


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset Dynamo: graphs of one `forward` accumulate over tests, up to a limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@needs_library
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_as_one_graph(fresh_compiler: None, compiler: str) -> None:
    layer = random_layer(32, 64, bias=True, part_sizes=(24, 8), backend="cpu", dtype=torch.bfloat16)
    layer.process_weights_after_loading()
    compiled = torch.compile(lambda x: layer(x * 2) + 1, backend=compiler, fullgraph=True)
    for m in (1, 5, 9):
        x = random_input(m, 64, torch.bfloat16)
        assert torch.equal(compiled(x), layer(x * 2) + 1)


@needs_library
def test_operator_is_well_formed() -> None:
    layer = random_layer(8, 32, bias=True, part_sizes=(4, 4), backend="cpu")
    layer.process_weights_after_loading()
    scales = layer.weight_scale.view(torch.uint8)  # opcheck cannot compare float8
    arguments = (random_input(3, 32), layer.weight, scales, layer.weight_row_scale, layer.bias)
    torch.library.opcheck(torch.ops.halfbyte.nvfp4_linear_cpu.default, (*arguments, 8, False))


@needs_library
def test_is_chosen_on_the_cpu() -> None:
    assert LINEAR_BACKENDS.select(CONFIG) is CpuKernel
    for dtype in DTYPES:
        config = replace(CONFIG, dtype=dtype, batch_invariant=True, has_bias=True)
        assert LINEAR_BACKENDS.select(config) is CpuKernel


def test_says_what_it_cannot_do() -> None:
    for config, reason in {
        replace(CONFIG, quantize_activations=True): "W4A16 only: it does not quantize activations",
        replace(CONFIG, device_type="cuda"): "tensors are on cuda, not on the CPU",
    }.items():
        assert CpuKernel.can_implement(config) == (False, reason)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.kernels.cpu.library.library", lambda: None)
    usable, reason = CpuKernel.is_supported(CPU)
    assert not usable
    assert "without a C++ compiler" in reason
    assert LINEAR_BACKENDS.select(CONFIG).name == "reference"
