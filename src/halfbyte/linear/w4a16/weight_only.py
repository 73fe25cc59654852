"""Base of the W4A16 backends that call a library."""

from abc import abstractmethod
from typing import ClassVar

import torch

from halfbyte.dispatch import CPU, Answer, runs_on_gpu
from halfbyte.linear.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from halfbyte.linear.runs import Run


class WeightOnlyKernel(NvFp4LinearKernel):
    """float16 from SM75, bfloat16 from SM80. The library repacks the weights irreversibly."""

    library: ClassVar[str]

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self.runs: list[Run] = []

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM75 and later; on this machine also where the library is installed."""
        return runs_on_gpu(compute_capability, 75, cls.missing, cls.library)

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """W4A16 layers in 16 bits."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.quantize_activations:
            return False, "multiplies 16-bit activations: a W4A4 layer's would stay unquantized"
        if config.dtype not in (torch.float16, torch.bfloat16):
            return False, f"takes float16 and bfloat16, not {str(config.dtype).split('.')[1]}"
        if config.dtype == torch.bfloat16 and CPU < config.compute_capability < 80:
            return False, "bfloat16 needs compute capability 8.0"
        if config.batch_invariant and not cls.is_batch_invariant(config.compute_capability):
            return False, f"{cls.library}: no batch invariance that is proven on this machine"
        return True, f"{cls.library}, W4A16"

    @classmethod
    def is_batch_invariant(cls, compute_capability: int) -> bool:
        """Whether it is batch invariant on GPUs of a compute capability."""
        return False

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """What this machine lacks, checked without importing the library; None if nothing."""
