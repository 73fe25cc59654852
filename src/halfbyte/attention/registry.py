"""The registry of attention backends, and rules that exclude backends from automatic choice."""

import logging
from functools import lru_cache
from typing import Any

import torch

from halfbyte.attention.base import AttentionBackend, AttentionConfig
from halfbyte.dispatch import CPU, Registry, Verdict

logger = logging.getLogger("halfbyte")
_OF_DEVICE = {"cuda": "triton", "cpu": "cpu"}
"""The fast backend per device type; logged if the reference replaces it."""


class _AttentionBackends(Registry[AttentionBackend]):
    """Attention backends, with rules that hold for all of them."""

    def _judge(
        self, name: str, config: Any, compute_capability: int | None, *, named: bool = False
    ) -> Verdict:
        verdict = super()._judge(name, config, compute_capability, named=named)
        if not verdict.usable or config is None:
            return verdict
        reason = _refusal(self.get(name), config, named)
        return verdict if reason is None else verdict._replace(usable=False, reason=reason)

    def select(
        self,
        config: AttentionConfig | None,
        explicit: str | None = None,
        compute_capability: int | None = None,
    ) -> type[AttentionBackend]:
        chosen = super().select(config, explicit, compute_capability)
        fast = None if config is None else _OF_DEVICE.get(config.device_type)
        if fast in self._targets and explicit is None and chosen.name == "reference":
            verdicts = {v.name: v for v in self.explain(config, compute_capability)}
            # The CPU library logs by itself that it is not built.
            if fast != "cpu" or self.get(fast).is_supported()[0]:
                _log_slow(fast, verdicts[fast].reason)
        return chosen


def _refusal(backend: type[AttentionBackend], config: AttentionConfig, named: bool) -> str | None:
    """Why a backend that can implement the config is not used for it; None if it is."""
    if config.transform and not backend.takes_transforms:
        return "supports only kv_recipe plain"
    # On GPUs, `recent` attends to the last tokens for backends that do not.
    if config.recent and config.device_type != "cuda" and not backend.takes_recent:
        return "reads all tokens from the pages"
    # The best backend for a batch would otherwise depend on the rest of the batch.
    if config.batch_invariant and not named and not backend.takes_every_batch:
        return "runs only if chosen by name; batch_invariant needs one backend for all batches"
    return None


@lru_cache(maxsize=256)
def _log_slow(fast: str, reason: str) -> None:
    """Log once per reason why the reference runs."""
    if fast == "cpu":
        logger.info("attention runs by PyTorch operators: %s", reason)
    else:
        logger.warning("attention: the reference runs, slowly, and syncs the GPU: %s", reason)


ATTENTION_BACKENDS = _AttentionBackends(
    "attention backend",
    {
        "cuda": "halfbyte.attention.decode.cuda:CudaAttention",
        "dense": "halfbyte.attention.prefill.dense:DenseAttention",
        "triton": "halfbyte.attention.paged.triton:TritonAttention",
        "cpu": "halfbyte.attention.cpu:CpuAttention",
        "reference": "halfbyte.attention.reference:ReferenceAttention",
        # After the reference, which can do everything: never chosen by default.
        "flashinfer": "halfbyte.attention.flashinfer:FlashInferAttention",
    },
)
"""Best first."""


def check_attention_backend(name: str | None, device: torch.device) -> None:
    """Raise NoImplementationError for a backend that is unknown or unsupported on the machine.

    For early checks of a name; None is always valid. Whether the backend supports the tensors
    (including their device) is only checked in the first call.
    """
    if name is not None:
        ATTENTION_BACKENDS.select(None, name, None if device.type == "cuda" else CPU)
