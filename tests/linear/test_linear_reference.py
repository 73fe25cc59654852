"""The reference kernel against float64; exact W4A4 emulation; batch invariance; compilation."""

import pytest
import torch

from halfbyte.linear import NvFp4Linear
from linear.cases import assert_close_enough, random_input, random_layer, reference64

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
W4 = pytest.mark.parametrize("quantize_activations", [False, True], ids=["w4a16", "w4a4"])


def ids(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@W4
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize(
    ("m", "n", "k", "parts"),
    [
        (1, 1, 16, None),
        (3, 33, 48, None),
        (17, 96, 256, (64, 16, 16)),
        (40, 130, 1040, (1, 128, 1)),
    ],
)
def test_error_is_that_of_a_matmul_in_the_same_dtype(
    m: int,
    n: int,
    k: int,
    parts: tuple[int, ...] | None,
    dtype: torch.dtype,
    quantize_activations: bool,
) -> None:
    layer = random_layer(
        n,
        k,
        bias=m != 3,
        part_sizes=parts,
        dtype=dtype,
        quantize_activations=quantize_activations,
        backend="reference",
    )
    x = random_input(m, k, dtype)
    assert_close_enough(layer, x, layer(x), dtype)


def test_weights_beyond_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.linear.reference._CHUNK_VALUES", 100)  # 3 rows of 32
    layer = random_layer(10, 32, bias=True, part_sizes=(5, 5), backend="reference")
    x = random_input(5, 32)
    assert_close_enough(layer, x, layer(x), torch.float32)


def test_w4a4_multiplies_exactly_the_quantized_activations() -> None:
    """Powers of two as scales: every product and sum is exact, so the result is."""
    layer = random_layer(24, 64, quantize_activations=True, backend="reference")
    layer.weight_global_scale.data.fill_(2.0**-10)
    assert layer.input_global_scale is not None
    layer.input_global_scale.data.fill_(2.0**-8)
    x = random_input(7, 64)
    assert torch.equal(layer(x).double(), reference64(layer, x))
    # Values that round to the same codes give the same bits; others do not.
    nudged = x * (1 + 2.0**-20)
    assert torch.equal(layer(nudged).double(), reference64(layer, nudged))
    assert not torch.equal(layer(x), torch.nn.functional.linear(x, layer.dequantize()))


def test_w4a16_does_not_quantize_activations() -> None:
    layer = random_layer(8, 32, backend="reference")
    x = random_input(4, 32)
    step = torch.full_like(x, 1e-4)
    assert not torch.equal(layer(x), layer(x + step))


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (32,), (2, 3, 32)], ids=str)
def test_shapes_of_x(shape: tuple[int, ...]) -> None:
    layer = random_layer(8, 32, bias=True, backend="reference", batch_invariant=len(shape) == 3)
    x = random_input(6, 32).reshape(-1)[: torch.Size(shape).numel()].reshape(shape)
    out = layer(x)
    assert out.shape == (*shape[:-1], 8)
    if x.numel():
        assert_close_enough(layer, x, out, torch.float32)


def test_strided_x() -> None:
    layer = random_layer(8, 32, backend="reference")
    x = random_input(32, 12).t()[::2]
    assert torch.equal(layer(x), layer(x.contiguous()))


@W4
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize(("n", "k"), [(96, 128), (33, 1040)])
def test_batch_invariance(n: int, k: int, dtype: torch.dtype, quantize_activations: bool) -> None:
    layer = random_layer(
        n,
        k,
        bias=True,
        dtype=dtype,
        quantize_activations=quantize_activations,
        backend="reference",
        batch_invariant=True,
    )
    x = random_input(4096, k, dtype)
    whole = layer(x)
    assert_close_enough(layer, x, whole, dtype)
    for size in (1, 2, 3, 15, 16, 17, 100, 1000, 4095):
        for start in {0, 7, 4096 - size}:
            rows = slice(start, start + size)
            assert torch.equal(layer(x[rows]), whole[rows]), (start, size)
    # Other tokens may have NaN, infinity, or another order.
    others = x.flip(0).clone()
    others[1::2] = torch.nan
    assert torch.equal(layer(others)[::2], whole.flip(0)[::2])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@W4
def test_compiles_as_one_graph(backend: str, quantize_activations: bool) -> None:
    layer = random_layer(
        32, 64, bias=True, part_sizes=(24, 8), quantize_activations=quantize_activations,
        backend="reference", dtype=torch.bfloat16,
    )  # fmt: skip
    layer.process_weights_after_loading()
    compiled = torch.compile(lambda x: layer(x * 2) + 1, backend=backend, fullgraph=True)
    for m in (1, 5, 9):
        x = random_input(m, 64, torch.bfloat16)
        assert torch.equal(compiled(x), layer(x * 2) + 1)


def test_compiling_an_unprocessed_layer_says_what_to_do() -> None:
    torch.compiler.reset()  # else Dynamo may have reached its limit of graphs in tests before
    layer = random_layer(8, 32, backend="reference")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"process_weights_after_loading\(\) before torch.compile"):
        compiled(random_input(1, 32))


def test_operator_is_well_formed() -> None:
    layer = random_layer(8, 32, part_sizes=(4, 4), backend="reference")
    layer.process_weights_after_loading()
    scales = layer.weight_scale.view(torch.uint8)  # opcheck cannot compare float8
    arguments = (random_input(3, 32), layer.weight, scales, layer.alpha, None, None)
    operator = torch.ops.halfbyte.nvfp4_linear_reference.default
    torch.library.opcheck(operator, (*arguments, [4, 4], 8, False))


def test_backward_is_an_error() -> None:
    layer: NvFp4Linear = random_layer(8, 32, backend="reference")
    out = layer(random_input(3, 32).requires_grad_())
    with pytest.raises(RuntimeError, match="is for inference and has no derivative"):
        out.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plain", "invariant"])
@W4
def test_in_a_cuda_graph(quantize_activations: bool, batch_invariant: bool) -> None:
    layer = random_layer(
        96, 128, bias=True, part_sizes=(64, 32), quantize_activations=quantize_activations,
        dtype=torch.bfloat16, backend="reference", batch_invariant=batch_invariant,
    ).cuda()  # fmt: skip
    x = random_input(40, 128, torch.bfloat16).cuda()
    with torch.inference_mode():
        eager = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        graph.replay()
        assert torch.equal(out, eager)
        x.copy_(random_input(40, 128, torch.bfloat16, seed=5))
        graph.replay()
        assert torch.equal(out, layer(x))
    assert_close_enough(layer, x, out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_batch_invariance_on_a_gpu(dtype: torch.dtype) -> None:
    layer = random_layer(96, 1040, dtype=dtype, backend="reference", batch_invariant=True).cuda()
    x = random_input(4096, 1040, dtype).cuda()
    whole = layer(x)
    for size in (1, 2, 15, 16, 17, 1000):
        for start in (0, 7):
            rows = slice(start, start + size)
            assert torch.equal(layer(x[rows]), whole[rows]), (start, size)
