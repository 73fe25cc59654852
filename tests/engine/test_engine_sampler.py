"""The batched sampler, against formulas, transformers' processors and single rows."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfbyte.engine.noise import gumbel_noise, noise_keys
from halfbyte.engine.request import Request
from halfbyte.engine.sampler import Sampled, Sampler
from halfbyte.engine.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])


def make_request(
    params: SamplingParams,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
) -> Request:
    seed = 0 if params.seed is None else params.seed
    request = Request(
        0, list(prompt), params, seed=seed, stop_ids=frozenset(stop_ids), max_tokens=10**6
    )
    for token in output:
        request.append(token)
    return request


def sample_one(request: Request, logits: torch.Tensor) -> Sampled:
    return Sampler().sample([request], logits[None])[0]


def draw(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> Counter[int]:
    """Sampled tokens of `steps` steps."""
    request = make_request(SamplingParams(**params))
    counts: Counter[int] = Counter()
    for _ in range(count):
        token = sample_one(request, logits).token
        request.output.append(token)
        counts[token] += 1
    return counts


def test_sampler_greedy() -> None:
    assert draw(5, temperature=0) == {0: 5}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_sampler_follows_the_distribution(temperature: float) -> None:
    """Over positions of a seed, and over seeds at a position: chi squared, 3 degrees of freedom."""
    expected = (LOGITS / temperature).softmax(0)[:4] * 1500
    positions = draw(1500, temperature=temperature, seed=0)
    requests = [make_request(SamplingParams(temperature=temperature, seed=i)) for i in range(1500)]
    seeds = Counter(x.token for x in Sampler().sample(requests, LOGITS.expand(1500, -1)))
    for counts in (positions, seeds):
        assert counts[4] == 0
        observed = torch.tensor([counts[i] for i in range(4)])
        assert float(((observed - expected) ** 2 / expected).sum()) < 16.3  # p = 0.001


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 3, "top_p": 0.95}, {0, 1, 2}),
        ({"min_p": 0.36}, {0, 1}),
        ({"min_p": 0.37}, {0}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.1}, {0, 1, 2}),
        ({"temperature": 0.3, "top_k": 2}, {0, 1}),
    ],
    ids=str,
)
def test_sampler_cuts(params: dict[str, Any], allowed: set[int]) -> None:
    # Probabilities are 0.644, 0.237, 0.087 and 0.032; shares of the largest 1, 0.368, 0.135, 0.05.
    count = 400
    requests = [make_request(SamplingParams(seed=i, **params)) for i in range(count)]
    drawn = {x.token for x in Sampler().sample(requests, LOGITS.expand(count, -1))}
    assert drawn == allowed


def test_top_p_that_is_reached_exactly_takes_no_further_token() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert set(draw(300, logits, top_p=0.5)) == {0}
    assert set(draw(300, logits, top_p=0.75)) == {0, 1}


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=40),
    SamplingParams(seed=3, top_p=0.8, temperature=0.7),
    SamplingParams(seed=4, min_p=0.05, logprobs=3),
    SamplingParams(seed=5, top_k=40, repetition_penalty=1.3),
    SamplingParams(temperature=0, presence_penalty=1.5, logprobs=0),
    SamplingParams(seed=6, frequency_penalty=0.7, min_tokens=9),
    SamplingParams(seed=7, repetition_penalty=1.3, presence_penalty=-1.0, top_p=0.8),
]


def mixed_requests() -> list[Request]:
    return [
        make_request(params, prompt=(1, 5, 7, 5), output=tuple(range(i)), stop_ids=(3, 4))
        for i, params in enumerate(MIXED)
    ]


@pytest.mark.parametrize("vocabulary", [131, 1000, 32001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_one_another(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(MIXED), vocabulary, generator=generator).mul(3).to(dtype)
    requests = mixed_requests()
    together = Sampler().sample(requests, logits)
    for i, (request, result) in enumerate(zip(requests, together, strict=True)):
        assert sample_one(request, logits[i]) == result
    order = torch.randperm(len(MIXED), generator=generator).tolist()
    shuffled = Sampler().sample([requests[i] for i in order], logits[order])
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_rows_without_a_token_say_so_and_leave_the_others(number: float) -> None:
    logits = torch.randn(len(MIXED), 131)
    expected = Sampler().sample(mixed_requests(), logits)
    for victim in range(len(MIXED)):
        spoiled = logits.clone()
        spoiled[victim] = number
        results = Sampler().sample(mixed_requests(), spoiled)
        assert results[victim].error == f"the model's logits have {number} for their largest"
        del results[victim]
        assert results == expected[:victim] + expected[victim + 1 :]


def test_a_step_asks_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device-to-host transfer for the whole batch, for any parameters."""

    class Count(TorchDispatchMode):
        waits = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # Operations that sync a GPU: values as Python numbers, shapes that depend on values.
            names = ("_local_scalar_dense", "nonzero", "masked_select", "item")
            self.waits += any(name in func.name() for name in names)
            return func(*args, **(kwargs or {}))

    transfers = []
    tolist = torch.Tensor.tolist

    def counted(x: torch.Tensor) -> Any:
        transfers.append(x.shape)
        return tolist(x)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    logits = torch.randn(len(MIXED), 131)
    with Count() as mode:
        Sampler().sample(mixed_requests(), logits)
    assert mode.waits == 0  # `tolist` reads a CPU's memory by itself
    assert len(transfers) == 1


def test_seeded_tokens_depend_on_seed_and_position_alone() -> None:
    params = SamplingParams(seed=11)
    logits = torch.zeros(1000)
    tokens = []
    request = make_request(params)
    for _ in range(20):
        tokens.append(sample_one(request, logits).token)
        request.append(tokens[-1])
    assert len(set(tokens)) > 15
    # Restarted with some of its tokens, as after preemption, and with another prompt.
    again = make_request(params, prompt=(9, 9, 9), output=tuple(tokens[:7]))
    assert sample_one(again, logits).token == tokens[7]
    other = make_request(SamplingParams(seed=12), output=tuple(tokens[:7]))
    assert sample_one(other, logits).token != tokens[7]


def test_noise_is_gumbel_and_the_same_in_every_batch() -> None:
    keys = torch.tensor([noise_keys(s, p) for s in range(8) for p in range(8)], dtype=torch.int32)
    noise = gumbel_noise(keys, 10007)
    assert torch.isfinite(noise).all()
    # Mean and standard deviation: Euler's constant and pi / sqrt(6); standard errors are 0.0016.
    assert abs(float(noise.mean()) - 0.57722) < 0.006
    assert abs(float(noise.std()) - math.pi / 6**0.5) < 0.006
    # Kolmogorov-Smirnov against exp(-exp(-x)); p = 0.001 is 1.95 / sqrt(n).
    ordered = noise.double().flatten().sort().values
    steps = torch.arange(len(ordered), dtype=torch.float64) / len(ordered)
    assert float(((-(-ordered).exp()).exp() - steps).abs().max()) < 1.95 / len(ordered) ** 0.5
    for i in (0, 13, 63):
        assert torch.equal(gumbel_noise(keys[i : i + 1], 10007)[0], noise[i])
    assert torch.equal(gumbel_noise(keys, 10000), noise[:, :10000])
    correlations = torch.corrcoef(noise) - torch.eye(64)
    assert float(correlations.abs().max()) < 5 / 10007**0.5


def test_noise_of_the_kernel_is_the_same() -> None:
    """In Triton's interpreter; and it compiles for GPUs."""
    pytest.importorskip("triton")
    from halfbyte.engine.noise_kernel import noise_kernel
    from triton_compiler import compile_kernel
    from triton_interpreter import interpreted

    keys = torch.tensor([noise_keys(s, p) for s in range(3) for p in (0, 9)], dtype=torch.int32)
    scores = torch.randn(6, 5003)
    expected = scores + gumbel_noise(keys, 5003)
    result = interpreted("halfbyte.engine.noise_kernel").add_gumbel_noise(scores.clone(), keys)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=2e-6)
    for capability in (80, 90, 120):
        usage = compile_kernel(
            noise_kernel, {"scores": "*fp32", "keys": "*i32"}, {"block": 1024}, capability
        )
        assert usage.stack == 0


def test_noise_never_changes() -> None:
    """Users rely on seeded results: these numbers must not change."""
    assert noise_keys(7, 3) == (1767208896, -180737630)
    noise = gumbel_noise(torch.tensor([noise_keys(7, 3)], dtype=torch.int32), 4)[0]
    assert [round(float(x), 4) for x in noise] == [0.5707, -0.2311, -0.5629, 0.1432]


def test_repetition_penalty_is_that_of_keskar_et_al() -> None:
    logits = torch.tensor([2.0, 1.9, -1.0, -1.1, 0.5])
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert sample_one(make_request(params, prompt=(4,)), logits).token == 0
    assert sample_one(make_request(params, prompt=(0,)), logits).token == 1  # 1.0 < 1.9
    assert sample_one(make_request(params, prompt=(4,), output=(0,)), logits).token == 1
    # All positive ones halved, -1.0 doubled: -1.1 is the larger of what is left of them.
    negative = torch.tensor([-1.0, -1.1])
    assert sample_one(make_request(params, prompt=(0,)), negative).token == 1


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    presence = SamplingParams(temperature=0, presence_penalty=1.5)
    assert sample_one(make_request(presence, prompt=(0, 0)), logits).token == 0
    assert sample_one(make_request(presence, output=(0,)), logits).token == 1
    assert sample_one(make_request(presence, output=(0, 0, 0)), logits).token == 1
    frequency = SamplingParams(temperature=0, frequency_penalty=0.6)
    assert sample_one(make_request(frequency, output=(0,)), logits).token == 0  # 1.4 > 1.0
    assert sample_one(make_request(frequency, output=(0, 0)), logits).token == 1  # 0.8 < 1.0
    both = SamplingParams(temperature=0, frequency_penalty=0.6, presence_penalty=0.5)
    assert sample_one(make_request(both, output=(0,)), logits).token == 1  # 0.9 < 1.0
    liked = SamplingParams(temperature=0, frequency_penalty=-1.1)
    assert sample_one(make_request(liked, output=(1,)), logits).token == 1  # 2.1 > 2.0


def test_min_tokens_keeps_stop_tokens_away() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5])
    params = SamplingParams(temperature=0, min_tokens=2)
    assert sample_one(make_request(params, stop_ids=(0, 1)), logits).token == 2
    assert sample_one(make_request(params, output=(2,), stop_ids=(0,)), logits).token == 1
    assert sample_one(make_request(params, output=(2, 2), stop_ids=(0,)), logits).token == 0
    none_left = sample_one(make_request(params, stop_ids=(0, 1, 2)), logits)
    assert none_left.error is not None
    assert none_left.error == (
        "min_tokens: only tokens that end the text have finite logits; lower min_tokens"
    )


def test_logprobs_are_those_of_the_unchanged_logits() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = logits.log_softmax(0).tolist()
    # Penalties make it choose the second.
    params = SamplingParams(temperature=0, logprobs=3, presence_penalty=2.0)
    result = sample_one(make_request(params, output=(0,)), logits)
    assert result.logprobs is not None
    ids, values, ranks = zip(*result.logprobs, strict=True)
    assert (ids, ranks) == ((1, 0, 2), (2, 1, 3))
    assert values == pytest.approx([expected[i] for i in ids])
    only = sample_one(make_request(SamplingParams(temperature=0, logprobs=0)), logits)
    assert only.logprobs == ((0, pytest.approx(expected[0]), 1),)
    whole = sample_one(make_request(SamplingParams(temperature=0, logprobs=-1)), logits)
    assert whole.logprobs is not None
    assert [token for token, _, _ in whole.logprobs] == [0, 1, 2, 3]
    assert sample_one(make_request(SamplingParams(temperature=0)), logits).logprobs is None
