"""`route`: which experts a token has, and with which weights."""

from typing import NamedTuple

import torch
from torch.nn.functional import linear

from halfbyte.dispatch import is_installed
from halfbyte.linear.tensors import matrix_of


class Routing(NamedTuple):
    """Experts of tokens, that with the largest logit first."""

    weights: torch.Tensor
    """float32 `[M, top_k]`."""
    ids: torch.Tensor
    """int32 `[M, top_k]`."""


def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    padding: torch.Tensor | None = None,
) -> Routing:
    """The softmax router of Qwen-MoE, Mixtral and GPT-OSS.

    Experts with the largest logits are chosen, of equal ones the lower number. Logits are rounded
    to the dtype of `x`, as by the models' linear layers; the softmax is in float32. From SM90 up
    to `moe.cuda.router.MAX_TOKENS` tokens take one kernel: a token's bits do not depend on the
    others, but more than that take PyTorch's operators.

    Args:
        x: floating point `[M, H]`.
        gate: `[E, H]`, of the dtype of x.
        top_k: experts per token, at most E.
        bias: `[E]`, of the dtype of x.
        renormalize: whether the weights of a token add up to 1; otherwise they are probabilities.
        padding: bool `[M]`, tokens that get experts -1 with weight 0.

    Raises:
        ValueError: an argument that does not fit; the message names it.
    """
    _check(x, gate, top_k, bias, padding)
    if fits_kernel(x, gate, top_k):
        from halfbyte.moe.cuda.router import route_few

        bias, padding = (None if t is None else t.contiguous() for t in (bias, padding))
        return Routing(*route_few(matrix_of(x), gate, top_k, bias, renormalize, padding))
    return route_reference(x, gate, top_k, bias=bias, renormalize=renormalize, padding=padding)


def route_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    padding: torch.Tensor | None = None,
) -> Routing:
    """`route` by PyTorch's operators."""
    logits = linear(x, gate, bias).float()
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(dim=-1).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    ids = ids.int()
    if padding is not None:
        weights = weights.masked_fill(padding[:, None], 0)
        ids = ids.masked_fill(padding[:, None], -1)
    return Routing(weights.contiguous(), ids)


def fits_kernel(x: torch.Tensor, gate: torch.Tensor, top_k: int) -> bool:
    """Whether `router.cu` takes a call. It reads the gate before the launch in front has ended, so
    that must not be a copy of the gate."""
    if not x.is_cuda or not is_installed("cuda.bindings"):
        return False
    if not gate.is_contiguous() or gate.data_ptr() % 16:
        return False
    # Here: the import needs NVRTC's bindings.
    from halfbyte.moe.cuda.router import MAX_TOKENS, RouterShape, runs_on

    shape = RouterShape(len(gate), gate.shape[1], top_k, x.dtype)
    return 0 < len(x) <= MAX_TOKENS and shape.is_supported and runs_on(x.device)


def prepare_kernel(gate: torch.Tensor, top_k: int) -> None:
    """Compile the kernel of a router, if there is one, so that graph capture compiles nothing.

    Args:
        gate, top_k: as for `route`.
    """
    if fits_kernel(gate[:1], gate, top_k):
        from halfbyte.moe.cuda.router import RouterShape, compile_router

        compile_router(RouterShape(len(gate), gate.shape[1], top_k, gate.dtype), gate.get_device())


def _check(
    x: torch.Tensor,
    gate: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
    padding: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of `route` fit."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x: expected floating point [M, H], got {x.dtype} {list(x.shape)}")
    experts = len(gate)
    tensors = {
        "gate": (gate, x.dtype, [experts, x.shape[1]]),
        "bias": (bias, x.dtype, [experts]),
        "padding": (padding, torch.bool, [len(x)]),
    }
    for name, (tensor, dtype, shape) in tensors.items():
        if tensor is None:
            continue
        if list(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != x.device:
            raise ValueError(
                f"{name}: expected {dtype} {shape} on {x.device}, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
    if not 1 <= top_k <= len(gate):
        raise ValueError(f"top_k: expected 1 to {len(gate)} (the experts), got {top_k}")
