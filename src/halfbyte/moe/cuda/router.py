"""Launches the router of a MoE layer for few tokens, `router.cu`; from SM90, which has clusters."""

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import allocate, contiguous_memory
from halfbyte.kernels.runtime.parameters import KernelArguments
from halfbyte.linear.w4a16.gpu import dtype_macros, gpu_of
from halfbyte.linear.w4a16.packed_words import DTYPES

MAX_TOKENS = 256
"""Max tokens: every 8 of them read the whole gate, from L2."""
_OLDEST = 90
_MAX_EXPERTS, _MAX_TOP_K, _SIZE_MULTIPLE = 256, 32, 8
_TILE, _RANKS, _WARPS = 16, 8, 8
"""Experts of a warp, CTAs of a cluster, and warps of a CTA, more if there are more tiles."""


class Params(ctypes.Structure):
    """`Params` of `router.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate", "bias", "padding", "weights", "ids")),
        *((name, ctypes.c_int) for name in ("m", "renormalize")),
    )


class RouterShape(NamedTuple):
    """A router; what `router.cu` is compiled for."""

    num_experts: int
    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @property
    def is_supported(self) -> bool:
        """Whether the kernel takes it, on a GPU that has clusters."""
        return (
            self.dtype in DTYPES
            and self.num_experts <= _MAX_EXPERTS
            and self.top_k <= min(_MAX_TOP_K, self.num_experts)
            and self.hidden_size % _SIZE_MULTIPLE == 0
        )

    @property
    def tiles(self) -> int:
        """Of experts."""
        return -(-self.num_experts // _TILE)

    @property
    def split(self) -> int:
        """Warps that share the k of a CTA."""
        return max(1, _WARPS // self.tiles)

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.tiles * self.split

    @property
    def shared_bytes(self) -> int:
        """Of a CTA: sums of a token's logits from all warps of the cluster, keys, a barrier."""
        return self.tiles * 4 * _TILE * (_RANKS * self.split + 1) + 8

    def macros(self) -> tuple[tuple[str, int], ...]:
        """Macros of the source."""
        return (
            *dtype_macros(self.dtype),
            ("EXPERTS", self.num_experts),
            ("K", self.hidden_size),
            ("SPLIT", self.split),
            ("TOP_K", self.top_k),
        )


def runs_on(device: torch.device) -> bool:
    """Whether a device has clusters of CTAs."""
    return device.type == "cuda" and gpu_of(device.index or 0).compute_capability >= _OLDEST


def route_few(
    x: torch.Tensor,
    gate: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`halfbyte.moe.route` in one launch that a CUDA graph can capture, after `compile_router`.

    Args:
        x: of `RouterShape.dtype` `[M, H]`, 1 to `MAX_TOKENS` tokens, contiguous and aligned to 16
            bytes.
        gate: `[E, H]`, contiguous and aligned; not written by the launch in front.
        bias, padding: `[E]` and `[M]`, contiguous.
        top_k, renormalize: as for `halfbyte.moe.route`.
    """
    m, hidden = x.shape
    device = x.get_device()
    shape = RouterShape(len(gate), hidden, top_k, x.dtype)
    arguments = KernelArguments(Params, m=m, renormalize=renormalize)
    weights, ids = (
        allocate(contiguous_memory((m, top_k), t), device) for t in (torch.float32, torch.int32)
    )
    arguments.bind(x=x, gate=gate, weights=weights, ids=ids)
    optional = {"bias": bias, "padding": padding}
    arguments.bind(**{name: t for name, t in optional.items() if t is not None})
    kernel, grid = compile_router(shape, device), -(-m // _RANKS) * _RANKS
    nvrtc.launch(kernel, grid, shape.threads, (arguments.params,), overlap=True)
    return weights, ids


@lru_cache(maxsize=256)
def compile_router(shape: RouterShape, device: int) -> nvrtc.Kernel:
    """The kernel of a router."""
    functions = (("moe_route", shape.shared_bytes),)
    return nvrtc.load("moe/cuda/router.cu", shape.macros(), functions, device)["moe_route"]
