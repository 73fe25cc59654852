"""Prefill through unpacked pages: in Triton's interpreter on a CPU, and on a GPU."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from attention.cases import assert_close_to_exact, config, make_case
from attention.prefill.dense_cases import (
    LARGE,
    SMALL,
    assert_dense,
    attend,
    inputs_of,
    make_small,
    prefer_pytorch,
)
from halfbyte.attention import ATTENTION_BACKENDS, AttentionPlans, router
from halfbyte.attention.prefill import chunks, combine, dense
from halfbyte.attention.prefill import plan as dense_plan
from halfbyte.attention.prefill.dense import DenseAttention, uses_cudnn
from halfbyte.attention.prefill.plan import key_blocks, rounded_up
from halfbyte.attention.prefill.sm90 import launcher as sm90
from halfbyte.layouts import PageLayout
from slow import slow
from triton_interpreter import interpreted


@pytest.mark.parametrize("cached", [0, 1, 1023, 1024, 5000, 40000, 200_000])
@pytest.mark.parametrize("max_tokens", [2048, 65536])
def test_key_blocks_cover_the_cached_tokens(cached: int, max_tokens: int) -> None:
    blocks = key_blocks(cached, max_tokens)
    end = 0
    for begin, stop in blocks:
        assert begin == end
        assert stop - begin <= max_tokens
        end = stop
    assert 0 <= cached - end < 1024
    # Few sizes, because cuDNN builds a kernel for each.
    assert {stop - begin for begin, stop in blocks} <= {2**i for i in range(10, 16)}


def test_rounding_gives_few_sizes_and_little_waste() -> None:
    assert [rounded_up(n) for n in (1, 256, 257, 1500, 2048)] == [256, 256, 320, 1536, 2048]
    assert all(n <= rounded_up(n) <= max(256, n * 1.25) for n in range(1, 5000))
    assert len({rounded_up(n) for n in range(1, 2**15)}) <= 30


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_tokens": 32}, "is for prefill"),
        ({"batch_invariant": True}, "rounds differently"),
        ({"split_off": True}, "does not pay off"),
        ({"device_type": "cpu"}, "not on a GPU"),
        ({"query_dtype": torch.float32}, "query in bfloat16 or float16"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 512, None, 8, 16)}, "up to 256"),
    ],
)
def test_what_it_leaves_to_others(changes: dict[str, Any], reason: str) -> None:
    prompts = {"num_tokens": 8192, "num_seqs": 4}
    assert DenseAttention.can_implement(config(**prompts))[0]
    can, why = DenseAttention.can_implement(config(**{**prompts, **changes}))
    assert not can
    assert reason in why


def test_every_gpu_from_sm80() -> None:
    supported = {c for c in (0, 75, 80, 90, 120) if DenseAttention.is_supported(c)[0]}
    assert supported == {80, 90, 120}


def test_large_heads_go_to_cudnn_on_sm90_alone() -> None:
    """As PyTorch's own check (`check_cudnn_tensor_shapes`)."""
    assert [uses_cudnn(c, 128) for c in (80, 89, 90, 100, 120)] == [False, False, True, True, True]
    assert [c for c in (80, 90, 100, 103, 120) if uses_cudnn(c, 256)] == [90]


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size"), [(8, 4, 128), (1, 32, 128), (8, 8, 64), (16, 1, 256)]
)
def test_memory_for_results_is_bounded(kv_heads: int, group: int, head_size: int) -> None:
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, kv_heads, 16)
    case = make_case(head_size=64, query_lens=(1,), seq_lens=(1,))
    inputs = replace(
        inputs_of(case, "cpu"),
        layout=layout,
        query=torch.empty((0, kv_heads * group, head_size), dtype=torch.bfloat16),
    )
    queries = dense_plan.queries_at_once(inputs)
    row = kv_heads * group * head_size * 2
    results = dense_plan.ROWS_HELD * rounded_up(queries) * row
    assert results <= dense_plan.RESULT_BYTES
    assert 2 * queries <= dense_plan.workspace_tokens(inputs)
    assert queries >= 2048


def test_memory_for_results_is_what_joining_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten blocks of cached keys: results are merged three times."""
    lengths = {"query_lens": (30,), "seq_lens": (30 + 10 * 32,)}
    case = make_small(lengths, monkeypatch, workspace_tokens=32)
    combine = sys.modules["halfbyte.attention.prefill.combine"]
    original, held = combine.join, 0

    def join(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal held
        joined = original(parts)
        held = max(held, sum(out.nbytes for out, _ in [*parts, joined]))
        return joined

    monkeypatch.setattr(combine, "join", join)
    assert_dense(case, "cpu")
    assert 0 < held == (dense_plan.ROWS_HELD - 1) * case.query.nbytes


@pytest.mark.parametrize(
    ("name", "max_queries"),
    [
        (name, most) if i % 8 == 3 * j else slow(name, most)
        for i, name in enumerate(SMALL)
        for j, most in enumerate((16, 64))
    ],
)
def test_dense_attention_on_a_cpu(
    name: str, max_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_dense(make_small(SMALL[name], monkeypatch, max_queries=max_queries), "cpu")


@pytest.mark.parametrize(
    ("lens", "sinks"),
    [((256, 256), False), ((256, 256, 20), True), slow((256, 256, 256, 256), True)],
    ids=str,
)
def test_prompts_that_are_alike_share_a_call(
    lens: tuple[int, ...], sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {"query_lens": lens, "seq_lens": lens, "sinks": sinks}
    sizes = {"workspace_tokens": 600, "max_queries": 300}
    case = make_small(lengths, monkeypatch, **sizes)
    plan = dense_plan.make_plan(inputs_of(case, "cpu"), 16)
    counts = [long.count for long in plan.long]
    assert counts == {2: [2], 3: [2, 1], 4: [2, 2]}[len(lens)]
    assert_dense(case, "cpu")


@pytest.mark.parametrize(
    ("seq_lens", "counts"),
    [
        ((192, 192), [2]),
        ((192, 192, 20), [2, 1]),
        slow((240, 240, 192, 192, 256), [2, 2, 1]),
        ((250, 250), [1, 1]),  # would be a shape of its own
    ],
    ids=str,
)
def test_prompts_without_their_last_tokens_share_a_call(
    seq_lens: tuple[int, ...], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a prompt of 256 tokens the pages have 192 keys, if 64 are recent: 64 rows see none."""
    query_lens = tuple(20 if n == 20 else 256 for n in seq_lens)
    sizes = {"workspace_tokens": 600, "max_queries": 300}
    case = make_small({"query_lens": query_lens, "seq_lens": seq_lens}, monkeypatch, **sizes)
    plan = dense_plan.make_plan(inputs_of(case, "cpu"), 16)
    assert [long.count for long in plan.long] == counts
    assert_dense(case, "cpu")


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "wanted"),
    [
        ((300, 520), (300, 520), {(1, 256, 256)}),
        slow((256, 266), (192, 256), {(1, 192, 192), (1, 256, 256)}),
        ((256, 256), (192, 192), {(2, 192, 256)}),
        slow((256, 256), (256, 256), {(2, 256, 256)}),
    ],
    ids=str,
)
def test_strides_of_queries_are_few(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    wanted: set[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN builds a kernel for new strides, too: a single sequence's do not depend on its length.

    `wanted` has sequences, rows, and rows from one sequence to the next, of fused Q, K and V.
    """
    lengths = {"query_lens": query_lens, "seq_lens": seq_lens}
    case = make_small(lengths, monkeypatch, workspace_tokens=600, max_queries=256)
    row = 2 * case.query[0].numel()
    fused = case.query.new_zeros(len(case.query), row)
    fused[:, : row // 2] = case.query.flatten(1)
    case.query = fused[:, : row // 2].view(case.query.shape)
    found = set()

    def note(query: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if args[2]:  # causal
            found.add((*query.shape[:2], query.stride(0) // query.stride(1)))
        return original(query, *args)

    original = dense._dense
    monkeypatch.setattr(dense, "_dense", note)
    assert_dense(case, "cpu")
    assert found == wanted


def test_layers_that_differ_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"query_lens": (20, 33, 2), "seq_lens": (20, 60, 44)}
    plans = AttentionPlans()
    for options in (
        {},
        {"sliding_window": 30},
        {"sliding_window": 9},
        {"softcap": 5.0},
        {"head_size": 48, "head_size_v": 80},
        {"group": 8},
        {},
    ):
        case = make_small({**lengths, **options}, monkeypatch)
        inputs = replace(inputs_of(case, "cpu"), plans=plans)
        router.run_on(DenseAttention, inputs)
        assert_close_to_exact(inputs.out, case)


@pytest.mark.parametrize("scale", [-0.125, 0.0])
def test_scales_that_are_not_positive(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of 0 or less equal scale 0.125 with queries times 0 or -1; all share plans."""
    case = make_small(SMALL["prefixes"], monkeypatch)
    inputs = inputs_of(case, "cpu")
    for used in (inputs.scale, scale):
        inputs = replace(inputs, scale=used)
        router.run_on(DenseAttention, inputs)
    turned = replace(case, query=case.query * (-1.0 if scale else 0.0))
    assert_close_to_exact(inputs.out, turned)


def test_queries_whose_dims_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_small(SMALL["prefixes"], monkeypatch)
    apart = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert apart.stride(2) != 1
    out, _ = attend(replace(case, query=apart), "cpu", False)
    assert_close_to_exact(out, case)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the log of a sum of nothing
def test_combining_more_parts_than_fit_one_launch() -> None:
    combine = interpreted("halfbyte.attention.prefill.combine").combine
    torch.manual_seed(0)
    parts = [(torch.randn(5, 6, 48), torch.randn(6, 5) * 3) for _ in range(11)]
    parts[3] = (torch.zeros(5, 6, 48), torch.full((6, 5), -torch.inf))
    sinks = torch.randn(6)
    out, lse = torch.full((5, 6, 48), torch.nan), torch.full((5, 6), torch.nan)
    combine(parts, sinks, out, lse)
    logs = torch.stack([log.t() for _, log in parts]).double()
    total = torch.cat([logs, sinks.double().expand(1, 5, 6)]).logsumexp(0)
    weights = (logs - total).exp()
    exact = sum(w[..., None] * o for w, (o, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), total, rtol=1e-5, atol=1e-6)


class Launches:
    """In place of a kernel: what it would be specialized for in each launch."""

    def __init__(self, kernel: Any) -> None:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.seen: list[Any] = []

    def __getitem__(self, _grid: Any) -> Any:
        return lambda **given: self.seen.append(self.bind(**given, debug=False)[1])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_combining_compiles_one_kernel_for_all_lengths(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logs and LSEs of a sequence begin at any multiple of four bytes."""
    launches = Launches(combine.combine_kernel)
    monkeypatch.setattr(combine, "combine_kernel", launches)
    for begin in range(5):
        logs = torch.zeros(3, 64)[:, begin : begin + 40]
        lse = torch.zeros(64, 3)[begin : begin + 40]
        out = torch.zeros(40, 3, 64)
        combine.combine([(out, logs)] * parts, None, out, lse)
    assert len(launches.seen) == 5
    assert all(seen == launches.seen[0] for seen in launches.seen)


@pytest.mark.gpu
@pytest.mark.parametrize("on_sm90", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_dense_attention_on_a_gpu(
    name: str, on_sm90: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's attention, or where SM90's own kernel supports the batch, by that."""
    prefer_pytorch(monkeypatch, 512)
    if not on_sm90:
        monkeypatch.setattr(sm90, "supports", lambda inputs: False)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")
    monkeypatch.setattr(dense_plan, "MIN_SM90_TILES", 1)
    runs: list[int] = []

    def counted(*arguments: Any) -> None:
        runs.append(1)
        sm90.run_tiles(*arguments)

    monkeypatch.setattr(chunks, "run_tiles", counted)
    options: dict[str, Any] = {"head_size": 128, "group": 2, "kv_heads": 1, **LARGE[name]}
    assert_dense(make_case(**options), "cuda")
    is_supported = "sliding_window" not in options and options["head_size"] <= 128
    assert bool(runs) == (on_sm90 and is_supported)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_flash_attention_on_a_gpu(head_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of GPUs other than SM90."""
    prefer_pytorch(monkeypatch, 512)
    monkeypatch.setattr(dense, "uses_cudnn", lambda *_: False)
    monkeypatch.setattr(sm90, "supports", lambda inputs: False)
    for sizes in LARGE.values():
        assert_dense(
            make_case(**{"group": 2, "kv_heads": 1, **sizes, "head_size": head_size}), "cuda"
        )


@pytest.mark.gpu
def test_a_gpu_chooses_it_for_prefill() -> None:
    case = make_case(head_size=128, query_lens=(1024,), seq_lens=(1024,))
    assert ATTENTION_BACKENDS.select(inputs_of(case, "cuda").config()).name == "dense"
