"""What a run was measured on."""

import platform
import subprocess
from importlib import metadata
from typing import Any

import torch

from halfbyte import __version__
from halfbyte.bench.peers import flashinfer_version
from halfbyte.bench.processor import processor_name
from halfbyte.dispatch import current_compute_capability
from halfbyte.kernels.cpu.library import level


def machine(device: torch.device) -> dict[str, Any]:
    """Operating system, processor, threads, CPU kernels and, where it was used, the GPU."""
    on_gpu = device.type == "cuda"
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": level(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "compute_capability": current_compute_capability() if on_gpu else None,
    }


def versions() -> dict[str, str | None]:
    """Of what was measured, None for what is not installed (or cannot run here)."""
    return {
        "halfbyte": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "flashinfer": flashinfer_version(),
        "humming": _version("humming-kernels"),
        "vllm": _version("vllm"),
    }


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Driver, clocks (MHz), power (W) and temperature (C) of a GPU now, as `nvidia-smi` says."""
    if device.type != "cuda":
        return None
    names = {
        "driver": "driver_version",
        "multiprocessor_mhz": "clocks.sm",
        "most_multiprocessor_mhz": "clocks.max.sm",
        "memory_mhz": "clocks.mem",
        "watts": "power.draw",
        "celsius": "temperature.gpu",
    }
    # By UUID: indices are not the same where CUDA_VISIBLE_DEVICES is set.
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(names.values())}"]
    try:
        answer = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in answer.strip().split(",")]
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
