"""C++ on CPUs: every format, with AVX-512, AVX2 or plain loops."""

from typing import ClassVar

from halfbyte.dispatch import Answer
from halfbyte.kernels.cpu.library import FORMATS, is_built
from halfbyte.kernels.cpu.store import store_tokens_cpu
from halfbyte.kvcache.store.base import StoreBackend, StoreConfig, StoreInputs


class CpuStore(StoreBackend):
    """`halfbyte.kernels.cpu.store`; built with the package."""

    name: ClassVar[str] = "cpu"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the kernel was built; every machine has a CPU."""
        return is_built("writes packed pages")

    @classmethod
    def can_implement(cls, config: StoreConfig) -> Answer:
        """Every format, from floats of 16 and 32 bits."""
        return config.answer_of("cpu", FORMATS)

    @classmethod
    def store(cls, inputs: StoreInputs) -> None:
        """See `StoreBackend.store`; raises for slots past the last page."""
        transform = None if inputs.transform is None else inputs.transform.for_cpu
        store_tokens_cpu(*inputs[:7], transform, inputs.positions)
        if inputs.recent is not None:
            inputs.recent.write(inputs.key, inputs.value)
