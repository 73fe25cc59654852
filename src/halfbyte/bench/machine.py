"""What a run was measured on."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from halfbyte import __version__
from halfbyte.bench.peers import flashinfer_version
from halfbyte.dispatch import current_compute_capability


def machine(device: torch.device) -> dict[str, Any]:
    """Operating system, processor, threads and, where it was used, the GPU."""
    on_gpu = device.type == "cuda"
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
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
        "flashinfer": flashinfer_version(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name, where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores seen" if names else platform.processor()
