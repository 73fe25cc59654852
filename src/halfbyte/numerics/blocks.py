"""Helpers shared by the block-scaled formats."""

import torch


def split_blocks(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """float32 view `[..., D/block_size, block_size]` of `x [..., D]`.

    Raises:
        TypeError: `x` is not a floating-point tensor.
        ValueError: D is not a multiple of `block_size`.
    """
    if not x.is_floating_point():
        raise TypeError(f"x: expected a floating-point tensor, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % block_size:
        raise ValueError(
            f"x: the last dimension must be a multiple of {block_size}, got shape {tuple(x.shape)}"
        )
    return x.float().unflatten(-1, (x.shape[-1] // block_size, block_size))


def block_amax(blocks: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each block `[..., n]` -> `[...]`; NaN if the block holds one."""
    return blocks.abs().amax(dim=-1)


def check_packed(data: torch.Tensor, scales: torch.Tensor, block_size: int) -> None:
    """Raise ValueError unless `data [..., D/2]` and `scales [..., D/block_size]` fit together."""
    if data.dtype != torch.uint8:
        raise ValueError(f"data: expected packed uint8, got {data.dtype}")
    if scales.dtype.itemsize != 1:
        raise ValueError(f"scales: expected a one-byte dtype, got {scales.dtype}")
    expected = (*data.shape[:-1], data.shape[-1] * 2 // block_size)
    if data.shape[-1] * 2 % block_size or tuple(scales.shape) != expected:
        raise ValueError(
            f"scales: expected shape {expected} for data of shape {tuple(data.shape)} "
            f"in blocks of {block_size}, got {tuple(scales.shape)}"
        )
