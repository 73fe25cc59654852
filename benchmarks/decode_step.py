"""A whole decode step on one GPU: Llama-3.1-8B's shape, random bf16 weights, CUDA graphs.

    python -m benchmarks.decode_step [--out benchmarks/results/decode_step.json]

For each cache format, the engine's captured step (transformers' model code, halfbyte's store and
attention) is replayed on a pool of random codes with equal lengths, and so is a separate graph with
only the attention of all layers. The step should become faster by the time that attention saves.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.llama import llama_8b
from halfbyte.attention import ATTENTION_BACKENDS, AttentionConfig, AttentionPlans, paged_attention
from halfbyte.dispatch import current_compute_capability
from halfbyte.engine.runner import ModelRunner
from halfbyte.kvcache import KVScales, PagedKVPool, SequenceTables, plan_kv_cache
from halfbyte.measure.machine import versions
from halfbyte.models import KVQuantization, layer_specs

RESULT = Path(__file__).parent / "results" / "decode_step.json"


def random_model(layers: int) -> Any:
    """Random bf16 weights of Llama-3.1-8B's shape, made on the GPU."""
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(llama_8b(layers), dtype=torch.bfloat16).eval()


def milliseconds(graph: torch.cuda.CUDAGraph, repeats: int = 20) -> float:
    """Median time of a replay."""
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[repeats // 2]


def fill(pool: PagedKVPool, layers: int) -> None:
    """Fill with random codes and valid scales, or normal values for unquantized formats."""
    for layer in range(layers):
        views = pool.layout(layer).views(pool.layer_pages(layer))
        for data, scales in ((views.k_data, views.k_scale), (views.v_data, views.v_scale)):
            if data.dtype == torch.uint8:
                data.random_(0, 256)
            else:
                data.normal_()
            if scales is not None:
                scales.random_(0x28, 0x48)


def measure(model: Any, kv_cache_dtype: str, batch: int, context: int) -> dict[str, Any]:
    """Milliseconds of a step and of all its layers' attention."""
    layers = model.config.num_hidden_layers
    plan = plan_kv_cache(layer_specs(model.config, model.dtype, kv_cache_dtype, 16))
    per_sequence = -(-(context + 1) // 16)
    pool = PagedKVPool(plan, 1 + batch * per_sequence, torch.device("cuda"))
    fill(pool, layers)
    tables = SequenceTables(pool)
    for i in range(batch):
        tables.add(i)
    # Append page by page in turn, so that no sequence's pages are adjacent.
    for begin in range(0, context, 16):
        for i in range(batch):
            tables.append(i, min(16, context - begin))
    # amax whose scale in nvfp4 is 0.02.
    scales = KVScales((53.76,) * layers, (53.76,) * layers, "benchmark")
    quantization = KVQuantization.of(pool, scales)
    runner = ModelRunner(model, tables, quantization, graph_limits=(batch, context + 1))
    with runner.attached(), torch.inference_mode():
        runner.run([(i, [1]) for i in range(batch)])
        assert runner.graphs is not None
        (captured,) = runner.graphs._graphs.values()
        step = milliseconds(captured.graph)
        attention, backend = _attention(runner, pool, batch)
    return {
        "kv_cache_dtype": kv_cache_dtype,
        "backend": backend,
        "step_ms": round(step, 3),
        "attention_ms": round(attention * layers, 3),
    }


def _attention(runner: ModelRunner, pool: PagedKVPool, batch: int) -> tuple[float, str]:
    """Mean milliseconds of a layer's attention over all layers, and the backend."""
    assert runner.graphs is not None
    work = runner.graphs._batch(batch)
    heads = runner.model.config.num_attention_heads
    layout = pool.layout(0)
    query = torch.randn(batch, heads, layout.head_size, dtype=torch.bfloat16, device="cuda")
    layers = pool.plan.num_layers

    def attend(plans: AttentionPlans) -> None:
        for layer in range(layers):
            paged_attention(
                query,
                pool.layer_pages(layer),
                layout=layout,
                query_start_loc=work.query_start_loc,
                seq_lens=work.seq_lens,
                block_tables=work.block_tables[0],
                scale=layout.head_size**-0.5,
                k_scale=work.quantization.scales[layer][0],
                v_scale=work.quantization.scales[layer][1],
                plans=plans,
            )

    attend(AttentionPlans())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(AttentionPlans())
    chosen = ATTENTION_BACKENDS.select(
        AttentionConfig(
            layout=layout,
            num_heads=heads,
            query_dtype=query.dtype,
            device_type="cuda",
            num_tokens=batch,
            num_seqs=batch,
            compute_capability=current_compute_capability(),
        )
    )
    return milliseconds(graph) / layers, chosen.name


def run_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The first fields of a report."""
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        **{name: getattr(arguments, name) for name in ("batch", "context", "layers")},
    }


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--formats", default="nvfp4,fp8,bfloat16")
    arguments = parser.parse_args()
    model = random_model(arguments.layers)
    report = {**run_of(arguments), "steps": []}
    for kv_cache_dtype in arguments.formats.split(","):
        row = measure(model, kv_cache_dtype, arguments.batch, arguments.context)
        print(json.dumps(row), flush=True)
        report["steps"].append(row)
        torch.cuda.empty_cache()
    by_format = {row["kv_cache_dtype"]: row for row in report["steps"]}
    if {"nvfp4", "bfloat16"} <= set(by_format):
        four, sixteen = by_format["nvfp4"], by_format["bfloat16"]
        saved = sixteen["attention_ms"] - four["attention_ms"]
        report["share_of_saved_attention_time"] = round(
            (sixteen["step_ms"] - four["step_ms"]) / saved, 3
        )
        print(report["share_of_saved_attention_time"])
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
