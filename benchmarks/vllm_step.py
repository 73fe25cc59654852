"""A decode step and prefill inside vLLM on one GPU or more: its own variants, and halfbyte's.

    python -m benchmarks.vllm_step [--out benchmarks/results/vllm_step.json]

A model's shape with dummy weights. Each variant runs in a separate process with vLLM's default
engine (CUDA graphs, torch.compile). Prompts are random token ids; steps of at most 16,384 tokens,
92 % of the GPU's memory. Prefill is the tokens of new prompts over the time to answer them with 2
tokens, the better of two. A step is the mean of 256, from the last sequence's first token to its
last one, by the engine's own clock, the best of three runs with prompts that the prefix cache
holds. (Times of whole answers vary by as much as many steps take.) The scheduler is paused until
the engine has all prompts, so that every step has the whole batch: otherwise the first ones decode
while the others arrive.

    --model qwen3-30b-a3b  another shape of `vllm_models`, into a file of its own
    --variants "a;b"   only these; others stay in the file if GPU, versions and method are the same
    --cases 64x8192    only these (batch x context)
    --tp 2             tensor parallel
    --gpus 2           so many variants at a time, each on a GPU of its own
    --seconds 150      that a variant may take; what it has measured by then stays
    --profile FILE     instead of timing: kernels of eight steps of the first case, by time
"""

import argparse
import contextlib
import datetime
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.provenance import earlier_results
from benchmarks.vllm_models import MODELS, Case

RESULTS = Path(__file__).parent / "results"
DEFAULT = "llama-3.1-8b"
_STEPS = 256


def start_engine(arguments: argparse.Namespace, cases: Sequence[Case]) -> Any:
    """vLLM's engine of a variant."""
    if find_spec("flashinfer") is None:  # then vLLM's sampler is PyTorch's, once it is told so
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    model = MODELS[arguments.model]
    four_bit_weights, options = model.variants[arguments.variants]
    folder = Path(tempfile.mkdtemp())
    model.write(folder, four_bit_weights)
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max(context for _, context in cases) + 320,
        max_num_batched_tokens=16384,
        max_num_seqs=max(batch for batch, _ in cases),
        gpu_memory_utilization=0.92,
        tensor_parallel_size=arguments.tp,
        disable_log_stats=False,  # times of tokens
        **options,
    )


def run_prompts(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Generate `tokens` tokens for every prompt, 2 or more.

    Returns:
        Seconds of all, and of a decode step in the mean.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    llm.sleep(level=0, mode="keep")
    llm.enqueue([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    llm.sleep(level=0, mode="keep")  # answered once the engine has read all prompts
    begin = time.perf_counter()
    llm.wake_up(tags=["scheduling"])
    outputs = llm.wait_for_completion(use_tqdm=False)
    seconds = time.perf_counter() - begin
    first = max(output.metrics.first_token_ts for output in outputs)
    last = max(output.metrics.last_token_ts for output in outputs)
    return seconds, (last - first) / (tokens - 1)


def random_prompts(batch: int, context: int) -> list[list[int]]:
    """Token ids of every shape that no prefix cache has seen."""
    import numpy as np

    vocabulary = min(model.config["vocab_size"] for model in MODELS.values())
    return np.random.default_rng().integers(0, vocabulary, (batch, context)).tolist()


def measure(llm: Any, batch: int, context: int) -> dict[str, Any]:
    """Milliseconds of decode steps, the best run's mean and every run's; prefill tokens/s."""
    run_prompts(llm, random_prompts(batch, 64), 8)
    prefills = []
    for _ in range(2):
        prompts = random_prompts(batch, context)
        prefills.append(run_prompts(llm, prompts, 2)[0])
    runs = [1e3 * run_prompts(llm, prompts, _STEPS + 1)[1] for _ in range(3)]
    return {
        "step_ms": min(runs),
        "runs_ms": runs,
        "prefill_tokens_per_s": batch * context / min(prefills),
    }


def profile(llm: Any, batch: int, context: int, tokens: int = 16) -> dict[str, Any]:
    """Where the GPU's time in decode steps goes, in microseconds per step.

    Returns:
        `kernels`: name, calls and time; `gaps`: time between two kernels, by what stands before
        and after; both longest first. `busy` and `idle` are their sums.
    """
    import torch

    prompts = random_prompts(batch, context)
    run_prompts(llm, prompts, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run_prompts(llm, prompts, tokens)
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in seen.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    # The first quarter holds the prompts' last tokens, which the prefix cache does not have.
    spans = spans[len(spans) // 4 :]
    steps = 0.75 * tokens
    kernels: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    end_of_last, last = spans[0][0], "begin"
    for begin, end, name in spans:
        kernels.setdefault(name, []).append(end - begin)
        if begin > end_of_last:
            gaps.setdefault(f"{last[:60]} -> {name[:60]}", []).append(begin - end_of_last)
        if end > end_of_last:
            end_of_last, last = end, name

    def table(rows: dict[str, list[float]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [
            {"name": name[:140], "calls": len(times) / steps, "us": sum(times) / steps}
            for name, times in rows.items()
        ]
        return sorted(found, key=lambda row: -row["us"])[:60]

    return {
        "busy": sum(map(sum, kernels.values())) / steps,
        "idle": sum(map(sum, gaps.values())) / steps,
        "kernels": table(kernels),
        "gaps": table(gaps),
    }


def one_variant(arguments: argparse.Namespace) -> None:
    """Measure in this process and write JSON to the file that was given, case by case."""
    begin = time.perf_counter()
    cases = parse_cases(arguments.cases)
    if arguments.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        rows = profile(start_engine(arguments, cases), *cases[0])
        Path(arguments.one).write_text(json.dumps(rows))
        return
    llm = start_engine(arguments, cases)
    cache = llm.llm_engine.vllm_config.cache_config
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "prompts": "at once",
        "kv_cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "start_s": round(time.perf_counter() - begin, 1),
    }
    for batch, context in cases:
        results[f"{batch}x{context}"] = measure(llm, batch, context)
        Path(arguments.one).write_text(json.dumps(results))  # what there is, if time runs out


def parse_cases(text: str) -> list[Case]:
    """`64x8192,1x4096`."""
    pairs = [case.split("x") for case in text.split(",")]
    return [(int(batch), int(context)) for batch, context in pairs]


def in_process(name: str, arguments: argparse.Namespace, gpu: int | None = None) -> Any:
    """A variant's results, from a process of its own; its error's last lines where it failed.

    What it measured before it failed or ran out of time stays.

    Args:
        gpu: the only one that it sees; None for all.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpu is not None:
        shown = shown.split(",")[gpu] if shown else str(gpu)
    seen = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.vllm_step",
            "--model",
            arguments.model,
            "--variants",
            name,
            "--one",
            str(out),
        ]
        command += ["--cases", arguments.cases, "--tp", str(arguments.tp)]
        command += ["--profile", arguments.profile] if arguments.profile else []
        log = Path(folder) / "log"
        with log.open("w") as lines:
            process = subprocess.Popen(
                command, stdout=lines, stderr=lines, env={**os.environ, **seen}, process_group=0
            )
            try:
                failed = bool(process.wait(arguments.seconds))
            except subprocess.TimeoutExpired:
                failed = True
                lines.write(f"\nstopped after {arguments.seconds} s")
            finally:
                # Its engine, too, or it would keep the GPU's memory.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        found = json.loads(out.read_text()) if out.is_file() else {}
        if failed or not found:
            found["error"] = log.read_text()[-6000:]
        return found


def main() -> None:
    """Measure all variants and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--model", choices=MODELS, default=DEFAULT)
    parser.add_argument("--variants", default=None)
    parser.add_argument("--cases", default=None)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--profile", default=None)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = MODELS[arguments.model]
    arguments.cases = arguments.cases or ",".join(f"{b}x{c}" for b, c in model.cases)
    if arguments.one:
        one_variant(arguments)
        return
    name = "" if arguments.model == DEFAULT else "_" + re.sub(r"\W", "_", arguments.model)
    arguments.out = arguments.out or RESULTS / f"vllm_step{name}.json"
    only = arguments.variants
    names = [n for n in model.variants if only is None or n in only.split(";")]
    if arguments.profile:
        rows = {name: in_process(name, arguments) for name in names}
        Path(arguments.profile).write_text(json.dumps(rows, indent=1))
        return
    import torch
    import vllm

    from halfbyte.measure.machine import versions

    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "model": arguments.model,
        "gpu": torch.cuda.get_device_name(),
        "tensor_parallel": arguments.tp,
        "variants_at_a_time": arguments.gpus,
        "steps": _STEPS,
        "versions": {**versions(), "vllm": vllm.__version__},
        "results": {},
    }
    if arguments.variants is not None:
        compared = "gpu", "tensor_parallel", "steps", "versions"
        report["results"] = earlier_results(arguments.out, report, compared)
    free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for gpu in range(arguments.gpus):
        free.put(gpu if arguments.gpus > 1 else None)

    def run(name: str) -> tuple[str, Any]:
        gpu = free.get()
        try:
            return name, in_process(name, arguments, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(arguments.gpus) as pool:
        for name, result in pool.map(run, names):
            report["results"][name] = result
            print(name, json.dumps(result)[-3000:], flush=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
