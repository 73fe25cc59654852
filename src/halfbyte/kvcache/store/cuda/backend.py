"""CUDA C++ on NVIDIA GPUs from SM80: recipes that weigh rounding errors, one launch, no sync.

Recipes without weights go to Triton, which stored 8,192 tokens of them faster on an H200
(`dev/LOG.md`).
"""

from typing import ClassVar

from halfbyte.dispatch import Answer, missing_module, runs_on_gpu
from halfbyte.kvcache.store.base import StoreBackend, StoreConfig, StoreInputs
from halfbyte.layouts import KVCacheDType
from halfbyte.numerics.nvfp4 import BLOCK_SIZE

_OLDEST = 80
_HEAD_SIZES = (64, 128, 256)
_K_FORMATS = KVCacheDType.where(lambda row: row.recipe)
_FORMATS = (*_K_FORMATS, *KVCacheDType.where(lambda row: row.fp8))


class CudaStore(StoreBackend):
    """`launcher.store_transformed`; compiled with NVRTC at first use."""

    name: ClassVar[str] = "cuda"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later, where `cuda-bindings` is installed."""
        return runs_on_gpu(
            compute_capability,
            _OLDEST,
            lambda: missing_module("cuda.bindings", "comes with PyTorch for CUDA"),
            "writes NVFP4 pages by recipes that weigh rounding errors",
        )

    @classmethod
    def can_implement(cls, config: StoreConfig) -> Answer:
        """Errors weighed, K in NVFP4, V in NVFP4 or FP8, heads of 64, 128 or 256."""
        layout = config.layout
        if not config.weighs_errors:
            return False, "stores only by recipes that weigh rounding errors, unlike `plain`"
        if layout.k_dtype not in _K_FORMATS:
            return False, f"writes K in NVFP4, not {layout.k_dtype}"
        if layout.head_size not in _HEAD_SIZES or layout.head_size_v % BLOCK_SIZE:
            return False, (
                f"takes K of 64, 128 or 256 and V of a multiple of {BLOCK_SIZE}, "
                f"not {layout.head_size} and {layout.head_size_v}"
            )
        return config.answer_of("cuda", _FORMATS)

    @classmethod
    def store(cls, inputs: StoreInputs) -> None:
        """See `StoreBackend.store`; slots past the last page are skipped."""
        # Here, so that the registry can be asked without loading it.
        from halfbyte.kvcache.store.cuda.launcher import store_transformed

        store_transformed(inputs)
