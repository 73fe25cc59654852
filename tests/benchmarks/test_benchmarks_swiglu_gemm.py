import pytest
import torch

from benchmarks import swiglu_gemm
from halfbyte.elementwise import rms_norm, silu_and_mul
from halfbyte.linear import NvFp4Linear


def layer(k: int, n: int) -> NvFp4Linear:
    linear = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    return NvFp4Linear.from_float(linear, backend="reference")


def test_both_ways_get_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gate_up, down = layer(64, 256), layer(128, 64)
    x = torch.randn(5, 64).bfloat16()
    out = swiglu_gemm.layers_in_a_row([(gate_up, down)], x, swiglu_gemm.behind)
    y = rms_norm(2 * x, torch.ones(64, dtype=torch.bfloat16), swiglu_gemm._EPSILON)
    assert torch.equal(out, down(silu_and_mul(gate_up(y))))
    gate_up.weight_row_scale = torch.ones(256)

    def operator(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        weight = (gate_up.weight, gate_up.weight_scale, gate_up.weight_row_scale)
        assert all(a is b for a, b in zip(arguments, (*weight, None), strict=False))
        assert arguments[-1] == 128
        return silu_and_mul(gate_up(x))

    monkeypatch.setattr(swiglu_gemm, "nvfp4_linear_swiglu_cuda", operator)
    assert torch.equal(swiglu_gemm.layers_in_a_row([(gate_up, down)], x, swiglu_gemm.inside), out)
