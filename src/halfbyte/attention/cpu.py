"""C++ on CPUs: decode straight from packed NVFP4 pages, with AVX-512, AVX2 or plain loops."""

import logging
from functools import lru_cache
from typing import ClassVar

from halfbyte.attention.base import AttentionBackend, AttentionConfig, AttentionInputs
from halfbyte.dispatch import CPU, Answer, current_compute_capability
from halfbyte.kernels.decode_cpu import decode_nvfp4, library, unsupported_reason

logger = logging.getLogger("halfbyte")

_MAX_MEAN_QUERIES = 8
"""Beyond this it is faster to unpack once and multiply matrices."""


class CpuAttention(AttentionBackend):
    """`halfbyte.kernels.decode_cpu`; built with the package."""

    name: ClassVar[str] = "cpu"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the kernel was built; every machine has a CPU."""
        if library() is None:
            if current_compute_capability() == CPU:  # elsewhere hardly anyone will miss it
                _log_missing_once()
            return False, "was not built: the package was installed without a C++ compiler"
        return True, "reads packed nvfp4 pages"

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """What the kernel's layouts allow."""
        if config.device_type != "cpu":
            return False, f"tensors are on {config.device_type}, not on the CPU"
        if config.num_tokens > _MAX_MEAN_QUERIES * config.num_seqs:
            return False, "is for decoding: a few query tokens per sequence"
        reason = unsupported_reason(config.layout)
        return reason is None, reason or "reads packed nvfp4 pages"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`."""
        decode_nvfp4(
            inputs.query,
            inputs.pages,
            inputs.layout,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.block_tables,
            inputs.scale,
            float(inputs.k_scale),
            float(inputs.v_scale),
            inputs.sliding_window,
            inputs.sinks,
            inputs.softcap,
            inputs.out,
            inputs.lse,
        )


@lru_cache(maxsize=1)
def _log_missing_once() -> None:
    logger.warning("the CPU kernel was not built (no C++ compiler?): the reference stands in")
