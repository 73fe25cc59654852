"""Writes tables of docs/numbers/ from the committed runs.

    python -m benchmarks.docs_tables

Every table goes between markers with its name: `<!-- store -->` and `<!-- /store -->`.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.pages import put_table

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
NUMBERS = REPOSITORY / "docs" / "numbers"


def read(name: str) -> Any:
    """A committed run."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(heads: Iterable[str], rows: Iterable[Iterable[object]], text_columns: int = 1) -> str:
    """A table; columns after the first `text_columns` are right-aligned numbers."""
    heads = list(heads)
    rules = ["---"] * text_columns + ["---:"] * (len(heads) - text_columns)
    lines = [heads, rules, *(map(str, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def time(row: dict[str, Any], name: str) -> str:
    """Microseconds of a single call; empty if not measured."""
    return f"{row[name]['single']:,.0f}" if name in row else ""


def prefill() -> str:
    """All prefill cases, and dense attention on bfloat16."""
    names = ("halfbyte_nvfp4", "flashinfer_fa3_bf16", "flashinfer_fa2_bf16", "sdpa_bf16")
    rows = []
    for row in read("attention_decode")["microseconds"]:
        if row["kind"] != "prefill":
            continue
        label = row["name"].removeprefix("prefill-")
        kv = f"{row['kv_heads']} x {row['group']} x {row['head_size']}"
        rows.append([label, kv, *(time(row, name) for name in names)])
    heads = [
        "case",
        "KV heads x group x head size",
        "halfbyte nvfp4",
        "FlashInfer fa3",
        "FlashInfer fa2",
        "SDPA",
    ]
    return markdown(heads, rows, 2)


def prefill_variants() -> str:
    """Prefill by kernel, for the cases that decide between them."""
    rows = []
    for row in read("prefill_variants")["microseconds"]:
        tokens = f"{row['batch']} x {row['new']:,}"
        tokens += f" on {row['cached']:,}" if row["cached"] else ""
        options = [f"window {row['window']:,}"] if row["window"] else []
        options += ["soft-cap"] if row["softcap"] else []
        times = (time(row, name) for name in ("sm90", "own", "pytorch", "general"))
        rows.append([tokens, row["head_size"], ", ".join(options), *times])
    heads = ["new tokens", "head size", "options", "SM90's", "Triton's", "PyTorch's", "general"]
    return markdown(heads, rows, 3)


def store() -> str:
    """Storing K and V on a GPU."""
    report = read("store")
    rows = [
        [
            f"{row['tokens']:,}",
            f"`{row['kv_cache_dtype']}`",
            *(f"{row[name]:.1f}" for name in ("single", "back_to_back", "in_graph")),
            f"{row['of_copy']:.0%}",
        ]
        for row in report["microseconds"]
    ]
    heads = [
        "tokens",
        "K/V cache",
        "one call",
        "in a row",
        "in a graph of many",
        "of a copy's rate",
    ]
    return markdown(heads, rows, 2)


def store_and_decode() -> str:
    """A step's store and decode attention per layer, in two calls and in one."""
    ways = ("decode", "two calls", "one call")
    rows = []
    for case, row in read("store_and_decode")["microseconds"].items():
        recipe, size = case.split(", ")
        batch, context = map(int, size.split(" x "))
        if recipe == "balanced":
            rows.append([f"{batch} x {context:,}", *(f"{row[way]:.1f}" for way in ways)])
    heads = ["sequences x tokens", "decode alone", "store, then decode", "in one call"]
    return markdown(heads, rows)


def cpu_attention() -> str:
    """Decode on a CPU, and SDPA on unquantized K and V."""
    names = {
        "halfbyte_avx512vnni": "AVX-512 VNNI",
        "halfbyte_avx512bf16": "AVX-512 BF16",
        "halfbyte_avx512": "AVX-512",
        "halfbyte_avx2": "AVX2",
        "sdpa_bf16": "SDPA bfloat16",
        "sdpa_fp32": "SDPA float32",
    }
    rows = [
        [f"{row['batch']} x {row['context']:,}", *(f"{row[name]:.2f}" for name in names)]
        for row in read("attention_cpu")["milliseconds"]
    ]
    return markdown(["batch x context", *names.values()], rows)


def cpu_prefill() -> str:
    """Prefill on a CPU, and SDPA."""
    names = ("halfbyte_nvfp4", "sdpa_bf16", "sdpa_fp32")
    rows = [
        [
            f"{row['query_tokens']} on {row['context'] - row['query_tokens']:,}",
            *(f"{row[name]['single'] / 1e3:.1f}" for name in names),
        ]
        for row in read("bench_attention_cpu")["microseconds"]
        if row["kind"] == "prefill"
    ]
    return markdown(
        ["new on cached tokens", "halfbyte nvfp4", "SDPA bfloat16", "SDPA float32"], rows
    )


def cpu_linear() -> str:
    """Linear layers on a CPU."""
    rows = [
        [
            f"{row['n']:,} x {row['k']:,}",
            f"{row['m']:,}",
            *(
                f"{row['contenders'][name]['back_to_back'] / 1e3:.2f}"
                for name in ("cpu", "dense_bf16")
            ),
        ]
        for row in read("bench_linear_cpu")["microseconds"]
    ]
    return markdown(["weights N x K", "M", "halfbyte NVFP4", "bfloat16 weights"], rows)


def linear_ratios() -> str:
    """halfbyte's time relative to cuBLAS with bfloat16 weights, from 256 tokens on."""
    rows = read("linear")["microseconds"]
    shapes = dict.fromkeys(row["shape"] for row in rows)
    ratio = {(r["m"], r["shape"]): r["in_graph"]["ours_over_dense"] for r in rows if r["m"] >= 256}
    table = [
        [f"{m:,}", *(f"{ratio[m, s]:.2f}" for s in shapes)] for m in sorted({m for m, _ in ratio})
    ]
    return markdown(["M", *(s.replace("x", " x ") for s in shapes)], table, 0)


def linear_bounds() -> str:
    """Bounds on the committed run, and its values."""
    rows = [
        [row["meaning"], row["shape"].replace("x", " x "), row["rows"]]
        + [f"{row[timing]['worst']:.2f}" for timing in ("in_graph", "single", "back_to_back")]
        for row in read("linear")["bounds"]
    ]
    heads = ["bound", "N x K", "tokens", "in a graph of many", "one call", "in a row"]
    return markdown(heads, rows, 3)


def model_weights() -> str:
    """Prefill of a whole model with weights in bfloat16 and in NVFP4."""
    weights = read("model_weights")["weights"]
    rows = []
    for case in weights["nvfp4"]["prefill_tokens_per_s"]:
        dense, ours = (
            weights[name]["prefill_tokens_per_s"][case] for name in ("bfloat16", "nvfp4")
        )
        captured = [weights[name]["captured_tokens_per_s"][case] for name in ("bfloat16", "nvfp4")]
        cells = [f"{dense:,.0f}", f"{ours:,.0f}", f"{ours / dense:.2f}"]
        rows.append([case.replace("x", " x "), *cells, f"{captured[1] / captured[0]:.2f}"])
    heads = [
        "prompts",
        "bfloat16, tokens/s",
        "NVFP4, tokens/s",
        "NVFP4 / bfloat16",
        "in a CUDA graph",
    ]
    return markdown(heads, rows)


def decode_step() -> str:
    """A decode step of the engine by cache format."""
    rows = [
        [f"`{row['kv_cache_dtype']}`", f"{row['step_ms']:.1f} ms", f"{row['attention_ms']:.1f} ms"]
        for row in read("decode_step")["steps"]
    ]
    return markdown(["K/V cache", "step", "of which attention"], rows)


def engine_step() -> str:
    """Steps of `LLM`, with layers as they are and compiled."""
    results = read("engine_step")["results"]
    columns = [(r, v) for r, variants in results.items() for v in variants]
    cases = [name for name, row in results["plain"]["compiled"].items() if isinstance(row, dict)]
    rows = [
        [
            case.replace("x", " x "),
            *(f"{results[r][v][case]['step_ms']:.2f} ms" for r, v in columns),
        ]
        for case in cases
    ]
    return markdown(["sequences x tokens, sampling", *(f"{r}, {v}" for r, v in columns)], rows)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "prefill": ("attention.md", prefill),
    "prefill-variants": ("attention.md", prefill_variants),
    "store": ("attention.md", store),
    "store-and-decode": ("attention.md", store_and_decode),
    "decode-step": ("attention.md", decode_step),
    "engine-step": ("attention.md", engine_step),
    "cpu-attention": ("cpu.md", cpu_attention),
    "cpu-prefill": ("cpu.md", cpu_prefill),
    "cpu-linear": ("cpu.md", cpu_linear),
    "linear-ratios": ("linear.md", linear_ratios),
    "linear-bounds": ("linear.md", linear_bounds),
    "model-weights": ("linear.md", model_weights),
}
"""Marker -> page and function that builds the table."""


def main() -> None:
    """Write all."""
    for marker, (page, make) in TABLES.items():
        put_table(NUMBERS / page, marker, make())


if __name__ == "__main__":
    main()
