"""C++ on CPUs: every format, with AVX-512, AVX2 or plain loops."""

from typing import ClassVar

import torch

from halfbyte.dispatch import CPU, Answer, current_compute_capability
from halfbyte.kernels.cpu.library import FLOATS, library, say_missing
from halfbyte.kernels.cpu.store import store_tokens_cpu
from halfbyte.kvcache.store.base import Scale, StoreBackend, StoreConfig
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout


class CpuStore(StoreBackend):
    """`halfbyte.kernels.cpu.store`; built with the package."""

    name: ClassVar[str] = "cpu"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the kernel was built; every machine has a CPU."""
        if library() is None:
            if current_compute_capability() == CPU:  # elsewhere hardly anyone will miss it
                say_missing()
            return False, "was not built: the package was installed without a C++ compiler"
        return True, "writes packed pages of every format"

    @classmethod
    def can_implement(cls, config: StoreConfig) -> Answer:
        """Every format, from floats of 16 and 32 bits."""
        if config.device_type != "cpu":
            return False, f"tensors are on {config.device_type}, not on the CPU"
        for name, dtype in (("key", config.key_dtype), ("value", config.value_dtype)):
            if dtype not in FLOATS:
                return False, f"takes {name} in bfloat16, float16 or float32, not {dtype}"
        return True, "every format"

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
    ) -> None:
        """See `StoreBackend.store`; raises for slots past the last page."""
        changed = None if transform is None else transform.for_cpu
        store_tokens_cpu(
            key, value, pages, slot_mapping, layout, k_scale, v_scale, changed, positions
        )
