"""The Triton kernel behind `NvFp4Linear`: interpreted on a CPU, run where there is a GPU."""

import sys
from dataclasses import replace

import pytest
import torch

from halfbyte import dispatch
from halfbyte.linear import LINEAR_BACKENDS, NvFp4LinearLayerConfig
from halfbyte.linear.w4a16.triton import TritonKernel
from linear.cases import assert_close_enough, random_input, random_layer

pytest.importorskip("triton")

from triton_interpreter import interpreted

MODULE = "halfbyte.linear.w4a16.triton_kernel"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CONFIG = NvFp4LinearLayerConfig(n=40, k=64, dtype=torch.bfloat16, device_type="cuda")


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend with its kernel in the interpreter."""
    monkeypatch.setitem(sys.modules, MODULE, interpreted(MODULE))
    for question in ("is_supported", "can_implement"):
        monkeypatch.setattr(TritonKernel, question, lambda *about: (True, "in the interpreter"))


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_error_of_fused_parts(dtype: torch.dtype, batch_invariant: bool) -> None:
    layer = random_layer(
        50,
        80,
        bias=True,
        part_sizes=(24, 16, 10),
        dtype=dtype,
        backend="triton",
        batch_invariant=batch_invariant,
    )
    x = random_input(20, 80, dtype)
    assert_close_enough(layer, x, layer(x), dtype)
    assert layer.extra_repr().endswith("backend=triton")


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (32,), (2, 3, 32)], ids=str)
def test_shapes_of_x(shape: tuple[int, ...]) -> None:
    layer = random_layer(8, 32, bias=True, backend="triton")
    x = random_input(6, 32).reshape(-1)[: torch.Size(shape).numel()].reshape(shape)
    out = layer(x)
    assert out.shape == (*shape[:-1], 8)
    assert out.is_contiguous()
    if x.numel():
        assert_close_enough(layer, x, out, torch.float32)


@pytest.mark.usefixtures("on_a_cpu")
def test_strided_x() -> None:
    layer = random_layer(8, 32, backend="triton")
    x = random_input(32, 12).t()[::2]
    assert torch.equal(layer(x), layer(x.contiguous()))
    fused = random_input(6, 97).view(2, 3, 97)
    assert torch.equal(layer(fused[..., 33:65]), layer(fused[..., 33:65].contiguous()))


@pytest.mark.usefixtures("on_a_cpu")
def test_batch_invariance() -> None:
    layer = random_layer(
        70, 272, bias=True, dtype=torch.float16, backend="triton", batch_invariant=True
    )
    x = random_input(150, 272, torch.float16)
    whole = layer(x)
    for m in (1, 17, 64):
        assert torch.equal(layer(x[3 : 3 + m]), whole[3 : 3 + m])


@pytest.mark.usefixtures("on_a_cpu")
def test_weights_stay_where_they_are() -> None:
    layer = random_layer(33, 80, bias=True, part_sizes=(30, 3), backend="triton")
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    places = [layer.weight.data_ptr(), layer.weight_scale.data_ptr()]
    x = random_input(3, 80)
    out = layer(x)
    assert [layer.weight.data_ptr(), layer.weight_scale.data_ptr()] == places
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    parts, rows = 2, 33
    assert held == rows * 80 * 9 // 16 + 4 * (2 * parts + 2 * rows)  # two scales; bias, row scale
    for name, tensor in layer.state_dict().items():
        bits = tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(bits, before[name].reshape(-1).view(torch.uint8)), name
    layer.unprocess_weights()
    assert layer.weight.data_ptr() == places[0]
    assert torch.equal(layer(x), out)


@pytest.mark.usefixtures("on_a_cpu")
def test_weights_in_any_order_of_memory() -> None:
    layer = random_layer(24, 64, backend="triton")
    x = random_input(3, 64)
    expected = layer(x)
    layer.unprocess_weights()
    for name in ("weight", "weight_scale"):
        parameter = layer.get_parameter(name)
        parameter.data = parameter.data.t().contiguous().t()
    assert torch.equal(layer(x), expected)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_as_one_graph(compiler: str) -> None:
    layer = random_layer(
        32, 64, bias=True, part_sizes=(24, 8), backend="triton", dtype=torch.bfloat16
    )
    layer.process_weights_after_loading()
    compiled = torch.compile(lambda x: layer(x * 2) + 1, backend=compiler, fullgraph=True)
    for m in (1, 5, 9):
        x = random_input(m, 64, torch.bfloat16)
        assert torch.equal(compiled(x), layer(x * 2) + 1)


@pytest.mark.usefixtures("on_a_cpu")
def test_operator_is_well_formed() -> None:
    layer = random_layer(8, 32, bias=True, part_sizes=(4, 4), backend="triton")
    layer.process_weights_after_loading()
    scales = layer.weight_scale.view(torch.uint8)  # opcheck cannot compare float8
    tensors = (random_input(3, 32), layer.weight, scales, layer.weight_row_scale, layer.bias)
    torch.library.opcheck(torch.ops.halfbyte.nvfp4_linear_triton.default, (*tensors, 8, False))


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 110, 120, 121])
def test_machines(capability: int) -> None:
    assert TritonKernel.is_supported(capability) == (True, "decodes weights as loaded")
    for dtype in DTYPES:
        work = replace(CONFIG, dtype=dtype, compute_capability=capability)
        verdicts = LINEAR_BACKENDS.explain(replace(work, batch_invariant=True), capability)
        usable = [verdict.name for verdict in verdicts if verdict.usable]
        assert usable.index("triton") < usable.index("reference")


def test_takes_float32_where_the_faster_ones_do_not() -> None:
    work = replace(CONFIG, dtype=torch.float32, compute_capability=90)
    assert LINEAR_BACKENDS.select(work, compute_capability=90) is TritonKernel


@pytest.mark.parametrize(
    ("capability", "reason"),
    [(0, "needs an NVIDIA GPU"), (75, "needs compute capability 8.0, this is 7.5")],
)
def test_machines_without_the_kernel(capability: int, reason: str) -> None:
    assert TritonKernel.is_supported(capability) == (False, reason)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "current_compute_capability", lambda: 90)
    assert TritonKernel.is_supported()[0]
    monkeypatch.setattr(dispatch, "is_installed", lambda module: False)
    assert TritonKernel.is_supported() == (False, "needs triton (pip install halfbyte[gpu])")
    assert TritonKernel.is_supported(90)[0]


def test_says_what_it_cannot_do() -> None:
    for config, reason in {
        replace(CONFIG, quantize_activations=True): "W4A16 only: it does not quantize activations",
        replace(CONFIG, device_type="cpu"): "tensors are on cpu, not on a GPU",
    }.items():
        assert TritonKernel.can_implement(config) == (False, reason)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_on_a_gpu(dtype: torch.dtype) -> None:
    layer = random_layer(
        200, 1040, bias=True, part_sizes=(100, 60, 40), dtype=dtype, backend="triton"
    ).cuda()
    for m in (0, 1, 30, 300):
        x = random_input(m, 1040, dtype).cuda()
        out = layer(x)
        assert layer.kernel is not None
        assert layer.kernel.name == "triton"
        assert out.shape == (m, 200)
        if m:
            assert_close_enough(layer, x, out, dtype)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    layer = random_layer(96, 256, bias=True, dtype=torch.bfloat16, backend="triton").cuda()
    x = random_input(5, 256, torch.bfloat16).cuda()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.copy_(random_input(5, 256, torch.bfloat16, seed=2))
    graph.replay()
    assert torch.equal(out, layer(x))


@pytest.mark.gpu
def test_compiles_into_cuda_graphs() -> None:
    layer = random_layer(96, 256, bias=True, dtype=torch.bfloat16, backend="triton").cuda()
    layer.process_weights_after_loading()
    compiled = torch.compile(lambda x: layer(x * 2) + 1, backend="cudagraphs", fullgraph=True)
    x = random_input(5, 256, torch.bfloat16).cuda()
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(compiled(x), layer(x * 2) + 1)
