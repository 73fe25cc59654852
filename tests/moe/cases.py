"""Random experts and routing, expected results in float64, and the tolerance of kernels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from halfbyte.moe import SWIGLU, ExpertMatrices, GatedActivation, PackedExperts
from halfbyte.moe.cuda.packed import PackedMatrix, matrix_of_tensors, pack_matrices
from halfbyte.moe.experts import WeightFormat
from halfbyte.numerics import block_fp4, nvfp4

LIMITED = GatedActivation(alpha=1.702, limit=1.5, up_offset=1.0, interleaved=True)
"""GPT-OSS's, with a limit that values of these tests reach."""


def random_experts(
    num_experts: int = 4,
    hidden_size: int = 64,
    intermediate_size: int = 32,
    *,
    weight_format: WeightFormat = "nvfp4",
    activation: GatedActivation = SWIGLU,
    bias: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PackedExperts:
    """Experts quantized from random weights; experts and parts differ in size.

    Args:
        dtype: of biases.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrices(n: int, k: int, parts: int) -> ExpertMatrices:
        weight = torch.randn(num_experts, n, k, generator=generator) * 1.5 / k**0.5
        sizes = torch.rand(num_experts, parts, generator=generator) + 0.5
        repeats = n // parts
        if activation.interleaved:
            weight *= sizes.repeat(1, repeats)[..., None]
        else:
            weight *= sizes.repeat_interleave(repeats, 1)[..., None]
        values = torch.randn(num_experts, n, generator=generator)
        biases = values.to(dtype) if bias else None
        if weight_format == "mxfp4":
            return ExpertMatrices(*block_fp4.quantize_mxfp4(weight), None, biases)
        scale = nvfp4.global_scale_from_amax(sizes)
        empty = torch.zeros(num_experts, n, k // 2, dtype=torch.uint8)
        blocks = torch.zeros(num_experts, n, k // 16).to(torch.float8_e4m3fn)
        rows = ExpertMatrices(empty, blocks, scale).row_scales(activation.interleaved)
        return ExpertMatrices(*nvfp4.quantize(weight, rows[..., None]), scale, biases)

    gate_up = matrices(2 * intermediate_size, hidden_size, 2)
    return PackedExperts(gate_up, matrices(hidden_size, intermediate_size, 1), activation)


def on_gpu(experts: PackedExperts) -> PackedExperts:
    """The same experts on the GPU."""

    def moved(matrices: Any) -> Any:
        names = ("weight", "scales", "global_scale", "bias")
        found = {name: getattr(matrices, name) for name in names}
        return replace(matrices, **{n: t if t is None else t.cuda() for n, t in found.items()})

    return replace(experts, gate_up=moved(experts.gate_up), down=moved(experts.down))


def random_routing(
    m: int, top_k: int, num_experts: int, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 `[m, top_k]`, different ones per token, and float32 weights that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(m, num_experts, generator=generator)
    weights, ids = logits.topk(top_k, dim=-1)
    return ids, weights.softmax(-1)


def random_hidden(m: int, hidden_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random `[m, hidden_size]`."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(m, hidden_size, generator=generator).to(dtype)


def dequantized(matrices: ExpertMatrices, interleaved: bool) -> torch.Tensor:
    """float64 `[E, N, K]`."""
    if matrices.format == "mxfp4":
        return block_fp4.dequantize_mxfp4(matrices.weight, matrices.scales).double()
    e, n = matrices.weight.shape[:2]
    scale = matrices.global_scale
    assert scale is not None
    rows = torch.empty(e, n)
    for part in range(scale.shape[1]):
        size = n // scale.shape[1]
        place = (
            slice(part, None, scale.shape[1])
            if interleaved
            else slice(part * size, part * size + size)
        )
        rows[:, place] = scale[:, part, None].cpu()
    rows = rows.to(matrices.weight.device)
    return nvfp4.dequantize(matrices.weight, matrices.scales, rows[..., None], torch.float64)


def dense(
    hidden: torch.Tensor, experts: PackedExperts, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Token by token on dequantized weights, every operation in the dtype of `hidden`."""
    activation, dtype = experts.activation, hidden.dtype
    gate_up = dequantized(experts.gate_up, activation.interleaved).to(dtype)
    down = dequantized(experts.down, False).to(dtype)
    result = torch.zeros_like(hidden)
    for m in range(hidden.shape[0]):
        for expert, weight in zip(ids[m].tolist(), weights[m], strict=True):
            if not 0 <= expert < experts.num_experts:
                continue
            biases = [
                None if x.bias is None else x.bias[expert].to(dtype)
                for x in (experts.gate_up, experts.down)
            ]
            both = F.linear(hidden[m], gate_up[expert], biases[0])
            half = both.shape[-1] // 2
            gate, up = both[:half], both[half:]
            if activation.interleaved:
                gate, up = both[::2], both[1::2]
            if activation.limit is not None:
                gate = gate.clamp(max=activation.limit)
                up = up.clamp(-activation.limit, activation.limit)
            middle = gate * torch.sigmoid(gate * activation.alpha) * (up + activation.up_offset)
            result[m] += F.linear(middle, down[expert], biases[1]) * weight.to(dtype)
    return result


def assert_close_enough(
    out: torch.Tensor,
    hidden: torch.Tensor,
    experts: PackedExperts,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Tier 2: `max|out - ref64| <= 2 max|baseline - ref64| + 1e-5 max|ref64|`."""
    assert out.shape == hidden.shape
    assert out.dtype == hidden.dtype
    assert out.is_contiguous()
    if not out.numel():
        return
    wanted = dense(hidden.double(), experts, ids, weights)
    usual = dense(hidden, experts, ids, weights).double()
    error = (out.double() - wanted).abs().max()
    allowed = 2 * (usual - wanted).abs().max() + 1e-5 * wanted.abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def packed_matrices(
    experts: PackedExperts,
    dtype: torch.dtype,
    moved: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[PackedMatrix, PackedMatrix]:
    """gate_up and down in the CUDA kernels' order, for hidden states of a dtype.

    Args:
        moved: applied to each tensor.
    """
    gate_up, down = experts.gate_up, experts.down
    tensors = pack_matrices("gate_up", gate_up, dtype, experts.activation)
    tensors |= pack_matrices("down", down, dtype)
    if moved is not None:
        tensors = {name: moved(tensor) for name, tensor in tensors.items()}
    return (
        matrix_of_tensors("gate_up", tensors, gate_up.n, gate_up.k),
        matrix_of_tensors("down", tensors, down.n, down.k),
    )
