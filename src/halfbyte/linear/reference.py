"""Dequantize and multiply, in PyTorch: the oracle of every linear kernel.

`e2m1 * block_scale` has at most 6 significant bits, so the operands are exact in float32 (also in
TF32, for 16-bit activations). Accumulators are multiplied by the global scale of each part, the
bias is added, and the result is rounded once.

W4A4 is emulated: the activations are quantized as for native kernels (`numerics.nvfp4.quantize`
with the layer's `input_global_scale`), and products of two such values, with at most 12 bits, are
exact.

Batch invariance: a BLAS chooses its order of summation by the shape of the product, so the
batch-invariant mode uses one shape only: `TILE_M` tokens, padded with zeros, in a new buffer
(alignment matters as well). 16 rows fill whole register tiles of every BLAS in use, so that the
position in a tile does not matter either; tests check this."""

from typing import ClassVar

import torch
from torch import nn

from halfbyte.dispatch import Answer
from halfbyte.linear.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from halfbyte.linear.ops import linear_op
from halfbyte.numerics import e2m1, e4m3, nvfp4

TILE_M = 16
# Weights dequantized at a time. Bounds the workspace (64 MiB), and depends on the layer alone.
_CHUNK_VALUES = 1 << 24


@linear_op("nvfp4_linear_reference")
def nvfp4_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    input_global_scale: torch.Tensor | None,
    part_sizes: list[int],
    n: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """x times NVFP4 weights.

    Args:
        x: float `[..., K]`.
        weight: uint8 `[N, K/2]`.
        weight_scale: float8_e4m3fn `[N, K/16]`.
        alpha: float32 `[P]`, multiplies the accumulators of each part.
        bias: `[N]` or None.
        input_global_scale: float32 `[]`, decode, to quantize x (W4A4); None for W4A16.
        part_sizes: rows of each part, summing to N.
        n: N.
        batch_invariant: a token's bits do not depend on the other tokens.

    Returns:
        `[..., N]` of x's dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    if input_global_scale is not None:
        rows = _values(*nvfp4.quantize(rows, input_global_scale))
    accumulators = _products(rows.float(), weight, weight_scale, batch_invariant)
    for part, factor in zip(accumulators.split(part_sizes, dim=1), alpha, strict=True):
        part *= factor
    if bias is not None:
        accumulators += bias.float()
    return accumulators.to(x.dtype).view(*x.shape[:-1], n)


def _values(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 `[..., D]`: `e2m1 * block_scale`, exact, without global scales."""
    values = e2m1.decode_packed(data).unflatten(-1, (scales.shape[-1], nvfp4.BLOCK_SIZE))
    return (values * e4m3.decode(scales)[..., None]).flatten(-2)


def _products(
    rows: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, batch_invariant: bool
) -> torch.Tensor:
    """float32 `[M, N]`: `rows [M, K]` times the weights without their global scales."""
    (m, k), n = rows.shape, weight.shape[0]
    accumulators = rows.new_empty((m, n))
    chunk = max(1, _CHUNK_VALUES // k)
    for start in range(0, n, chunk):
        columns = slice(start, start + chunk)
        values = _values(weight[columns], weight_scale[columns]).t()
        accumulators[:, columns] = product(rows, values, batch_invariant)
    return accumulators


def product(rows: torch.Tensor, values: torch.Tensor, batch_invariant: bool) -> torch.Tensor:
    """`rows [M, K] @ values [K, N]`; batch-invariant in tiles of `TILE_M` rows."""
    if not batch_invariant:
        return rows @ values
    m, k = rows.shape
    padded = rows.new_zeros((-(-m // TILE_M) * TILE_M, k))
    padded[:m] = rows
    result = rows.new_empty((padded.shape[0], values.shape[1]))
    for tile, out in zip(padded.split(TILE_M), result.split(TILE_M), strict=True):
        out.copy_(tile @ values)
    return result[:m]


class ReferenceKernel(NvFp4LinearKernel):
    """`nvfp4_linear_reference` on the tensors as loaded."""

    name: ClassVar[str] = "reference"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Everywhere."""
        return True, "runs wherever PyTorch does"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """Every layer."""
        return True, "every shape, W4A16 and emulated W4A4"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Does nothing: the kernel uses the tensors as loaded."""

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `NvFp4LinearKernel.apply_weights`."""
        return nvfp4_linear_reference(
            x,
            layer.weight,
            layer.weight_scale,
            layer.alpha,
            bias,
            layer.input_global_scale if self.config.quantize_activations else None,
            list(self.config.part_sizes or (self.config.n,)),
            self.config.n,
            self.config.batch_invariant,
        )

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's own tensors."""
        weight, weight_scale = layer.get_parameter("weight"), layer.get_parameter("weight_scale")
        return weight.detach(), weight_scale.detach()
