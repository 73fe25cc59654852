"""The machine and installed versions, for `halfbyte info` and reports of benchmarks."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from halfbyte import __version__
from halfbyte.dispatch import current_compute_capability
from halfbyte.kernels.cpu.library import level

_DISTRIBUTIONS = {"flashinfer": "flashinfer-python", "humming": "humming-kernels"}


def machine(device: torch.device) -> dict[str, Any]:
    """Operating system, processor, threads, CPU kernels and, if used, the GPU."""
    on_gpu = device.type == "cuda"
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": level(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "compute_capability": current_compute_capability(device) if on_gpu else None,
    }


def versions() -> dict[str, str | None]:
    """Versions of halfbyte, torch, CUDA and optional packages; None if not installed."""
    known = {"halfbyte": __version__, "torch": str(torch.__version__), "cuda": torch.version.cuda}
    optional = ("triton", "transformers", "flashinfer", "humming", "vllm")
    return known | {name: package_version(name) for name in optional}


def processor_name() -> str:
    """Processor's model name and number of cores, if available."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores seen" if names else platform.processor()


def bytes_beyond_caches() -> int:
    """Twice the CPU's largest cache: reading this many bytes evicts older data."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return 2 * max((int(file.read_text().strip(" \nK")) << 10 for file in sizes), default=1 << 25)


def package_version(name: str) -> str | None:
    """Version of a package by its import name, or None if it is not installed."""
    try:
        return metadata.version(_DISTRIBUTIONS.get(name, name))
    except metadata.PackageNotFoundError:
        return None
