"""Compiles Triton kernels for any GPU, without having it, and reports their resources."""

from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from machine_code import stack_bytes

# Shared memory of one program (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


class Usage(NamedTuple):
    """Bytes that one program of a compiled kernel takes."""

    shared: int
    stack: int
    """Per thread; more than a few bytes are spilled registers."""


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    **options: int,
) -> Usage:
    """Compile for a compute capability (90 for SM90).

    Args:
        kernel: a function under `triton.jit`.
        types: of its arguments, in Triton's notation; by default `i32`. Pointers and
            integers count as multiples of 16, as almost all are.
        constants: values of its `constexpr` arguments, or of others that are specialised.
        options: such as `num_warps`.
    """
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    divisible = [i for i, n in enumerate(names) if signature[n] == "i32" or signature[n][0] == "*"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Usage(compiled.metadata.shared, stack_bytes(compiled.asm["cubin"]))
