"""RMSNorm, SwiGLU and rotary embedding: operators on a CPU, and the kernels run on the host."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from cuda_on_host import guarded, launch, needs_compiler, overlapping_kernels
from halfbyte.elementwise import (
    add_rms_norm,
    norms,
    operands,
    qk_norm_rotary_embedding,
    rms_norm,
    rotary,
    rotary_embedding,
    silu_and_mul,
)
from linear.cases import random_layer

DTYPES = [torch.bfloat16, torch.float16]


def on_host(call: Any, *arguments: Any) -> Any:
    """A launcher's result with its kernel run on the CPU; memory after its tensors is unmapped."""

    def empty(size: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return guarded(size, dtype) if 0 not in size else torch.zeros(size, dtype=dtype)

    def like(x: torch.Tensor) -> torch.Tensor:
        return empty(x.shape, dtype=x.dtype, device=x.device)

    moved = [
        guarded(x.shape, x.dtype).copy_(x)
        if isinstance(x, torch.Tensor) and x.is_contiguous() and x.numel()
        else x
        for x in arguments
    ]
    operands.load_kernel.cache_clear()
    with (
        overlapping_kernels(90),
        patch.object(torch, "empty", empty),
        patch.object(torch, "empty_like", like),
    ):
        result = call(*moved)
    operands.load_kernel.cache_clear()
    return result


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, ulps: float = 0.51) -> None:
    """At most `ulps` units in the last place from float64."""
    assert found.isfinite().all()
    unit = torch.finfo(found.dtype).eps * exact.abs().clamp(min=2.0**-14)
    assert ((found.double() - exact).abs() <= ulps * unit).all()


def exact_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.double()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(3, 4096), (1, 8), (5, 2880), (2, 8200)])
def test_norm_on_host(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, residual = 3 * torch.randn(2, rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    out, total = on_host(norms.normalize, x, residual, weight, 1e-5)
    exact = x.double() + residual.double()
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    assert_rounded_once(out, exact_norm(exact, weight, 1e-5))
    alone, none = on_host(norms.normalize, x, None, weight, 1e-5)
    assert none is None
    assert_rounded_once(alone, exact_norm(x.double(), weight, 1e-5))


@needs_compiler
def test_norm_on_host_of_rows_with_a_stride() -> None:
    x = torch.randn(4, 3 * 64).bfloat16()[:, 64:128]
    weight = torch.ones(64).bfloat16()
    out, _ = on_host(norms.normalize, x, None, weight, 0.0)
    assert_rounded_once(out, exact_norm(x.double(), weight, 0.0))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(3, 1000), (1, 8), (20, 48)])
def test_gate_on_host(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x = (4 * torch.randn(rows, 2 * size)).to(dtype)
    x[0, 0], x[-1, 1] = 200.0, -200.0
    found = on_host(norms.gate, x)
    first, second = x.double().chunk(2, dim=-1)
    assert_rounded_once(found, F.silu(first) * second, 0.6)


ROTARY = {
    "llama": (32, 8, 128, 128, False),
    "partial": (3, 1, 80, 32, False),
    "interleaved": (4, 4, 64, 64, True),
    "partial-interleaved": (2, 2, 96, 48, True),
}


def rotary_arguments(name: str, dtype: torch.dtype, tokens: int = 7) -> tuple[Any, ...]:
    heads, kv_heads, head_size, rotary, interleaved = ROTARY[name]
    torch.manual_seed(0)
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * head_size).to(dtype)
    query, key, _ = fused.split([x * head_size for x in (heads, kv_heads, kv_heads)], dim=1)
    angles = torch.rand(50, rotary // 2) * 100
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
    positions = torch.randint(0, 50, (tokens,))
    return positions, query, key, table, head_size, interleaved


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_on_host_equals_the_operator_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    arguments = rotary_arguments(name, dtype)
    for found, expected in zip(
        on_host(rotary.rotate, *arguments), rotary_embedding(*arguments), strict=True
    ):
        assert torch.equal(found, expected)


def head_norms(name: str, dtype: torch.dtype) -> rotary.HeadNorms:
    query_weight, key_weight = torch.randn(2, ROTARY[name][2]).to(dtype)
    return rotary.HeadNorms(query_weight, key_weight, 1e-5)


def qk_norm_rotary_arguments(
    name: str, dtype: torch.dtype, tokens: int = 7
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of the operator and of its launcher."""
    arguments = rotary_arguments(name, dtype, tokens)
    own = head_norms(name, dtype)
    return (*arguments[:3], *own, *arguments[3:]), (*arguments, own)


def exact_qk_norm_rotary(x: torch.Tensor, weight: torch.Tensor, arguments: tuple[Any, ...]) -> Any:
    """In float64."""
    positions, _, _, table, head_size, interleaved = arguments
    heads = exact_norm(x.double().unflatten(-1, (-1, head_size)), weight, 1e-5)
    cosines, sines = table.double()[positions][:, None].chunk(2, dim=-1)
    half = cosines.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    out = heads.clone()
    out[..., first] = heads[..., first] * cosines - heads[..., second] * sines
    out[..., second] = heads[..., second] * cosines + heads[..., first] * sines
    return out.flatten(1)


def assert_normed_and_rotated(found: Any, dtype: torch.dtype, arguments: tuple[Any, ...]) -> None:
    """As float64, up to one rounding and what differences of products cancel."""
    *plain, own = arguments
    for out, x, weight in zip(found, plain[1:3], own[:2], strict=True):
        exact = exact_qk_norm_rotary(x, weight, tuple(plain))
        error = (out.double() - exact).abs()
        assert (error <= torch.finfo(dtype).eps * (0.51 * exact.abs() + 1e-3)).all()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROTARY)
def test_norms_and_rotary_on_host(name: str, dtype: torch.dtype) -> None:
    of_operator, of_launcher = qk_norm_rotary_arguments(name, dtype)
    assert_normed_and_rotated(on_host(rotary.rotate, *of_launcher), dtype, of_launcher)
    assert_normed_and_rotated(qk_norm_rotary_embedding(*of_operator), dtype, of_launcher)


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 3, 29])
def test_lanes_beyond_the_last_head(tokens: int) -> None:
    """Heads of 80 channels leave lanes without values, the last warp has heads of no token."""
    _, arguments = qk_norm_rotary_arguments("partial", torch.bfloat16, tokens)
    assert_normed_and_rotated(on_host(rotary.rotate, *arguments), torch.bfloat16, arguments)


def test_norms_and_rotary_in_float32() -> None:
    """One operator computes what two compute."""
    of_operator, of_launcher = qk_norm_rotary_arguments("partial", torch.float32)
    positions, query, key, table, head_size, interleaved, own = of_launcher
    normed = [
        rms_norm(x.unflatten(-1, (-1, head_size)), weight, own.epsilon).flatten(1)
        for x, weight in zip((query, key), own[:2], strict=True)
    ]
    expected = rotary_embedding(positions, *normed, table, head_size, interleaved)
    for found, wanted in zip(qk_norm_rotary_embedding(*of_operator), expected, strict=True):
        assert torch.equal(found, wanted)


@needs_compiler
@pytest.mark.parametrize("normalizes", [False, True])
def test_positions_that_the_previous_kernel_writes(normalizes: bool) -> None:
    """Angles of outdated positions are loaded before the wait."""
    _, arguments = qk_norm_rotary_arguments("llama", torch.bfloat16)
    rest = arguments[1:] if normalizes else arguments[1:-1]
    positions = guarded(arguments[0].shape, torch.int64).copy_(arguments[0])
    for before in (
        torch.zeros_like(positions),
        torch.full_like(positions, 2**40),
        positions.clone(),
    ):
        with (
            overlapping_kernels(90),
            patch("cuda_on_host.build.launch", partial(launch, late=(positions, before))),
        ):
            operands.load_kernel.cache_clear()
            found = rotary.rotate(positions, *rest)
        operands.load_kernel.cache_clear()
        for out, expected in zip(found, on_host(rotary.rotate, *arguments[:1], *rest), strict=True):
            assert torch.equal(out, expected)


@needs_compiler
def test_no_tokens() -> None:
    assert on_host(norms.gate, torch.zeros(0, 64).bfloat16()).shape == (0, 32)
    assert on_host(
        norms.normalize, *torch.zeros(2, 0, 64).bfloat16(), torch.ones(64).bfloat16(), 0.1
    )
    for arguments in (
        rotary_arguments("llama", torch.bfloat16, tokens=0),
        qk_norm_rotary_arguments("llama", torch.bfloat16, tokens=0)[1],
    ):
        for x in on_host(rotary.rotate, *arguments):
            assert x.numel() == 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_operators_on_a_cpu(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 2, 3, 64).to(dtype)
    weight = torch.randn(64).to(dtype)
    torch.library.opcheck(rms_norm, (x, weight, 1e-5))
    torch.library.opcheck(add_rms_norm, (x, residual, weight, 1e-5))
    torch.library.opcheck(silu_and_mul, (x,))
    torch.library.opcheck(rotary_embedding, rotary_arguments("llama", dtype))
    torch.library.opcheck(qk_norm_rotary_embedding, qk_norm_rotary_arguments("llama", dtype)[0])
    if dtype == torch.float32:
        expected = F.rms_norm(x + residual, (64,), weight, 1e-5)
        out, total = add_rms_norm(x, residual, weight, 1e-5)
        torch.testing.assert_close(out, expected)
        assert torch.equal(total, x + residual)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5))
        torch.testing.assert_close(silu_and_mul(x), F.silu(x[..., :32]) * x[..., 32:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_results_are_contiguous(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 60).to(dtype).transpose(0, 1)
    weight = torch.randn(60).to(dtype)
    torch.library.opcheck(rms_norm, (x, weight, 1e-5))
    torch.library.opcheck(add_rms_norm, (x, x, weight, 1e-5))
    torch.library.opcheck(silu_and_mul, (x,))
    for result in (rms_norm(x, weight, 1e-5), *add_rms_norm(x, x, weight, 1e-5), silu_and_mul(x)):
        assert result.is_contiguous()


def test_a_weight_that_is_not_aligned_is_copied() -> None:
    weight = torch.randn(65).bfloat16()[1:]
    rows = operands.as_rows(weight[None])
    assert weight.data_ptr() % 16
    assert not rows.data_ptr() % 16
    assert torch.equal(rows[0], weight)


def test_tensors_must_fit() -> None:
    x, weight = torch.randn(3, 64), torch.ones(64)
    positions, query, key, table, *rest = rotary_arguments("llama", torch.float32)
    (*_, first, second, epsilon, _, _, _), _ = qk_norm_rotary_arguments("llama", torch.float32)
    normed = (positions, query, key)
    for call, arguments, message in (
        (rms_norm, (x, weight[:63], 1e-5), r"weight: expected \[64\] on cpu, got \[63\]"),
        (add_rms_norm, (x, x[:1], weight, 1e-5), r"residual: expected \[3, 64\] on cpu, got \[1,"),
        (silu_and_mul, (x[:, 1:],), "x: expected an even number of channels, got 63"),
        (rotary_embedding, (positions.int(), query, key, table, *rest), "expected int64"),
        (rotary_embedding, (positions[None], query, key, table, *rest), "positions: expected"),
        (rotary_embedding, (positions, query, key[1:], table, *rest), "key: expected"),
        (rotary_embedding, (positions, query, key.view(7, 8, 128), table, *rest), "key: expected"),
        (rotary_embedding, (positions, query, key[:, 1:], table, *rest), "key: expected heads"),
        (rotary_embedding, (positions, query, key, table[:, :3], *rest), "table: expected up to"),
        (
            qk_norm_rotary_embedding,
            (*normed, first[1:], second, epsilon, table, *rest),
            r"query_weight: expected \[128\] on cpu, got \[127\]",
        ),
        (
            qk_norm_rotary_embedding,
            (*normed, first, second[None], epsilon, table, *rest),
            r"key_weight: expected \[128\]",
        ),
        (
            qk_norm_rotary_embedding,
            (positions, query, key[:, 1:], first, second, epsilon, table, *rest),
            "key: expected heads",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_kernels_on_a_gpu(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    x, residual = 3 * torch.randn(2, tokens, 4096).to(dtype)
    weight = torch.randn(4096).to(dtype)
    out, total = add_rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-5)
    assert torch.equal(total.cpu(), (x.float() + residual.float()).to(dtype))
    assert_rounded_once(out.cpu(), exact_norm(x.double() + residual.double(), weight, 1e-5))
    alone = rms_norm(x.cuda(), weight.cuda(), 1e-5)
    assert_rounded_once(alone.cpu(), exact_norm(x.double(), weight, 1e-5))
    first, second = x.double().chunk(2, dim=-1)
    assert_rounded_once(silu_and_mul(x.cuda()).cpu(), F.silu(first) * second, 0.6)
    for name in ROTARY:
        arguments = rotary_arguments(name, dtype, tokens)
        on_gpu = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
        for found, expected in zip(
            rotary_embedding(*on_gpu), rotary_embedding(*arguments), strict=True
        ):
            assert torch.equal(found.cpu(), expected)
        normed, of_launcher = qk_norm_rotary_arguments(name, dtype, tokens)
        normed_on_gpu = [a.cuda() if isinstance(a, torch.Tensor) else a for a in normed]
        results = [x.cpu() for x in qk_norm_rotary_embedding(*normed_on_gpu)]
        assert_normed_and_rotated(results, dtype, of_launcher)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 64, 128])
def test_what_follows_kernels_that_let_it_start_early(tokens: int) -> None:
    """A linear layer's CTAs start before a kernel has ended that is three kernels back."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "backend": "cuda"}
    first_layer, second_layer = (random_layer(n, 4096, **options).cuda() for n in (8192, 4096))
    weight, mixing = torch.ones(4096), torch.randn(4096, 4096) / 64
    weight, mixing = weight.cuda().bfloat16(), mixing.cuda().bfloat16()
    x = torch.empty(tokens, 4096, device="cuda", dtype=torch.bfloat16)

    def steps() -> Iterator[torch.Tensor]:
        yield (slow := x @ mixing)
        yield (first := rms_norm(slow, weight, 1e-5))
        second, total = add_rms_norm(first, slow, weight, 1e-5)
        yield second
        yield (gated := silu_and_mul(first_layer(second)))
        yield second_layer(rms_norm(gated + total, weight, 1e-5))

    def alone() -> torch.Tensor:
        for out in steps():
            torch.cuda.synchronize()
            last = out
        return last

    alone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        *_, replayed = steps()
    for _ in range(50):
        x.normal_()
        graph.replay()
        assert torch.equal(replayed, alone())


def test_derivatives_are_refused() -> None:
    x = torch.randn(2, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="halfbyte::silu_and_mul is for inference"):
        silu_and_mul(x).sum().backward()
