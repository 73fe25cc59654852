"""A decode step of halfbyte's own engine as users of `LLM` see it, with host time and text.

    python -m benchmarks.engine_step [--out benchmarks/results/engine_step.json]

Llama-3.1-8B's shape with random weights, in NVFP4 but for the head, on an NVFP4 cache.
`step_ms` is the median, and `mean_ms` the mean, of the time between the tokens of consecutive steps
of `LLM.stream`: schedule, forward pass, sampling, transfer and detokenizing. All sequences have at
least the case's context in the cache. `graph_ms` is the forward pass alone, a replay of its CUDA
graph, and `kernels` their number in it; the remainder is sampling and the host. `start_s` is the
time to make the engine, with captures and compilation.

    --recipes plain         only these KV recipes, by commas
    --variants eager        only these variants of the model's code, by commas
    --profile FILE          also write the kernels of a step by time, for each engine's first case
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.decode_step import milliseconds
from benchmarks.llama import llama_8b
from benchmarks.model_weights import quantize
from benchmarks.program import names
from benchmarks.provenance import provenance
from halfbyte import LLM, SamplingParams
from halfbyte.kvcache import KVScales

RESULT = Path(__file__).parent / "results" / "engine_step.json"
RECIPES = ("plain", "balanced")
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"torch_compile": False},
    "compiled": {"torch_compile": True},
}
"""Options of `LLM`, by name: the model's code as it is or compiled, both in CUDA graphs."""
_WARM_UPS = 4
"""Steps before those that count: the sampler compiles its kernel in the first."""
_REPLAYS = 9
_LONGEST_NAME = 80

Report = dict[str, Any]


class Case(NamedTuple):
    """Sequences that decode, the tokens of their prompts, and how they sample."""

    name: str
    batch: int
    context: int
    sampling: dict[str, Any]


CASES = (
    Case("64x1024 greedy", 64, 1024, {"temperature": 0.0}),
    Case("64x1024 default", 64, 1024, {}),
    Case("64x1024 top_p, seed, logprobs", 64, 1024, {"top_p": 0.95, "seed": 1, "logprobs": 5}),
    Case("1x2048 greedy", 1, 2048, {"temperature": 0.0}),
)


def make_model(config: LlamaConfig, device: torch.device) -> Any:
    """Random weights, in bf16 the head and embedding, all other layers in NVFP4."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    quantize(model)
    return model


def make_tokenizer(vocabulary: int) -> Any:
    """Byte-level tokens like Llama's: all bytes, then a word with a space in front per id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġw{i:x}" for i in range(len(alphabet), vocabulary))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def step_times(llm: LLM, case: Case, steps: int) -> Generator[float, None, None]:
    """Milliseconds of single decode steps of the whole batch.

    The sequences keep their pages until the iterator is closed or ends.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.context)
    prompts = torch.randint(0, llm.model.config.vocab_size, shape, generator=generator).tolist()
    # The first sequences decode while others are prefilled; none may end before the last step.
    params = SamplingParams(**case.sampling, ignore_eos=True, max_tokens=None)
    started: set[int] = set()
    with closing(llm.stream(prompts, params)) as stream:
        while len(started) < case.batch:
            started.add(next(stream).index)
        # No tokens of this step remain: they come in the order of requests, and the sequence that
        # began last is the last request.
        last = time.perf_counter()
        for step in range(_WARM_UPS + steps):
            indices = [next(stream).index for _ in range(case.batch)]
            now = time.perf_counter()
            assert sorted(indices) == list(range(case.batch)), "a step without the whole batch"
            if step >= _WARM_UPS:
                yield 1e3 * (now - last)
            last = now


def measure(llm: LLM, case: Case, steps: int) -> dict[str, Any]:
    """Times of a case, see the module; `mean_tokens` is the mean length of a sequence."""
    times, lengths, row = [], [], {}
    tables = llm.core.tables
    with closing(step_times(llm, case, steps)) as iterator:
        for milliseconds in iterator:
            times.append(milliseconds)
            lengths += [tables.length(request.id) for request in llm.core.scheduler.running]
            if len(times) == steps:  # while the sequences are in the cache
                row = measure_graph(llm, case.batch)
    return {
        "step_ms": round(statistics.median(times), 3),
        "mean_ms": round(statistics.fmean(times), 3),
        "max_ms": round(max(times), 3),
        "mean_tokens": round(statistics.fmean(lengths), 1),
        **row,
    }


def captured(llm: LLM, batch: int) -> torch.cuda.CUDAGraph | None:
    """The CUDA graph of steps with so many sequences; None where steps run without."""
    graphs = llm.core.runner.graphs
    if graphs is None or batch not in graphs._graphs:
        return None
    return graphs._graphs[batch].graph


def measure_graph(llm: LLM, batch: int) -> dict[str, Any]:
    """Median time and number of kernels of a replay; empty without CUDA graphs."""
    graph = captured(llm, batch)
    if graph is None:
        return {}
    return {
        "graph_ms": round(milliseconds(graph, _REPLAYS), 3),
        "kernels": sum(kernel["calls"] for kernel in kernels(graph)),
    }


def kernels(graph: torch.cuda.CUDAGraph) -> list[dict[str, Any]]:
    """Name, calls and total µs of the kernels and copies of a replay, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    microseconds: dict[str, float] = defaultdict(float)
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name[:_LONGEST_NAME]
            calls[name] += 1
            microseconds[name] += event.time_range.end - event.time_range.start
    return [
        {"name": name, "calls": calls[name], "us": round(time, 1)}
        for name, time in sorted(microseconds.items(), key=lambda each: -each[1])
    ]


class Engines:
    """Engines of one model, by recipe and variant.

    Args:
        model, tokenizer: of all engines.
        cases: the largest of them bound sequences and context.
        steps: that are measured.
    """

    def __init__(self, model: Any, tokenizer: Any, cases: Sequence[Case], steps: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.scales: KVScales | None = None  # measured by the first engine
        batch = max(case.batch for case in cases)
        context = max(case.context for case in cases)
        # Steps of prefill in which the first sequences decode already, and one for the last token.
        room = context + batch + _WARM_UPS + steps + 1
        self.options: dict[str, Any] = {
            "max_num_seqs": batch,
            "max_model_len": room,
            "max_batched_tokens": 8192,
        }

    def make(self, recipe: str, variant: str) -> tuple[LLM, float]:
        """The engine, and the seconds that it took to make it."""
        begin = time.perf_counter()
        llm = LLM(
            self.model,
            self.tokenizer,
            kv_cache_dtype="nvfp4",
            kv_recipe=recipe,
            kv_scales=self.scales,
            **self.options,
            **VARIANTS[variant],
        )
        self.scales = llm.kv_scales
        return llm, time.perf_counter() - begin


def run(
    model: Any,
    tokenizer: Any,
    cases: Sequence[Case],
    *,
    recipes: Sequence[str] = RECIPES,
    variants: Sequence[str] = tuple(VARIANTS),
    steps: int = 64,
    profiles: dict[str, Any] | None = None,
) -> Report:
    """Measure all cases in an engine per recipe and variant.

    Args:
        profiles: filled with the kernels of each engine's first case.

    Returns:
        `results`: by recipe and variant, `start_s` and the rows of all cases.
    """
    engines = Engines(model, tokenizer, cases, steps)
    # Its calibration has the statistics that every recipe needs.
    engines.scales = engines.make("balanced", "eager")[0].kv_scales
    results: dict[str, Any] = {}
    for recipe in recipes:
        for variant in variants:
            gc.collect()  # the last engine's pool
            llm, start = engines.make(recipe, variant)
            row: dict[str, Any] = {"start_s": round(start, 1)}
            for case in cases:
                row[case.name] = measure(llm, case, steps)
                print(f"{recipe}, {variant}, {case.name}: {row[case.name]}", file=sys.stderr)
            if profiles is not None and (graph := captured(llm, cases[0].batch)):
                profiles[f"{recipe}, {variant}, {cases[0].name}"] = kernels(graph)
            results.setdefault(recipe, {})[variant] = row
            del llm
    config = model.config
    shape = {"layers": config.num_hidden_layers, "hidden_size": config.hidden_size}
    return {**provenance(model.device), **shape, "steps": steps, "results": results}


def table(report: Report) -> Table:
    """A row per case, a column per recipe and variant: ms of a step, in parentheses its graph."""
    found = Table(box=None, pad_edge=False)
    found.add_column("ms per step (forward pass alone)")
    columns = [(recipe, name) for recipe, row in report["results"].items() for name in row]
    for recipe, variant in columns:
        found.add_column(f"{recipe}, {variant}", justify="right")
    rows = [report["results"][recipe][variant] for recipe, variant in columns]
    for case in (name for name in rows[0] if name != "start_s"):
        found.add_row(case, *(_cell(row[case]) for row in rows))
    found.add_row("start, s", *(str(row["start_s"]) for row in rows))
    return found


def _cell(row: dict[str, Any]) -> str:
    graph = f" ({row['graph_ms']:.2f})" if "graph_ms" in row else ""
    return f"{row['step_ms']:.2f}{graph}"


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--recipes", type=names, default=RECIPES)
    parser.add_argument("--variants", type=names, default=tuple(VARIANTS))
    parser.add_argument("--profile", type=Path)
    arguments = parser.parse_args()
    profiles: dict[str, Any] | None = {} if arguments.profile else None
    config = llama_8b(arguments.layers)
    report = run(
        make_model(config, torch.device(arguments.device)),
        make_tokenizer(config.vocab_size),
        CASES,
        recipes=arguments.recipes,
        variants=arguments.variants,
        steps=arguments.steps,
        profiles=profiles,
    )
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.profile:
        arguments.profile.write_text(json.dumps(profiles, indent=1) + "\n")
    Console(highlight=False, soft_wrap=True, width=150).print(table(report))


if __name__ == "__main__":
    main()
