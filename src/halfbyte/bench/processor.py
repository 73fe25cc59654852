"""What the system tells of the processor."""

import platform
from pathlib import Path


def bytes_beyond_caches() -> int:
    """So much data that none is in a cache when its turn comes again: twice the largest cache."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    known = [int(file.read_text().strip().removesuffix("K")) << 10 for file in sizes]
    return 2 * max(known, default=1 << 25)


def processor_name() -> str:
    """Its name, where the system tells it, and how many cores."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores seen" if names else platform.processor()
