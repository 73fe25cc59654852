"""Compiles backends' disk-cached kernels ahead of the run, in parallel processes.

Humming compiles some 30 kernels per shape, for more than a second each, and Triton one per tile.
Both cache kernels on disk, so several processes share the shapes and end before the measurements.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import halfbyte
from benchmarks.linear_layers.weights import PeerWeights
from halfbyte.bench.linear import Shape

KEPT_ON_DISK = ("humming", "triton")
_MAX_PROCESSES = 4
_TIMEOUT = 120.0
_SERIAL = "HUMMING_DISABLE_PARALLEL_BUILD"
_WORKERS = "HUMMING_MAX_PARALLEL_BUILD_WORKERS"


def warm_up(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    backends: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Run every backend once on every case, to compile all its kernels.

    Raises:
        RuntimeError: raised at the end if any failed; the message lists them with reasons.
    """
    failed = []
    for n, k in shapes:
        weights = PeerWeights((n, k), device, dtype)
        for name in backends:
            try:
                layer = weights.layer(name)
                for m in tokens:
                    layer(weights.x(m))
            except Exception as error:  # libraries raise errors of any type
                failed.append(f"{n}x{k}: {name}: {type(error).__name__}: {error}")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if failed:
        raise RuntimeError("; ".join(failed))


def compile_ahead(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    backends: Sequence[str],
    meanwhile: Callable[[], object],
) -> dict[str, Any]:
    """Warm up in other processes.

    Args:
        shapes, tokens: of the cases.
        backends: only those with a disk cache are warmed up.
        meanwhile: called while the processes run.

    Returns:
        `seconds`, and `failed`: a line for each process that failed.
    """
    begin = time.perf_counter()
    kept = [name for name in KEPT_ON_DISK if name in backends]
    count = min(_MAX_PROCESSES, len(shapes)) if kept else 0
    shares = [shapes[i::count] for i in range(count)]
    processes = [_start(share, tokens, kept, count) for share in shares]
    failed: list[str] = []
    try:
        meanwhile()
        messages = [_wait(process, begin + _TIMEOUT) for process in processes]
        failed = [message for message in messages if message]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    if "humming" in kept and not failed:
        # All is compiled: keep Humming's import from starting compilers during measurements.
        os.environ.setdefault(_SERIAL, "1")
    return {"seconds": round(time.perf_counter() - begin, 3), "failed": failed}


def _start(
    shapes: Sequence[Shape], tokens: Sequence[int], backends: Sequence[str], processes: int
) -> "subprocess.Popen[str]":
    environment = dict(os.environ)
    environment.pop(_SERIAL, None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment.setdefault(_WORKERS, str(max(1, (cores or 1) // processes)))
    roots = [str(Path(halfbyte.__file__).parents[1]), str(Path(__file__).parents[2])]
    paths = [*roots, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "benchmarks.linear", "--warm-up"]
    command += [
        "--shapes",
        ",".join(f"{n}x{k}" for n, k in shapes),
        "--m",
        ",".join(map(str, tokens)),
    ]
    command += ["--backends", ",".join(backends)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _wait(process: "subprocess.Popen[str]", deadline: float) -> str | None:
    """A failed process's error in one line; None on success."""
    try:
        _, messages = process.communicate(timeout=max(0.1, deadline - time.perf_counter()))
    except subprocess.TimeoutExpired:
        return f"not done after {_TIMEOUT:.0f} s"
    if process.returncode == 0:
        return None
    lines = messages.strip().splitlines() or ["no message"]
    return f"{' '.join(lines[-1].split())[:500]} (status {process.returncode})"
