"""The CUDA C++ linear backend: support checks on any machine, results on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.linear import LINEAR_BACKENDS, NvFp4Linear, NvFp4LinearLayerConfig
from halfbyte.linear.w4a16.cuda import CudaKernel, choose_variant
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.linear.w4a16.gpu import gpu_of
from linear.cases import assert_close_enough, random_input, random_layer
from linear.gpus import H200, RTX_3090

CONFIG = NvFp4LinearLayerConfig(
    n=64, k=128, dtype=torch.bfloat16, device_type="cuda", compute_capability=90
)
DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ROWS = (1, 2, 5, 8, 16, 17, 33, 64, 192, 193, 1000)


@pytest.mark.parametrize(
    ("capability", "usable"), [(0, False), (75, False), (80, True), (89, True), (90, True)]
)
def test_machines(capability: int, usable: bool) -> None:
    answer, reason = CudaKernel.is_supported(capability)
    assert answer == usable
    assert reason


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_is_chosen_for_weight_only_layers(capability: int, batch_invariant: bool) -> None:
    config = replace(CONFIG, compute_capability=capability, batch_invariant=batch_invariant)
    assert LINEAR_BACKENDS.select(config, compute_capability=capability) is CudaKernel


def test_says_what_it_cannot_do() -> None:
    assert CudaKernel.can_implement(replace(CONFIG, k=2**16))[0]
    for config, reason in {
        replace(CONFIG, quantize_activations=True): "multiplies 16-bit activations",
        replace(CONFIG, device_type="cpu"): "tensors are on cpu, not on a GPU",
        replace(CONFIG, dtype=torch.float32): "takes bfloat16 and float16, not float32",
        replace(CONFIG, k=2**16 + 16): "K up to 65536, not 65552",
    }.items():
        usable, why = CudaKernel.can_implement(config)
        assert not usable
        assert reason in why


@pytest.mark.parametrize(
    ("m", "gpu", "expected"),
    [
        (1, H200, "gemv"),
        (16, H200, "gemv"),
        (64, H200, "gemm"),
        (2048, H200, "gemm"),
        (8192, H200, "gemm"),
        (65, RTX_3090, "gemv"),
        (1000, RTX_3090, "dequant"),
    ],
)
def testchoose_variant_for_a_number_of_tokens(m: int, gpu: Gpu, expected: str) -> None:
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
        assert choose_variant(m, n, k, gpu) == expected


@pytest.mark.gpu
def test_an_h200_answers_as_the_plans_are_tested() -> None:
    found = gpu_of(0)
    if (found.compute_capability, found.num_sms) != (90, 132):
        pytest.skip("an SM90 with 132 SMs")
    assert found == H200


def cuda_layer(n: int, k: int, dtype: torch.dtype, **options: Any) -> NvFp4Linear:
    return random_layer(n, k, dtype=dtype, backend="cuda", **options).cuda()


@pytest.mark.gpu
@DTYPE
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"part_sizes": (100, 40, 60), "bias": True}, {"batch_invariant": True}],
    ids=["plain", "bias", "parts", "batch-invariant"],
)
@pytest.mark.parametrize("k", [16, 464, 4096])
def test_results(k: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    layer = cuda_layer(200, k, dtype, **options)
    for m in ROWS:
        x = random_input(m, k, dtype).cuda()
        assert_close_enough(layer, x, layer(x))


@pytest.mark.gpu
def test_inputs_of_any_shape_and_stride() -> None:
    layer = cuda_layer(72, 256, torch.bfloat16, bias=True)
    x = random_input(24, 256, torch.bfloat16).cuda()
    wanted = layer(x)
    assert torch.equal(layer(x.view(2, 3, 4, 256)), wanted.view(2, 3, 4, 72))
    assert torch.equal(layer(x.t().contiguous().t()), wanted)
    wide = torch.zeros(24, 300, dtype=torch.bfloat16, device="cuda")
    wide[:, 3:259] = x
    assert torch.equal(layer(wide[:, 3:259]), wanted)
    assert layer(x[:0]).shape == (0, 72)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("m", [1, 16, 200, 700])
def test_another_than_the_current_device(m: int) -> None:
    layer = cuda_layer(576, 1088, torch.bfloat16, bias=True).to("cuda:1")
    x = random_input(m, 1088, torch.bfloat16).to("cuda:1")
    with torch.inference_mode():
        out = layer(x)
    assert out.device == x.device
    assert_close_enough(layer, x, out)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@DTYPE
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    layer = cuda_layer(576, 1088, dtype, batch_invariant=True)
    x = random_input(4096, 1088, dtype).cuda()
    wanted = layer(x)
    for m in ROWS:
        assert torch.equal(layer(x[-m:]), wanted[-m:])


@pytest.mark.gpu
@DTYPE
def test_weights_come_back(dtype: torch.dtype) -> None:
    layer = random_layer(100, 208, dtype=dtype, part_sizes=(64, 36), backend="cuda", bias=True)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer = layer.cuda()
    x = random_input(3, 208, dtype).cuda()
    out = layer(x)
    assert layer.weight.dtype == torch.int32
    assert layer.weights_padding_cols == (256 - 208) // 2
    for name, tensor in layer.state_dict().items():
        found, wanted = (t.cpu().reshape(-1).view(torch.uint8) for t in (tensor, before[name]))
        assert torch.equal(found, wanted), name
    layer = layer.cpu().cuda()
    assert torch.equal(layer(x), out)


@pytest.mark.gpu
def test_no_second_copy_of_the_weights_stays() -> None:
    layer = cuda_layer(1024, 1024, torch.bfloat16)
    layer.process_weights_after_loading()
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert held <= 1024 * 1024 * 9 // 16 + 1024 * 4 + 64


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_compiles_as_one_graph(compiler: str) -> None:
    layer = cuda_layer(96, 256, torch.bfloat16, bias=True, part_sizes=(64, 32))
    layer.process_weights_after_loading()
    compiled = torch.compile(lambda x: layer(x * 2) + 1, backend=compiler, fullgraph=True)
    for m in (1, 5, 300):
        x = random_input(m, 256, torch.bfloat16).cuda()
        torch.testing.assert_close(compiled(x), layer(x * 2) + 1, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_operator_is_well_formed() -> None:
    layer = cuda_layer(64, 128, torch.bfloat16, bias=True)
    layer.process_weights_after_loading()
    x = random_input(3, 128, torch.bfloat16).cuda()
    arguments = (x, layer.weight, layer.weight_scale, layer.weight_row_scale, layer.bias, 64, False)
    torch.library.opcheck(torch.ops.halfbyte.nvfp4_linear_cuda.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 200])
def test_in_a_graph_without_a_call_before(m: int) -> None:
    layer = cuda_layer(320, 512, torch.bfloat16)
    layer.process_weights_after_loading()
    x = random_input(m, 512, torch.bfloat16).cuda()
    if m > 192:  # cuBLAS makes its handle in the first call
        torch.mm(x, x.t())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.copy_(random_input(m, 512, torch.bfloat16, seed=5))
    graph.replay()
    assert_close_enough(layer, x, out)
