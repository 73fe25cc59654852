"""The CUDA store with its kernels run on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import cuda_on_host
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kvcache.store.cuda import store

SHARED_KIB = {80: 164, 90: 228, 120: 100}
"""Of an SM, by compute capability (CUDA C++ Programming Guide, "Technical Specifications")."""


@contextmanager
def on_host(num_sms: int, capability: int = 90) -> Iterator[list[int]]:
    """Let the kernels run on the CPU.

    Args:
        num_sms: of the emulated GPU; decides between rows and tiles.
        capability: that the kernels are compiled for.

    Yields:
        CTAs of each launch.
    """
    launched: list[int] = []

    def load(name: str, options: Any, functions: Any, device: Any) -> dict[str, Any]:
        library = cuda_on_host.build(name, dict(options), capability=capability)
        return {entry: (getattr(library, entry), size) for entry, size in functions}

    def launch(kernel: Any, grid: int, threads: int, arguments: Any, **_: Any) -> None:
        function, size = kernel
        launched.append(grid)
        cuda_on_host.launch(function, grid, threads, *arguments, shared_bytes=size)

    store._kernel.cache_clear()
    with (
        patch.object(nvrtc, "load", load),
        patch.object(nvrtc, "launch", launch),
        patch.object(store, "num_sms", lambda device: num_sms),
        patch.object(store, "shared_bytes_of_sm", lambda device: SHARED_KIB[capability] * 1024),
    ):
        yield launched
    store._kernel.cache_clear()
