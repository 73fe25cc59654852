"""Whether FlashInfer can run here: attention and W4A4 layers may call it."""

import os
import shutil
from functools import lru_cache
from pathlib import Path

from halfbyte.dispatch import is_installed, missing_version

_OLDEST = (0, 7, 0)


@lru_cache(maxsize=1)
def missing_flashinfer() -> str | None:
    """Why FlashInfer cannot run here; None if it can. Does not import it, which takes seconds.

    It needs its package, and either nvcc or the package of compiled kernels.
    """
    if reason := missing_version("flashinfer-python", _OLDEST):
        return reason
    # Where FlashInfer itself looks for nvcc (`get_cuda_path` in its `jit/cpp_ext.py`).
    nvcc = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or shutil.which("nvcc")
    if not (nvcc or Path("/usr/local/cuda").exists() or is_installed("flashinfer_jit_cache")):
        return "needs nvcc (or flashinfer-jit-cache): FlashInfer compiles its kernels at first use"
    return None
