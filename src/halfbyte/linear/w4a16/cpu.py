"""C++ on CPUs, W4A16, with AVX-512, AVX2 or portable code.

Weights are transposed so that a vector holds 16 rows (`kernels/cpu/linear/linear.h`): strips of 16
rows, chunks of 64 columns, words of eight codes. The bytes stay the same, so the inverse is exact.

The order of summation is fixed, so a token's bits do not depend on the batch.
"""

import ctypes
import threading
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from halfbyte.dispatch import Answer
from halfbyte.kernels.cpu.library import FLOATS, is_built, library
from halfbyte.linear.base import NvFp4LinearLayerConfig
from halfbyte.linear.ops import linear_op
from halfbyte.linear.tensors import set_tensor, tensor_of
from halfbyte.linear.w4a16.row_scaled import RowScaledKernel

STRIP = 16
"""Rows of weights that are interleaved."""
CHUNK = 64
"""Weights are padded with zeros to a multiple of this many columns."""

# Min M for PyTorch's dense product on dequantized weights, where PyTorch uses matrix units that our
# kernel does not (Intel's or Apple's AMX). Dequantizing costs as much as some 30 tokens.
_MIN_DENSE_TOKENS = 48
_DENSE_VALUES = 1 << 21  # dequantized at a time: most of them stay in the cache
_PADDING = 32  # columns of padding between their rows
_KEEP = threading.local()


class _Call(ctypes.Structure):
    """`LinearCall` of `linear.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "row_scales")),
        *((name, ctypes.c_void_p) for name in ("bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "out_stride", "rows", "n", "k")),
        *((name, ctypes.c_int32) for name in ("format", "bias_format", "threads", "unused")),
    )


class CpuPackedWeight(NamedTuple):
    """NVFP4 weights `[N, K]` in the kernel's layout, contiguous."""

    codes: torch.Tensor
    """uint8 `[strips, chunks, 512]`, in each `[word, row, byte]`."""
    scales: torch.Tensor
    """float8_e4m3fn or its bytes `[strips, chunks, 64]`, in each `[block, row]`."""
    row_scales: torch.Tensor
    """float32 `[N]`, the global scale of each row's part."""


def pack_weight(
    weight: torch.Tensor, weight_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 weights in the kernel's order, padded with zeros.

    Args:
        weight: uint8 `[N, K/2]`, the even column in the low nibble.
        weight_scale: float8_e4m3fn `[N, K/16]`.

    Returns:
        `codes` and `scales` of a `CpuPackedWeight`.
    """
    n, blocks = weight_scale.shape
    strips, chunks = -(-n // STRIP), -(-blocks * 16 // CHUNK)
    codes = weight.new_zeros(strips * STRIP, chunks * CHUNK // 2)
    codes[:n, : blocks * 8] = weight
    codes = codes.view(torch.int32).view(strips, STRIP, chunks, CHUNK // 8)
    scales = weight.new_zeros(strips * STRIP, chunks * CHUNK // 16)
    scales[:n, :blocks] = weight_scale.view(torch.uint8)
    scales = scales.view(strips, STRIP, chunks, CHUNK // 16)
    return (
        codes.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.uint8),
        scales.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.float8_e4m3fn),
    )


def unpack_weight(
    codes: torch.Tensor, scales: torch.Tensor, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` and `weight_scale` that `pack_weight` was given, of N rows and K columns."""
    strips, chunks = codes.shape[:2]
    words = codes.view(torch.int32).view(strips, chunks, CHUNK // 8, STRIP).permute(0, 3, 1, 2)
    weight = words.reshape(strips * STRIP, chunks * CHUNK // 8)[:n].contiguous()
    permuted = scales.view(torch.uint8).view(strips, chunks, CHUNK // 16, STRIP).permute(0, 3, 1, 2)
    weight_scale = permuted.reshape(strips * STRIP, chunks * CHUNK // 16)[:n, : k // 16]
    return (
        weight.view(torch.uint8)[:, : k // 2].contiguous(),
        weight_scale.contiguous().view(torch.float8_e4m3fn),
    )


def linear_cpu(
    x: torch.Tensor,
    weight: CpuPackedWeight,
    bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = True,
) -> torch.Tensor:
    """`x @ W^T + bias`, all on the CPU.

    Sums are in float32, so is the bias's addition, and the result is rounded once.

    Args:
        x: `[M, K]` in float32, float16 or bfloat16; rows of any stride.
        weight: of `[N, K]`.
        bias: `[N]` in float32, float16 or bfloat16.
        batch_invariant: a token's bits must not depend on the batch: PyTorch's dense product is
            not used, which otherwise replaces the kernel for large M on some machines
            (`_is_dense_faster`). Bits never depend on the number of threads.

    Returns:
        `[M, N]` of x's dtype.

    Raises:
        ValueError: the weights are not in the kernel's order, or K or the bias does not fit them.
    """
    (m, k), n = x.shape, weight.row_scales.shape[0]
    _check_weight(weight, k)
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias: expected [{n}], got {list(bias.shape)}")
    if not batch_invariant and m >= _MIN_DENSE_TOKENS and _is_dense_faster(x.dtype):
        return _linear_dense(x, weight, bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(m, n)
    _loaded().halfbyte_linear(bytes(_call(x, weight, bias, out, k)))
    return out


def dequantize_cpu(
    weight: CpuPackedWeight, k: int, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The weights as `numerics.nvfp4.dequantize` gives them, but transposed: `[K, N]`.

    Bitwise equal, except for the sign of zeros.

    Args:
        weight: of `[N, K]`.
        k: K.
        dtype: float32, float16 or bfloat16.
        out: contiguous output; by default allocated.
    """
    _check_weight(weight, k)
    if out is None:
        out = torch.empty(k, weight.row_scales.shape[0], dtype=dtype, device="cpu")
    _loaded().halfbyte_linear_dequantize(bytes(_call(None, weight, None, out, k)))
    return out


def _linear_dense(
    x: torch.Tensor, weight: CpuPackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    k, n = x.shape[1], weight.row_scales.shape[0]
    out = x.new_empty(x.shape[0], n)
    strips = max(1, _DENSE_VALUES // (STRIP * k))
    # A stride that is a power of two would map all rows to a few cache sets.
    stride = min(n, strips * STRIP) + _PADDING
    workspace = _kept(k * stride, x.dtype).view(k, stride)
    for first in range(0, weight.codes.shape[0], strips):
        some, rows = slice(first, first + strips), slice(first * STRIP, (first + strips) * STRIP)
        part = CpuPackedWeight(weight.codes[some], weight.scales[some], weight.row_scales[rows])
        values = workspace[:, : part.row_scales.shape[0]]
        dequantize_cpu(part, k, x.dtype, values)
        part_bias = None if bias is None else bias[rows].to(x.dtype)
        out[:, rows] = F.linear(x, values.t(), part_bias)
    return out


def _kept(size: int, dtype: torch.dtype) -> torch.Tensor:
    """This thread's buffer, reused: page faults of a new one cost as much as the product."""
    num_bytes = size * dtype.itemsize
    kept = getattr(_KEEP, "bytes", None)
    if kept is None or kept.nbytes < num_bytes:
        kept = _KEEP.bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return kept[:num_bytes].view(dtype)


def _is_dense_faster(dtype: torch.dtype) -> bool:
    if not _loaded().halfbyte_linear_has_wide_vectors():
        return True
    # As PyTorch itself checks; there is no public name so far.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return dtype == torch.bfloat16 and bool(has_amx())


def _call(
    x: torch.Tensor | None,
    weight: CpuPackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    k: int,
) -> _Call:
    return _Call(
        x=None if x is None else x.data_ptr(),
        codes=weight.codes.data_ptr(),
        scales=weight.scales.data_ptr(),
        row_scales=weight.row_scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_stride=0 if x is None else x.stride(0),
        out_stride=out.stride(0),
        rows=out.shape[0],
        n=weight.row_scales.shape[0],
        k=k,
        format=FLOATS[out.dtype],
        bias_format=0 if bias is None else FLOATS[bias.dtype],
        threads=torch.get_num_threads(),
    )


def _loaded() -> ctypes.CDLL:
    loaded = library()
    if loaded is None:
        raise RuntimeError("the CPU kernels were not built")
    return loaded


def _check_weight(weight: CpuPackedWeight, k: int) -> None:
    """The kernel trusts these shapes. One condition, because several would slow small layers."""
    codes, scales, row_scales = weight
    strips, chunks = -(-row_scales.shape[0] // STRIP), -(-k // CHUNK)
    if not (
        k % 16 == 0
        and codes.shape == (strips, chunks, STRIP * CHUNK // 2)
        and scales.shape == (strips, chunks, STRIP * CHUNK // 16)
        and codes.dtype == torch.uint8
        and scales.dtype.itemsize == 1
        and row_scales.dtype == torch.float32
        and codes.is_contiguous()
        and scales.is_contiguous()
        and row_scales.is_contiguous()
    ):
        found = ", ".join(
            f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for name, tensor in weight._asdict().items()
        )
        raise ValueError(
            f"weight: expected contiguous codes uint8 [{strips}, {chunks}, 512], scales "
            f"float8_e4m3fn [{strips}, {chunks}, 64] and row_scales float32 for K = {k}, a "
            f"multiple of 16; got {found}"
        )


@linear_op("nvfp4_linear_cpu")
def nvfp4_linear_cpu(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """`linear_cpu` of x `[..., K]`, to `[..., N]`; other arguments as in `CpuPackedWeight`."""
    weight = CpuPackedWeight(codes, scales, row_scales)
    rows = x.reshape(-1, x.shape[-1])
    out = linear_cpu(rows, weight, bias, batch_invariant=batch_invariant)
    return out.view(*x.shape[:-1], n)


class CpuKernel(RowScaledKernel):
    """`linear_cpu`; built with the package.

    Its form of a layer: `weight` and `weight_scale` in the kernel's order, and `weight_row_scale`,
    float32 `[N]`, the global scale of each row's part.
    """

    name: ClassVar[str] = "cpu"
    product = staticmethod(nvfp4_linear_cpu)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the kernel was built; every machine has a CPU."""
        return is_built("streams packed weights")

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """W4A16 of every shape, on the CPU."""
        if config.device_type != "cpu":
            return False, f"tensors are on {config.device_type}, not on the CPU"
        if config.quantize_activations:
            return False, "W4A16 only: it does not quantize activations"
        return True, "W4A16, every shape, batch-invariant"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Transpose codes and scales, and add the global scale of every row."""
        codes, scales = pack_weight(tensor_of(layer, "weight"), tensor_of(layer, "weight_scale"))
        set_tensor(layer, "weight", codes)
        set_tensor(layer, "weight_scale", scales)
        self.set_row_scales(layer)

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The same bytes in the order as loaded."""
        return unpack_weight(
            tensor_of(layer, "weight"),
            tensor_of(layer, "weight_scale"),
            self.config.n,
            self.config.k,
        )
