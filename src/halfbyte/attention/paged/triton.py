"""Triton on NVIDIA GPUs from SM80: decode and prefill straight from packed pages, every format.

Apart from `launcher.py`, which imports Triton: `auto` asks this backend also where there is none.
"""

from typing import ClassVar

from halfbyte.attention.base import AttentionConfig, AttentionInputs, GpuAttention
from halfbyte.attention.paged.plan import unsupported_reason
from halfbyte.dispatch import Answer


class TritonAttention(GpuAttention):
    """`halfbyte.attention.paged.launcher`; compiled at first use."""

    name: ClassVar[str] = "triton"
    module: ClassVar[str] = "triton"
    module_source: ClassVar[str] = "pip install halfbyte[gpu]"
    purpose: ClassVar[str] = "reads packed pages of every format"
    takes_transforms: ClassVar[bool] = True
    takes_every_batch: ClassVar[bool] = True

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """What the kernel's tiles allow."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        reason = unsupported_reason(config.layout, config.query_dtype)
        return reason is None, reason or "reads packed pages of every format"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`."""
        # Here, because the import needs Triton.
        from halfbyte.attention.paged.launcher import run

        run(inputs)
