"""`moe_experts`: the experts of a mixture-of-experts layer, after its router."""

import os

import torch

from halfbyte.dispatch import on_this_machine
from halfbyte.moe.as_loaded import AsLoadedKernel
from halfbyte.moe.base import MoeConfig
from halfbyte.moe.experts import PackedExperts
from halfbyte.moe.registry import BACKEND_VARIABLE, MOE_BACKENDS, init_moe_kernel

_IDS = (torch.int32, torch.int64)
_WEIGHTS = (torch.float32, torch.float16, torch.bfloat16)


def moe_experts(
    hidden: torch.Tensor,
    experts: PackedExperts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, see `moe/base.py`.

    A kernel that repacks weights (`cuda`, `cpu`) does so in every call of this function;
    `NvFp4Experts` does it once. That takes longer than a call, so on a GPU the default is a kernel
    that uses weights as loaded. Repacking reads results of the GPU, so such a call cannot be
    captured in a CUDA graph.

    Args:
        hidden: float32, float16 or bfloat16 `[M, H]`, M >= 0.
        experts: of the layer, on the same device.
        topk_ids: int32 or int64 `[M, top_k]`, any top_k >= 1. Ids outside `0 .. E-1` add nothing.
        topk_weights: floating point `[M, top_k]`, used as given.
        batch_invariant: a token's bits do not depend on the other tokens.
        backend: a name of `MOE_BACKENDS`; by default that of the environment variable, else the
            first that supports the layer, on a GPU without repacking it.

    Returns:
        `[M, H]` of the dtype of `hidden`.

    Raises:
        ValueError: an argument that does not fit; the message names it.
        NoImplementationError: no backend, or not the requested one, can do the work.
    """
    check_arguments(hidden, experts.hidden_size, experts.device, topk_ids, topk_weights)
    config = on_this_machine(MoeConfig.of(experts, hidden.dtype, batch_invariant))
    if backend is None and hidden.is_cuda and not os.environ.get(BACKEND_VARIABLE):
        backend = _without_repacking(config)
    kernel = init_moe_kernel(config, backend)
    return kernel.apply(kernel.prepare(experts), hidden, topk_ids, topk_weights)


def _without_repacking(config: MoeConfig) -> str | None:
    """The first backend that supports a layer with its weights as loaded."""
    for verdict in MOE_BACKENDS.explain(config):
        if verdict.usable and issubclass(MOE_BACKENDS.get(verdict.name), AsLoadedKernel):
            return verdict.name
    return None


def check_arguments(
    hidden: torch.Tensor,
    hidden_size: int,
    device: torch.device,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Raise ValueError unless the tensors of a call fit a layer.

    Args:
        hidden, topk_ids, topk_weights: as for `moe_experts`.
        hidden_size: H of the layer.
        device: of the layer.
    """
    if hidden.dim() != 2 or hidden.shape[1] != hidden_size:
        raise ValueError(f"hidden: expected [M, {hidden_size}], got {list(hidden.shape)}")
    m = hidden.shape[0]
    if topk_ids.dtype not in _IDS or topk_ids.dim() != 2 or topk_ids.shape[0] != m:
        raise ValueError(
            f"topk_ids: expected int32 or int64 [{m}, top_k], got {topk_ids.dtype} "
            f"{list(topk_ids.shape)}"
        )
    if topk_ids.shape[1] < 1:
        raise ValueError("topk_ids: expected at least one expert per token, got none")
    if topk_weights.dtype not in _WEIGHTS or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights: expected floating point {list(topk_ids.shape)}, got "
            f"{topk_weights.dtype} {list(topk_weights.shape)}"
        )
    for name, tensor in {"hidden": hidden, "ids": topk_ids, "weights": topk_weights}.items():
        if tensor.device != device:
            name = name if name == "hidden" else f"topk_{name}"
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
