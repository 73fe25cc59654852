"""C++ on CPUs: every format, with AVX-512, AVX2 or plain loops."""

from typing import ClassVar

import torch

from halfbyte.dispatch import Answer
from halfbyte.kernels.cpu.library import FORMATS, is_built
from halfbyte.kernels.cpu.store import store_tokens_cpu
from halfbyte.kvcache.recent import RingSlots
from halfbyte.kvcache.store.base import Scale, StoreBackend, StoreConfig
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout


class CpuStore(StoreBackend):
    """`halfbyte.kernels.cpu.store`; built with the package."""

    name: ClassVar[str] = "cpu"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the kernel was built; every machine has a CPU."""
        return is_built("writes packed pages of every format")

    @classmethod
    def can_implement(cls, config: StoreConfig) -> Answer:
        """Every format, from floats of 16 and 32 bits."""
        return config.answer_of("cpu", FORMATS)

    @classmethod
    def store(
        cls,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        slot_mapping: torch.Tensor,
        layout: PageLayout,
        k_scale: Scale,
        v_scale: Scale,
        transform: KVTransform | None,
        positions: torch.Tensor | None,
        recent: RingSlots | None = None,
    ) -> None:
        """See `StoreBackend.store`; raises for slots past the last page."""
        changed = None if transform is None else transform.for_cpu
        store_tokens_cpu(
            key, value, pages, slot_mapping, layout, k_scale, v_scale, changed, positions
        )
        if recent is not None:
            recent.write(key, value)
