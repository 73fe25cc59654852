"""Batch-invariant matrix products on a GPU: one tile size for any M and no split-K.

After Thinking Machines' "Defeating Nondeterminism in LLM Inference" (2025).
"""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from halfbyte.kernels.runtime.devices import current_device

_TILE_M, _TILE_N, _TILE_K = 64, 64, 64


# m must not specialize the kernel: another variant could round differently.
@triton.jit(do_not_specialize=["m"])
def product_kernel(
    x,
    weight,
    out,
    m,
    n,
    k,
    n_stride,
    k_stride,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    precision: tl.constexpr,
):
    """A tile of `x [m, k]` times `weight [n, k]`, transposed, in float32."""
    tiles = tl.cdiv(n, tile_n)
    # int64: vocabulary size times hidden size comes near 2^31.
    rows = (tl.program_id(0) // tiles * tile_m + tl.arange(0, tile_m)).to(tl.int64)
    columns = (tl.program_id(0) % tiles * tile_n + tl.arange(0, tile_n)).to(tl.int64)
    total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for start in range(0, k, tile_k):
        depth = start + tl.arange(0, tile_k)
        a = tl.load(
            x + rows[:, None] * k + depth[None, :],
            mask=(rows < m)[:, None] & (depth < k)[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + columns[None, :] * n_stride + depth.to(tl.int64)[:, None] * k_stride,
            mask=(columns < n)[None, :] & (depth < k)[:, None],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=precision)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out + rows[:, None] * n + columns[None, :], total, mask=mask)


def product_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` in float32, with one tile size. Never syncs the GPU.

    Args:
        x: `[M, K]` in float32, float16 or bfloat16.
        weight: `[N, K]` of x's dtype, of any strides.

    Returns:
        float32 `[M, N]`.
    """
    (m, k), n = x.shape, weight.shape[0]
    x = x.contiguous()
    out = x.new_empty(m, n, dtype=torch.float32)
    if not m * n * k:
        return out.zero_()
    with current_device(x.get_device()):
        product_kernel[(triton.cdiv(m, _TILE_M) * triton.cdiv(n, _TILE_N),)](
            x=x,
            weight=weight,
            out=out,
            m=m,
            n=n,
            k=k,
            n_stride=weight.stride(0),
            k_stride=weight.stride(1),
            tile_m=_TILE_M,
            tile_n=_TILE_N,
            tile_k=_TILE_K if x.dtype != torch.float32 else _TILE_K // 2,
            precision="ieee",  # of float32; no TF32
            num_warps=4,
            num_stages=3,
        )
    return out
