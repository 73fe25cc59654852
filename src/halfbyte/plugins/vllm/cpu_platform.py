"""`--attention-backend CUSTOM` on CPUs, where vLLM always selects CPU_ATTN."""

from typing import Any

from halfbyte.plugins.vllm.registry import BACKEND_PATH, is_custom, is_disabled, is_halfbyte


def install() -> None:
    """Make the CPU platform use halfbyte's backend if selected; other platforms do not change."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform = type(current_platform)
    choose = platform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if is_disabled() and is_custom(selected_backend):  # vLLM would use its own without a word
            raise ValueError("halfbyte is disabled in this vLLM: leave out --attention-backend")
        if not is_halfbyte(selected_backend):
            return choose(cls, selected_backend, attn_selector_config, num_heads)
        from halfbyte.plugins.vllm.backend import HalfbyteAttentionBackend

        reasons = HalfbyteAttentionBackend.validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(
                f"halfbyte: attention backend CUSTOM cannot run this: {', '.join(reasons)}"
            )
        return BACKEND_PATH

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
