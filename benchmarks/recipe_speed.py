"""Time of KV recipes on one GPU relative to `plain`: decode, prefill and store; decode on a CPU.

    python -m benchmarks.recipe_speed [--only decode|prefill|store] [--out FILE]
    python -m benchmarks.recipe_speed --cpu [--out FILE]

Llama-3.1-8B's heads (32 of 128, 8 of K and V), pages of 16 tokens. Times are those of
`benchmarks.timing`: graphs of one call without planning, which a model's layers share. Recipes are
interleaved. `balanced` is measured without last tokens in rings and with 64 of them, in rings that
together exceed the caches, as those of a model's layers do; its store includes the ring. `accurate`
differs only in its store. With `--only` nothing is written. On a CPU
calls are by one thread.
"""

import argparse
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from benchmarks.timing import measure_in_turns, ready
from halfbyte.attention import AttentionPlans, paged_attention
from halfbyte.kvcache import reshape_and_cache
from halfbyte.kvcache.recent import SLACK, RecentInputs, RecentTokens, RingSlots
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout
from halfbyte.measure.timing import Call, copies

RESULTS = Path(__file__).parent / "results"
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, SEGMENT, RECENT = 32, 8, 128, 16, 64, 64
LAYOUT = PageLayout("nvfp4_4over6", "nvfp4_4over6", HEAD_SIZE, None, KV_HEADS, BLOCK_SIZE)
ROUNDS = 8
Calls = dict[str, list[Call]]
"""Calls with the same work on different data, by name."""


@dataclass(frozen=True)
class Case:
    """A step: sequences, tokens of each in the cache, queries of each, a window."""

    seqs: int
    length: int
    queries: int = 1
    window: int | None = None

    @property
    def name(self) -> str:
        kind = "decode" if self.queries == 1 else "prefill"
        window = f" window {self.window}" if self.window else ""
        return f"{kind} {self.seqs} x {self.length}{window}"


CASES = (
    Case(64, 8192),
    Case(8, 32768),
    Case(1, 131072),
    Case(128, 1024),
    Case(64, 8192, window=1024),
    Case(64, 8192, window=128),
    Case(4, 2048, queries=2048),
    Case(1, 16384, queries=16384),
    Case(1, 32768, queries=4096),
)
STORES = (64, 8192)
CPU_CASES = (Case(1, 8192), Case(8, 2048), Case(1, 1024))


def make_transform(tokens: int, device: torch.device, *, accurate: bool = False) -> KVTransform:
    """Means and angles like a model's: means with half of K's energy, RoPE's frequencies.

    Weights of errors as `balanced` has them, and with `accurate` error feedback.
    """
    weights = torch.rand(2, KV_HEADS, HEAD_SIZE, device=device) + 0.5
    rounding = {"k_weights": weights[0], "v_weights": weights[1]}
    if accurate:
        factors = torch.randn(KV_HEADS, HEAD_SIZE, HEAD_SIZE, device=device)
        rounding["feedback"] = factors.triu(1) / HEAD_SIZE
    frequencies = 500000.0 ** -(torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))
    starts = torch.arange(-(-tokens // SEGMENT)) * SEGMENT + SEGMENT / 2
    angles = starts[:, None] * frequencies
    mean = torch.randn(KV_HEADS, HEAD_SIZE)
    transform = KVTransform(
        True,
        SEGMENT,
        mean=mean.to(device),
        partner=torch.arange(HEAD_SIZE).roll(HEAD_SIZE // 2).to(device),
        cos=angles.cos().repeat(1, 2).to(device),
        sin=torch.cat([-angles.sin(), angles.sin()], 1).to(device),
        first_keys=torch.randn(2, KV_HEADS, HEAD_SIZE, device=device).bfloat16(),
        first_values=torch.randn(2, KV_HEADS, HEAD_SIZE, device=device).bfloat16(),
        **rounding,
    )
    transform.prepare()
    return transform


def random_kv(tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 K and V."""
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_SIZE, device=device).bfloat16()
    return key, value


def attention_calls(case: Case, device: torch.device) -> Calls:
    """Attention with the same lengths and separate pages."""
    pages_per_seq = -(-case.length // BLOCK_SIZE)
    num_pages = case.seqs * pages_per_seq
    tables = torch.randperm(num_pages, device=device).int().view(case.seqs, pages_per_seq)
    query = torch.randn(case.seqs * case.queries, HEADS, HEAD_SIZE, device=device).bfloat16()
    arguments: dict[str, Any] = {
        "layout": LAYOUT,
        "query_start_loc": torch.arange(case.seqs + 1, device=device).int() * case.queries,
        "seq_lens": torch.full((case.seqs,), case.length, dtype=torch.int32, device=device),
        "block_tables": tables,
        "scale": HEAD_SIZE**-0.5,
        "k_scale": torch.tensor(0.002, device=device),
        "v_scale": torch.tensor(0.002, device=device),
        "sliding_window": case.window,
    }
    transform = make_transform(case.length, device)
    transformed = {"transform": transform}
    calls: Calls = {}
    ways: dict[str, list[dict[str, Any]]] = {
        "plain": [{}],
        "without the last tokens": [transformed],
        "balanced": [{**transformed, "recent": recent} for recent in last_tokens(case, device)],
    }
    for name, all_options in ways.items():
        pages = torch.zeros(num_pages, LAYOUT.page_bytes, dtype=torch.uint8, device=device)
        for seq in range(case.seqs):
            positions = torch.arange(case.length, device=device)
            slots = tables[seq].long()[positions // BLOCK_SIZE] * BLOCK_SIZE
            slots += positions % BLOCK_SIZE
            changed: dict[str, Any] = {}
            if name != "plain":
                changed = {**transformed, "positions": positions}
            scales = (arguments["k_scale"], arguments["v_scale"])
            reshape_and_cache(
                *random_kv(case.length, device), pages, slots, LAYOUT, *scales, **changed
            )
        attend = partial(paged_attention, query, pages, plans=AttentionPlans(), **arguments)
        calls[name] = [partial(attend, **options) for options in all_options]
    return calls


def last_tokens(case: Case, device: torch.device) -> list[RecentInputs]:
    """Last tokens of sequences in several rings, which together exceed the caches."""
    key, value = random_kv(case.seqs * case.queries, device)
    entries = torch.arange(case.seqs, device=device).int()

    def ring() -> torch.Tensor:
        size = (case.seqs, KV_HEADS, RECENT + SLACK, HEAD_SIZE)
        return torch.randn(size, device=device).bfloat16()

    pairs = [(ring(), ring())]
    ring_bytes = 2 * pairs[0][0].nbytes
    pairs += [(ring(), ring()) for _ in range(copies(ring_bytes, device) - 1)]
    return [RecentInputs(RECENT, *pair, entries, key, value) for pair in pairs]


def store_calls(tokens: int, device: torch.device) -> Calls:
    """Stores of `tokens` tokens: a step of one token per sequence, or one prompt."""
    is_step = tokens <= 256
    pages = torch.zeros(2 * tokens, LAYOUT.page_bytes, dtype=torch.uint8, device=device)
    key, value = random_kv(tokens, device)
    slots = torch.randperm(len(pages) * BLOCK_SIZE, device=device)[:tokens]
    scale = torch.tensor(0.002, device=device)
    positions = torch.randint(1, 8192, (tokens,), device=device)
    if not is_step:
        positions = torch.arange(tokens, device=device)
    transform = make_transform(8192, device)
    with_feedback = make_transform(8192, device, accurate=True)
    capacity = tokens if is_step else 2
    rings = RecentTokens([LAYOUT], RECENT, torch.bfloat16, device, capacity)
    # A prompt without earlier tokens, whose last tokens go to the rings in the same launch.
    rows = torch.arange(tokens, device=device)[-tokens if is_step else -rings.ring :]
    owners = rows if is_step else torch.zeros_like(rows)
    places = positions[rows] % rings.ring

    def plain() -> None:
        reshape_and_cache(key, value, pages, slots, LAYOUT, scale, scale)

    pair = rings[0]
    assert pair is not None
    ring_slots = RingSlots(*pair, rows, owners, places)

    def changed(recent: RingSlots | None = None, by: KVTransform = transform) -> None:
        reshape_and_cache(
            key,
            value,
            pages,
            slots,
            LAYOUT,
            scale,
            scale,
            transform=by,
            positions=positions,
            recent=recent,
        )

    return {
        "plain": [plain],
        "without the last tokens": [changed],
        "balanced": [partial(changed, ring_slots, transform)],
        "accurate": [partial(changed, ring_slots, with_feedback)],
    }


def measure(calls: Calls, device: torch.device) -> dict[str, Any]:
    """Times in µs, and relative to `plain`."""
    contenders = {name: ready(some, device, in_graph=True) for name, some in calls.items()}
    times = measure_in_turns(contenders, device, ROUNDS)
    plain = times["plain"]["single"]
    return {name: {**t, "of_plain": round(t["single"] / plain, 3)} for name, t in times.items()}


def table(report: dict[str, Any]) -> str:
    """Single calls in Markdown."""
    names = ("plain", "without the last tokens", "balanced", "accurate")
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for case, times in report["microseconds"].items():
        cells = [
            f"{times[n]['single']:.1f} ({times[n]['of_plain']:.2f})" if n in times else ""
            for n in names
        ]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", choices=("decode", "prefill", "store"))
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    name = f"recipe_speed{'_cpu' if arguments.cpu else ''}.json"
    out: Path = arguments.out or RESULTS / name
    device = torch.device("cpu" if arguments.cpu else "cuda")
    if arguments.cpu:
        torch.set_num_threads(1)
    report: dict[str, Any] = {
        **provenance(device),
        "microseconds": {},
    }
    cases = CPU_CASES if arguments.cpu else CASES
    makers = {case.name: partial(attention_calls, case) for case in cases}
    if not arguments.cpu:
        makers |= {f"store {tokens}": partial(store_calls, tokens) for tokens in STORES}
    for name, make in makers.items():
        if name.startswith(arguments.only or ""):
            report["microseconds"][name] = measure(make(device), device)
            torch.cuda.empty_cache()
    for times in report["microseconds"].values():
        assert all(math.isfinite(t["single"]) for t in times.values())
    if arguments.only is None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
