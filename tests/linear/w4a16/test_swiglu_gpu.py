"""SwiGLU of an NVFP4 layer on a GPU, inside the GEMM or behind it, against both apart."""

import pytest
import torch

from halfbyte.elementwise import silu_and_mul
from halfbyte.linear.w4a16 import swiglu
from halfbyte.linear.w4a16.cuda import nvfp4_linear_cuda
from halfbyte.linear.w4a16.gpu import gpu_of
from halfbyte.linear.w4a16.packed_weight import pack_weight

pytestmark = pytest.mark.gpu


def tensors(n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Packed weights of n rows of gate and n of up, whose products are of about 1; a bias."""
    torch.manual_seed(n + k)
    data = torch.randint(0, 256, (2 * n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x30, 0x40, (2 * n, k // 16), dtype=torch.uint8, device="cuda")
    common = torch.tensor([0.3, 0.2], device="cuda") * k**-0.5
    packed = pack_weight(data, scales, common, (n, n), dtype)
    bias = torch.randn(2 * n, device="cuda", dtype=dtype)
    return packed.weight, packed.weight_scale, packed.row_scale, bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (1536, 576), (192, 512), (40, 256)])
def test_swiglu_of_layers(n: int, k: int, dtype: torch.dtype) -> None:
    *weight, bias = tensors(n, k, dtype)
    eps = torch.finfo(dtype).eps
    for m in (0, 1, 16, 33, 64, 100, 128, 200, 700, 3000):
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        product = nvfp4_linear_cuda(x, *weight, bias, 2 * n, False)
        expected = silu_and_mul(product).double()
        out = swiglu.nvfp4_linear_swiglu_cuda(x, *weight, bias, n)
        # Parts of k may be added in another order. Then gate and up differ by rounding of float32
        # sums (of magnitudes that add up to 50), and by one unit in the last place.
        gate, up = product.double().abs().chunk(2, dim=-1)
        error = eps * product.double().abs() + 50 * 2**-18
        gate_error, up_error = error.chunk(2, dim=-1)
        allowed = 1.1 * gate_error * (up + up_error) + gate * up_error + 2 * eps * expected.abs()
        assert out.shape == (m, n)
        assert ((out.double() - expected).abs() <= allowed).all()


def test_the_gemm_applies_it_on_sm90() -> None:
    gpu = gpu_of(0)
    if gpu.compute_capability != 90:
        pytest.skip("an SM90")
    assert all(swiglu.swiglu_plan(m, 14336, 4096, gpu.num_sms) for m in (64, 128, 4096))


def test_swiglu_in_a_graph() -> None:
    """Replays find flags and sums as the launch before has left them."""
    n, k = 14336, 4096
    *weight, bias = tensors(n, k, torch.bfloat16)
    x = torch.randn(64, k, device="cuda", dtype=torch.bfloat16)
    swiglu.nvfp4_linear_swiglu_cuda(x, *weight, bias, n)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [swiglu.nvfp4_linear_swiglu_cuda(x, *weight, bias, n) for _ in range(20)]
    for _ in range(20):
        x.normal_()
        graph.replay()
        expected = swiglu.nvfp4_linear_swiglu_cuda(x, *weight, bias, n)
        assert all(torch.equal(out, expected) for out in outs)
