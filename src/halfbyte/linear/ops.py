"""Registers kernels as PyTorch operators, for `torch.compile` and CUDA graphs.

Dynamo cannot trace Triton launches, ctypes calls and CUDA C++. As an operator with a fake kernel
(which returns shape and dtype without running), a call is one node of the graph.

For authors of kernels, beside the kernel class:

    @linear_op("nvfp4_linear_cuda")
    def _nvfp4_linear_cuda(
        x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, alpha: torch.Tensor,
        bias: torch.Tensor | None, part_sizes: list[int], n: int, batch_invariant: bool,
    ) -> torch.Tensor:
        ...                                   # [..., K] -> [..., n]

and `apply_weights` calls `_nvfp4_linear_cuda(x, ...)` like any function. Rules:

- The first argument is `x`; one argument is `n: int`, the output features. The result is a
  new, contiguous tensor `[*x.shape[:-1], n]` of x's dtype and on its device: that is what the fake
  kernel promises. A view of x or of a weight must not be returned.
- Annotate everything: Tensor, `Tensor | None`, `list[int]`, int, float, bool, str. Pass tensors
  as arguments, never inside objects: a graph replaces only its inputs.
- Name arguments that an operator writes (a workspace, counters) in `mutates_args`; memory that it
  allocates and frees itself does not count. Under CUDA graph capture it must not synchronise, read
  a tensor's value on the host or allocate pinned memory, and must launch on
  `torch.cuda.current_stream()`.
- Compile and tune in `process_weights_after_loading` or in the first eager call, never in capture.
- The operators are for inference: there is no derivative, and `backward` through one is an error.
- Without tracing, profiling or autograd, a call skips the dispatcher (`_can_skip_dispatcher`).
"""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import is_grad_enabled
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from halfbyte.kernels.runtime.operators import make_operator

LinearOp = Callable[..., torch.Tensor]


def linear_op(name: str, *, mutates_args: Iterable[str] = ()) -> Callable[[LinearOp], LinearOp]:
    """Make a function the operator `torch.ops.halfbyte.<name>`, with a fake kernel.

    Args:
        name: of the operator, by convention `nvfp4_linear_<backend>`.
        mutates_args: names of the tensor arguments that the function writes.

    Returns:
        A decorator that returns the operator; its arguments are the function's.

    Raises:
        TypeError: the function has no first argument `x` or no argument `n`.
    """

    def register(function: LinearOp) -> LinearOp:
        parameters = list(signature(function).parameters)
        if parameters[:1] != ["x"] or "n" not in parameters:
            raise TypeError(
                f"{name}: expected arguments (x, ..., n: int, ...), got ({', '.join(parameters)})"
            )

        def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
            arguments = dict(zip(parameters, args, strict=False)) | kwargs
            x = arguments["x"]
            return x.new_empty((*x.shape[:-1], arguments["n"]))

        operator: LinearOp = make_operator(name, function, fake, mutates_args=mutates_args)

        @wraps(function)
        def call(x: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            return (function if _can_skip_dispatcher(x) else operator)(x, *arguments, **named)

        return call

    return register


def _can_skip_dispatcher(x: torch.Tensor) -> bool:
    """Whether a call may skip the dispatcher: nothing traces, profiles or differentiates.

    Without a CUDA graph a step is bound by host time, and dispatching an operator to its Python
    function takes a fifth of a layer's.
    """
    return (
        not is_compiling()
        and type(x) is torch.Tensor  # fake tensors and other subclasses must be dispatched
        and not is_grad_enabled()
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
        and peek_interpreter_stack() is None
        and not _get_tracing_state()
        and not _profiler_enabled()
    )
