"""C++ on CPUs: every format, packed NVFP4 read in place, with AVX-512, AVX2 or plain loops."""

from typing import ClassVar

from halfbyte.attention.base import AttentionBackend, AttentionConfig, AttentionInputs
from halfbyte.dispatch import CPU, Answer, current_compute_capability
from halfbyte.kernels.attention_cpu import attention_cpu
from halfbyte.kernels.cpu_library import library, say_missing


class CpuAttention(AttentionBackend):
    """`halfbyte.kernels.attention_cpu`; built with the package."""

    name: ClassVar[str] = "cpu"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the kernel was built; every machine has a CPU."""
        if library() is None:
            if current_compute_capability() == CPU:  # elsewhere hardly anyone will miss it
                say_missing()
            return False, "was not built: the package was installed without a C++ compiler"
        return True, "reads packed pages"

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """Every format, head size and option."""
        if config.device_type != "cpu":
            return False, f"tensors are on {config.device_type}, not on the CPU"
        return True, "every format, head size and option"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`."""
        attention_cpu(
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
