"""Random arrivals, aborts and failures against the engine on a CPU.

    python tests/engine/robustness.py [--seconds 600] [--seed 0]

After every failure the tables agree with the computed tokens; at the end no page is in use,
and every request has the same tokens as when run alone. Engines are batch invariant, so
that the batch makes no difference. The test suite runs a few rounds of it.
"""

import argparse
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # as pytest has it
    sys.path[:0] = [str(Path(__file__).parents[1])]

from engine.tokenizers_zoo import byte_level
from halfbyte.engine import LLM, FinishReason, Request, SamplingParams
from halfbyte.kvcache import OutOfPagesError
from models.zoo import make_model, token_ids


class InjectedError(Exception):
    """The injected error."""


ERRORS: tuple[type[BaseException], ...] = (InjectedError, KeyboardInterrupt)
PLACES = ("runner.run", "sampler.launch", "tables.append", "scheduler.complete", "layer")
ENGINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"kv_cache_dtype": "nvfp4", "num_pages": 14, "max_batched_tokens": 24}),
    ("gemma2", {"kv_cache_dtype": "fp8", "num_pages": 40, "max_batched_tokens": 48}),
    ("qwen3", {"kv_cache_dtype": "nvfp4", "num_pages": 60, "max_num_seqs": 3}),
)


@dataclass
class Case:
    """A request and its tokens when run alone."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    text: str = ""


class Engine:
    """An `LLM` with requests whose outcomes are known."""

    def __init__(self, architecture: str, options: dict[str, Any], cases: int = 12) -> None:
        tokenizer = byte_level()
        model = make_model(architecture, vocab_size=len(tokenizer))
        self.llm = LLM(model, tokenizer, batch_invariant=True, **options)
        self.core = self.llm.core
        rng = random.Random(architecture)
        self.cases = [self._case(rng, number) for number in range(cases)]
        for case in self.cases:
            output = self.llm.generate([case.prompt], case.params)[0]
            assert output.error is None, output.error
            case.tokens, case.text = output.token_ids, output.text

    @staticmethod
    def _case(rng: random.Random, number: int) -> Case:
        prompt = token_ids(rng.choice([1, 3, 15, 16, 17, 40, 90]), seed=number).tolist()
        params = SamplingParams(
            max_tokens=rng.choice([1, 5, 20, 40]),
            temperature=rng.choice([0.0, 0.8, 1.5]),
            seed=number,
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            logprobs=rng.choice([None, 2]),
        )
        return Case(prompt, params)

    def check(self) -> None:
        """Check that the tables agree with the computed tokens."""
        self.core.check_integrity()
        self.core.tables.check_integrity()

    def check_idle(self) -> None:
        """Check that no page and no ring is in use."""
        self.check()
        assert self.core.tables.allocator.num_used == 0
        assert len(self.core.tables) == 0
        assert not self.core.scheduler.has_work


@contextmanager
def failing(owner: Any, name: str, at: int, error: BaseException, after: bool) -> Iterator[None]:
    """Make a method raise at its n-th call, before or after its work."""
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not after:
            raise error
        result = function(*args, **kwargs)
        if calls == at:
            raise error
        return result

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Send SIGINT after a while, wherever the engine is then."""
    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def injection(engine: Engine, rng: random.Random, counts: Counter[str], interrupts: bool) -> Any:
    """A context in which something fails, and its name."""
    kind = rng.choice([*PLACES, "out of pages", *(["interrupt"] if interrupts else [])])
    core = engine.core
    error = rng.choice(ERRORS)("injected")
    counts[kind] += 1
    if kind == "interrupt":
        return interrupted(rng.uniform(0.0001, 0.03))
    if kind == "out of pages":
        return failing(core.tables, "append", rng.randint(1, 3), OutOfPagesError("injected"), False)
    if kind == "layer":
        layer = rng.choice(list(engine.llm.model.model.layers))
        return failing(layer, "forward", 1, error, rng.random() < 0.5)
    owner, name = kind.split(".")
    at = rng.randint(1, 3) if kind == "tables.append" else 1
    return failing(getattr(core, owner), name, at, error, rng.random() < 0.5)


def drive_core(engine: Engine, rng: random.Random, counts: Counter[str], interrupts: bool) -> None:
    """Steps of the core: requests are added and aborted at any step, and any step may fail."""
    core = engine.core
    core.looks_ahead = rng.random() < 0.7  # the default only on GPUs
    waiting = [rng.choice(engine.cases) for _ in range(rng.randint(1, 8))]
    alive: list[tuple[Case, Request]] = []
    ended: list[tuple[Case, Request]] = []
    with core.runner.attached():
        while waiting or core.scheduler.has_work:
            while waiting and (rng.random() < 0.5 or not core.scheduler.has_work):
                case = waiting.pop()
                request = core.request(case.prompt, case.params)
                core.add(request)
                alive.append((case, request))
            if rng.random() < 0.03:
                core.abort(rng.choice(alive)[1], FinishReason.ERROR)
                counts["aborts"] += 1
                engine.check()
            if rng.random() < 0.15:
                with suppress(*ERRORS), injection(engine, rng, counts, interrupts):
                    core.step()
            else:
                core.step()
            counts["steps"] += 1
            engine.check()
            ended += [pair for pair in alive if pair[1].is_finished]
            alive = [pair for pair in alive if not pair[1].is_finished]
    engine.check_idle()
    for case, request in ended + alive:
        assert request.is_finished
        counts["requests"] += 1
        if request.finish_reason is FinishReason.ERROR:
            assert request.output == case.tokens[: len(request.output)]
        else:
            assert request.output == case.tokens, (request.output, case.tokens, request.error)


def drive_llm(engine: Engine, rng: random.Random, counts: Counter[str], interrupts: bool) -> None:
    """Whole generations that fail, are closed, or are interrupted."""
    engine.core.looks_ahead = rng.random() < 0.7
    llm, cases = engine.llm, [rng.choice(engine.cases) for _ in range(rng.randint(1, 5))]
    prompts, params = [case.prompt for case in cases], [case.params for case in cases]
    kind = rng.choice(["detokenizer", "close", "nan", *(["interrupt"] if interrupts else [])])
    counts[kind] += 1
    at = rng.randint(1, 30)
    if kind == "close":
        stream = llm.stream(prompts, params)
        for _ in range(at):
            if next(stream, None) is None:
                break
        stream.close()
    elif kind == "nan":
        spoil_a_row(engine, cases, at, rng)
    else:
        tokenizer: Any = llm.tokenizer
        fails = (
            failing(tokenizer, "decode", at, rng.choice(ERRORS)("injected"), rng.random() < 0.5)
            if kind == "detokenizer"
            else interrupted(rng.uniform(0.0001, 0.2))
        )
        with suppress(*ERRORS), fails:
            llm.generate(prompts, params)
    engine.check_idle()
    case = rng.choice(engine.cases)
    output = llm.generate([case.prompt], case.params)[0]
    assert (output.token_ids, output.text) == (case.tokens, case.text)
    counts["requests"] += 1 + len(cases)


def spoil_a_row(engine: Engine, cases: list[Case], at: int, rng: random.Random) -> None:
    """Make one request's logits NaN in one step: only that request ends."""
    runner, calls = engine.core.runner, 0
    run, spoiled = runner.run, None

    def wrapper(chunks: Any, **options: Any) -> torch.Tensor:
        nonlocal calls, spoiled
        calls += 1
        logits = run(chunks, **options)
        if calls == at:
            logits = logits.clone()
            row = rng.randrange(len(chunks))
            spoiled = chunks[row][0]
            logits[row] = rng.choice([torch.nan, torch.inf, -torch.inf])
        return logits

    runner.run = wrapper  # type: ignore[method-assign]
    first = engine.core._next_id
    try:
        outputs = engine.llm.generate([c.prompt for c in cases], [c.params for c in cases])
    finally:
        del runner.run
    for number, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        if output.error is None:
            assert (output.token_ids, output.text) == (case.tokens, case.text)
        else:
            assert first + number == spoiled, output.error
            assert output.token_ids == case.tokens[: len(output.token_ids)]


def resident_mib() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run(
    seed: int,
    seconds: float,
    max_rounds: int | None = None,
    descriptions: Sequence[tuple[str, dict[str, Any]]] = ENGINES,
    cases: int = 12,
    interrupts: bool = True,
) -> Counter[str]:
    """Run rounds until the time is over; returns counts of injected failures.

    Args:
        interrupts: whether to inject Ctrl-C at any moment, also while PyTorch enters or leaves a
            mode, which may leave PyTorch broken: not for a process that other tests share.
    """
    rng, counts = random.Random(seed), Counter[str]()
    engines = [Engine(*description, cases) for description in descriptions]
    began = last = time.monotonic()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while time.monotonic() - began < seconds and counts["rounds"] != max_rounds:
            engine = rng.choice(engines)
            (drive_core if rng.random() < 0.7 else drive_llm)(engine, rng, counts, interrupts)
            counts["rounds"] += 1
            if time.monotonic() - last > 60:
                last = time.monotonic()
                print(
                    f"{last - began:5.0f} s, {resident_mib():.0f} MiB, {dict(counts)}", flush=True
                )
    finally:
        signal.signal(signal.SIGINT, previous)
    return counts


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts = run(arguments.seed, arguments.seconds)
    print(f"held: {resident_mib():.0f} MiB at the end, {dict(counts)}")


if __name__ == "__main__":
    main()
