"""A context in which PyTorch's matrix products are batch invariant.

BLAS libraries choose the order of summation by the number of tokens, so that a token's logits
depend on the rest of the batch. In this mode every matrix product of a model (`nn.Linear`, experts,
`@`) runs in kernels with a fixed order of summation. Quantized layers have their own mode, see
`NvFp4Linear`. Also replaced: on a CPU, elementwise functions whose rounding depends on the position
in the tensor; on a GPU, means along the last dimension."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfbyte.dispatch import missing_module
from halfbyte.linear.invariant.cpu import product_cpu
from halfbyte.linear.invariant.elementwise import ELEMENTWISE

_ATEN = torch.ops.aten

# Functions that models call often and that are batch invariant as they are. They skip
# `_InvariantOperators`, which inspects each operator of all other functions.
_WITHOUT_PRODUCTS = frozenset(
    (
        *("__get__", "__getitem__", "__setitem__", "__len__", "__int__", "__bool__", "size", "dim"),
        *("__floordiv__", "data_ptr", "stride", "numel", "is_floating_point", "is_contiguous"),
        *("contiguous", "to", "float", "int", "type_as", "new_empty", "empty_like", "zeros_like"),
        *("arange", "view", "reshape", "flatten", "transpose", "unsqueeze", "chunk", "cat", "pad"),
        *("mul", "add", "add_", "sub", "neg", "div", "pow", "sum", "min", "max", "ge", "le"),
        *("clamp", "clamp_", "cos", "sin", "tanh", "softmax", "embedding", "topk", "sort"),
        *("nonzero", "cumsum", "histc", "isnan", "any", "dropout", "_set_grad_enabled"),
    )
)


class InvariantProducts(TorchFunctionMode):
    """The context; matrix products are batch invariant in the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()
        self._operators = _InvariantOperators()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _WITHOUT_PRODUCTS:
            return func(*args, **kwargs)
        is_linear = func is torch.nn.functional.linear and bool(args)
        if is_linear and _product_of(args[0].device) is not None:
            return _linear(*args, **kwargs)
        with self._operators:
            return func(*args, **kwargs)


class _InvariantOperators(TorchDispatchMode):
    """Replaces operators at dispatch, whatever function calls them; adds overhead to each."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        invariant = _PRODUCTS.get(func)
        if invariant is not None and _product_of(args[0].device) is not None:
            return invariant(*args, **kwargs)
        if func in ELEMENTWISE and args[0].device.type == "cpu":
            return ELEMENTWISE[func](*args, **kwargs)
        if func is _ATEN.mean.dim and args[0].is_cuda and _product_of(args[0].device) is not None:
            return _mean(*args, **kwargs)
        if _is_composite(func):
            with self:  # for the products within
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` in float32; a row's bits do not depend on the other rows.

    Args:
        x: `[M, K]`.
        weight: `[N, K]` of x's dtype.
    """
    function = _product_of(x.device)
    assert function is not None
    return function(x, weight)


@lru_cache(maxsize=8)
def _product_of(device: torch.device) -> Callable[[Any, Any], torch.Tensor] | None:
    if device.type == "cpu":
        return product_cpu
    if device.type == "cuda" and not missing_module("triton", ""):
        # Here, because the import needs Triton.
        from halfbyte.linear.invariant.triton import product_triton

        return product_triton
    return None


@lru_cache(maxsize=4096)
def _is_composite(func: Any) -> bool:
    """Whether an operator decomposes into others, which inference mode hides from dispatch
    modes."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = product(x.reshape(-1, x.shape[-1]), weight)
    out = out if bias is None else out + bias
    return out.to(x.dtype).view(*x.shape[:-1], len(weight))


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a, b.t()).to(a.dtype)


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return _plus(product(a, b.t()), bias, beta, alpha).to(a.dtype)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _batched(a, b).to(a.dtype)


def _baddbmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return _plus(_batched(a, b), bias, beta, alpha).to(a.dtype)


def _mv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a, b[None])[:, 0].to(a.dtype)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Grouped product of `[T, K]` and `[experts, K, N]`; `offs` are the end rows of the experts."""
    if a.dim() != 2 or b.dim() != 3 or offs is None:
        raise NotImplementedError(
            f"batch_invariant: grouped products of {list(a.shape)} and {list(b.shape)}"
        )
    out = a.new_zeros(a.shape[0], b.shape[2], dtype=torch.float32)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            out[start:end] = product(a[start:end], b[expert].t())
        start = end
    out = out if bias is None else out + bias
    return out.to(out_dtype or a.dtype)


def _mean(
    x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A mean along the last dimension, as in norms, by a product with ones. PyTorch's reduction on
    a GPU chooses the threads per row, and so the order of summation, by the number of rows."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    x = x if dtype is None else x.to(dtype)
    if [d % x.dim() for d in dims] != [x.dim() - 1]:
        raise NotImplementedError(f"batch_invariant: a mean of {list(x.shape)} along {dim}")
    size = x.shape[-1]
    total = product(x.reshape(-1, size), x.new_ones(1, 1).expand(1, size))
    out = (total / size).to(x.dtype).view(*x.shape[:-1], 1)
    return out if keepdim else out[..., 0]


def _batched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not len(a):
        return a.new_zeros(a.shape[0], a.shape[1], b.shape[2], dtype=torch.float32)
    return torch.stack([product(x, y.t()) for x, y in zip(a, b, strict=True)])


def _plus(product: torch.Tensor, bias: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    """Adds in the product's dtype; rounded once afterwards, as in PyTorch."""
    scaled = product if alpha == 1 else product * alpha
    # With beta 0 the bias is ignored, even if NaN.
    return scaled if beta == 0 else scaled + (bias if beta == 1 else bias * beta)


_PRODUCTS: dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.mm.default: _mm,
    _ATEN.addmm.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN.baddbmm.default: _baddbmm,
    _ATEN.mv.default: _mv,
    _ATEN._grouped_mm.default: _grouped_mm,
}
