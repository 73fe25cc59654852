"""Check the committed runs in `results/` against their bounds.

    python -m benchmarks.check

Prints every bound; exits with 1 if one is missed, or if a known miss is met.
"""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from benchmarks.bounds import attention, engine, linear, moe, recipes, vllm
from benchmarks.bounds.base import RESULTS, Bound, result


def committed() -> list[Bound]:
    """All bounds with the values of the committed runs."""
    return [
        *attention.of_decode_run(result("attention_decode")),
        *(bound for run in attention.CPU_RUNS for bound in attention.of_cpu_run(run, result(run))),
        *attention.of_decode_step(result("decode_step")),
        *linear.of_linear(result("linear")),
        *engine.of_steps(result("engine_step")),
        *moe.of_moe(result("moe"), moe.KNOWN_MISSES),
        *recipes.of_accuracy(result("kv_recipes")),
        *recipes.of_speed(result("recipe_speed")),
        *recipes.of_cpu_speed(result("recipe_speed_cpu")),
        *vllm.of_steps(result("vllm_step")),
        *vllm.of_qwen3_moe(result("vllm_step_qwen3_30b_a3b_in_place")),
        *vllm.of_qwen3_moe_prefill(result("vllm_step_qwen3_30b_a3b")),
        *vllm.of_gpt_oss(result("vllm_step_gpt_oss_20b")),
        *vllm.of_tensor_parallel(result("vllm_step_tp2")),
    ]


def broken(bounds: Iterable[Bound]) -> list[Bound]:
    """Bounds that are missed, and known misses that are met."""
    return [bound for bound in bounds if bound.holds == bool(bound.known_miss)]


def verdict(bound: Bound) -> str:
    """The result of a bound in words."""
    if bound.known_miss:
        return "holds, unexpectedly" if bound.holds else "known miss"
    return "holds" if bound.holds else "MISSED"


def table(bounds: Iterable[Bound]) -> Table:
    """A row per bound."""
    found = Table(box=None, pad_edge=False)
    for i, heading in enumerate(("run", "bound", "value", "", "limit", "")):
        found.add_column(heading, justify="right" if i in (2, 4) else "left", no_wrap=True)
    run = ""
    for bound in bounds:
        figures = f"{bound.value:.4g}", bound.comparison, f"{bound.limit:.4g}"
        found.add_row(bound.run if bound.run != run else "", bound.name, *figures, verdict(bound))
        run = bound.run
    return found


def main() -> None:
    """Print all bounds; SystemExit with 1 if any is broken."""
    bounds = committed()
    console = Console(highlight=False, soft_wrap=True, width=140)
    console.print(table(bounds))
    for bound in bounds:
        if bound.known_miss:
            console.print(f"\nKnown miss: {bound.run}, {bound.name}: {bound.known_miss}.")
    unbound = {file.stem for file in RESULTS.glob("*.json")} - {bound.run for bound in bounds}
    console.print(f"\nWithout bounds: {', '.join(sorted(unbound))}.")
    if failed := broken(bounds):
        print(f"{len(failed)} of {len(bounds)} bounds are broken", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
