"""Triton on NVIDIA GPUs from SM80: every format, one launch, no sync.

Apart from `triton_kernel.py`, which imports Triton: `auto` asks this backend also where there is
none.
"""

from typing import ClassVar

from halfbyte.dispatch import Answer, runs_on_triton
from halfbyte.kernels.formats import FORMATS
from halfbyte.kvcache.store.base import StoreBackend, StoreConfig, StoreInputs


class TritonStore(StoreBackend):
    """`triton_kernel.store_tokens`; compiled at first use."""

    name: ClassVar[str] = "triton"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later, where Triton is installed."""
        return runs_on_triton(compute_capability, "writes packed pages in one launch")

    @classmethod
    def can_implement(cls, config: StoreConfig) -> Answer:
        """Every format, from floats of 16 and 32 bits."""
        return config.answer_of("cuda", FORMATS)

    @classmethod
    def store(cls, inputs: StoreInputs) -> None:
        """See `StoreBackend.store`; slots past the last page are skipped."""
        # Here, because the import needs Triton.
        from halfbyte.kvcache.store.triton_kernel import store_tokens

        store_tokens(inputs)
