"""A soak of `halfbyte serve` on this machine: traffic, broken connections, and two SIGKILLs.

    PYTHONPATH=tests .venv-vllm/bin/python -m plugins.vllm.soak --minutes 30 > soak.json

Requests arrive at random times (Poisson), whether or not earlier ones are answered. Each asks for
a part of an answer of `halfbyte.LLM`: the prompt is extended by the first tokens of the answer, and
the server must continue it. Some break the connection. Twice, at random times, the server's
processes are killed and it is started again: requests in flight must fail at once, and are sent
again when it is up.

Prints one JSON object. The exit status is 1 if an answer was wrong, or anything did not end as it
must. Connects to 127.0.0.1 only.
"""

import argparse
import http.client
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from plugins.vllm.engine.server import Server

ABORTED = 0.2
"""Share of requests that break their connection."""
ANSWER_TOKENS = 64
FAILURE_S = 5.0
"""Seconds in which requests in flight must fail after the server was killed."""
IN_FLIGHT = 8
"""Requests that are sent right before a kill."""
SAMPLE_S = 5.0
"""Seconds between two measurements of the server's memory."""
MAX_GROWTH = 1.03
"""Max memory of a server at its end, relative to that after a tenth of its life."""


@dataclass(frozen=True)
class Task:
    """A prompt, the expected tokens, and after how many of them to break the connection, if any."""

    prompt: list[int]
    expected: list[int]
    breaks_after: int | None = None


@dataclass
class Record:
    """Outcomes over all runs of the server; shared by all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    failure_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1


class Life:
    """Traffic to a server from its start to its end."""

    def __init__(self, server: Server, record: Record) -> None:
        self.server, self.record = server, record
        self.memory_mib: list[float] = []
        self.lost: list[Task] = []
        """Tasks that were in flight when the server was killed."""
        self._killed_at: float | None = None
        self._threads: list[threading.Thread] = []

    def traffic(
        self, tasks: Iterator[Task], rng: random.Random, rate: float, minutes: float
    ) -> None:
        """Send tasks for some time, `rate` in a second on average."""
        now = arrival = sample = time.monotonic()
        end = now + 60 * minutes
        while now < end:
            if now >= sample:
                self.memory_mib.append(self.server.memory_mib())
                sample = now + SAMPLE_S
            if now >= arrival:
                arrival += rng.expovariate(rate)
                self._start(next(tasks))
            time.sleep(max(0.0, min(arrival, sample, end) - time.monotonic()))
            now = time.monotonic()

    def kill(self, tasks: Iterator[Task]) -> None:
        """SIGKILL to every process of the server while it answers, and wait for the requests."""
        for _ in range(IN_FLIGHT):
            self._start(next(tasks))
        time.sleep(0.2)
        self._killed_at = time.monotonic()
        self.server.kill()
        self._join(FAILURE_S + 5)
        if self.server.wait_until_gone():
            self.record.count("processes_left")

    def finish(self) -> dict[str, float]:
        """Wait for all answers; returns what the server still holds then."""
        self._join(300)
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        held: dict[str, float] = {}
        for _ in range(40):  # it notices the last broken connections a little later
            held = self.server.metrics(*names)
            if not any(held.values()):
                break
            time.sleep(0.5)
        return held

    def ask(self, task: Task) -> None:
        """One request, to its end."""
        found: list[int] = []
        self.record.count("sent")
        try:
            stream = cast(Any, self.server.stream(task.prompt, len(task.expected)))
            with closing(stream) as chunks:
                for chunk in chunks:
                    found += chunk
                    if task.breaks_after is not None and len(found) > task.breaks_after:
                        break
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._note_failure(task, error)
            outcome = None
        else:
            is_whole = len(found) == len(task.expected)
            broken = "incomplete" if task.breaks_after is None else "broken_off"
            outcome = "right" if is_whole else broken
        self._check(task, found, outcome)

    def _check(self, task: Task, found: list[int], outcome: str | None) -> None:
        """Count the outcome, and check the tokens received so far."""
        if found != task.expected[: len(found)]:
            pairs = zip(found, task.expected, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(task.expected))
            with self.record.lock:
                self.record.counts["wrong"] += 1
                self.record.wrong.append({"prompt": task.prompt, "at": at, "found": found})
        elif outcome is not None:
            self.record.count(outcome)

    def _note_failure(self, task: Task, error: Exception) -> None:
        now = time.monotonic()
        with self.record.lock:
            if self._killed_at is None:
                self.record.counts["failed_while_up"] += 1
                self.record.errors.append(repr(error)[:300])
            else:
                self.record.counts["failed_at_a_kill"] += 1
                self.record.failure_s.append(now - self._killed_at)
                self.lost.append(task)

    def _start(self, task: Task) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self.ask, args=(task,), daemon=True)
        self._threads.append(thread)
        counts = self.record.counts
        counts["max_in_flight"] = max(counts["max_in_flight"], len(self._threads))
        thread.start()

    def _join(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.record.count("never_ended")


def expected_answers(model: str) -> list[tuple[list[int], list[int]]]:
    """Prompts of the equality tests and the answers of `halfbyte.LLM`, as token ids."""
    import halfbyte
    from plugins.vllm.engine.engines import TEXTS

    llm = halfbyte.LLM(model, dtype="float32", kv_cache_dtype="nvfp4")
    params = halfbyte.SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    outputs = llm.generate(list(TEXTS), params)
    return [(o.prompt_token_ids, list(o.token_ids)) for o in outputs]


def draw_tasks(answers: list[tuple[list[int], list[int]]], rng: random.Random) -> Iterator[Task]:
    """Endless random tasks: prompts extended by some tokens of their answers."""
    while True:
        prompt, answer = rng.choice(answers)
        given = rng.randrange(ANSWER_TOKENS - 8)
        wanted = rng.randrange(4, ANSWER_TOKENS - given + 1)
        breaks_after = rng.randrange(wanted) if rng.random() < ABORTED else None
        yield Task(prompt + answer[:given], answer[given : given + wanted], breaks_after)


def summary(memory_mib: list[float]) -> dict[str, float]:
    """Memory during a run: after a tenth of it, at the end, and the max."""
    after_start = memory_mib[len(memory_mib) // 10 :]
    picked = {"start": after_start[0], "end": after_start[-1], "max": max(memory_mib)}
    return {name: round(value, 1) for name, value in picked.items()}


def main() -> None:
    """Run the soak that the command line describes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="of traffic, restarts not counted"
    )
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=None, help="for the server's output")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the server ends, too
    rng = random.Random(asked.seed)
    log = asked.log or Path(tempfile.mkdtemp()) / "server.log"

    from halfbyte.assets import bundled_model_path

    model = str(bundled_model_path())
    tasks = draw_tasks(expected_answers(model), rng)
    record, lives, restarts = Record(), [], []
    shares = sorted(rng.uniform(0.15, 0.85) for _ in range(2))
    lost: list[Task] = []
    held: dict[str, float] = {}
    start = time.monotonic()
    for begin, end in zip([0.0, *shares], [*shares, 1.0], strict=True):
        life = Life(Server(model, log=log), record)
        try:
            restarts.append(round(life.server.wait_until_up(), 1))
            for task in lost:
                before = record.counts["right"]
                life.ask(Task(task.prompt, task.expected))
                record.counts["right_when_sent_again"] += record.counts["right"] - before
            life.traffic(tasks, rng, asked.rate, asked.minutes * (end - begin))
            lives.append(summary(life.memory_mib))
            if end < 1.0:
                life.kill(tasks)
                lost = life.lost
            else:
                held = life.finish()
                life.server.terminate()
                record.counts["processes_left"] += len(life.server.wait_until_gone())
        finally:
            life.server.kill()
    counts = dict(sorted(record.counts.items()))
    bad = ("wrong", "incomplete", "failed_while_up", "never_ended", "processes_left")
    sent_again = record.counts["right_when_sent_again"] == record.counts["failed_at_a_kill"]
    is_good = (
        not any(record.counts[name] for name in bad)
        and not any(held.values())
        and sent_again
        and max(record.failure_s, default=0.0) <= FAILURE_S
        and all(life["end"] <= MAX_GROWTH * life["start"] for life in lives)
    )
    result = {
        "ok": is_good,
        "minutes_of_traffic": asked.minutes,
        "minutes_in_all": round((time.monotonic() - start) / 60, 1),
        "rate": asked.rate,
        "seed": asked.seed,
        "counts": counts,
        "slowest_failure_after_a_kill_s": round(max(record.failure_s, default=0.0), 3),
        "start_s": restarts,
        "memory_mib": lives,
        "held_at_the_end": held,
        "wrong": record.wrong[:20],
        "errors": record.errors[:20],
        "log": str(log),
    }
    print(json.dumps(result, indent=1))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
