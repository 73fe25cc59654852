"""What the system tells of the processor."""

import platform
from pathlib import Path


def largest_cache_bytes() -> int:
    """0 where the system does not tell."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(file.read_text().strip().removesuffix("K")) << 10 for file in sizes), default=0)


def processor_name() -> str:
    """Its name, where the system tells it, and how many cores."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores seen" if names else platform.processor()
