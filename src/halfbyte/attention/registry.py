"""The registry of attention backends, and rules that exclude backends from automatic choice."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from halfbyte.attention.base import AttentionBackend, AttentionConfig
from halfbyte.dispatch import CPU, Registry, Verdict

logger = logging.getLogger("halfbyte")

# Backends that support every batch: the best backend otherwise depends on the rest of the batch.
_BATCH_INVARIANT = ("triton", "cpu", "reference")


class _AttentionBackends(Registry[AttentionBackend]):
    """With batch invariance, chooses only among backends that support every batch.

    An explicit name overrides this.
    """

    def explain(
        self, config: AttentionConfig | None = None, compute_capability: int | None = None
    ) -> list[Verdict]:
        verdicts = super().explain(config, compute_capability)
        among, why = self._candidates(config)
        reason = f"runs only if chosen by name; {why}"
        return [
            verdict._replace(usable=False, reason=reason)
            if verdict.usable and verdict.name not in among
            else verdict
            for verdict in verdicts
        ]

    def _judge(self, name: str, config: Any, compute_capability: int | None) -> Verdict:
        verdict = super()._judge(name, config, compute_capability)
        transform = config is not None and config.transform
        if verdict.usable and transform and not self.get(name).takes_transforms:
            return verdict._replace(usable=False, reason="reads only the recipe plain")
        recent = config is not None and config.recent and config.device_type != "cuda"
        if verdict.usable and recent and not self.get(name).takes_recent:
            return verdict._replace(usable=False, reason="reads all tokens from the pages")
        return verdict

    def _candidates(self, config: AttentionConfig | None) -> tuple[Sequence[str], str]:
        """Names to choose from, and why the rest is excluded."""
        if config is not None and config.batch_invariant:
            return (
                _BATCH_INVARIANT,
                "batch_invariant needs a backend that supports every batch",
            )
        return self.names(), ""

    def select(
        self,
        config: AttentionConfig | None,
        explicit: str | None = None,
        compute_capability: int | None = None,
        among: Sequence[str] | None = None,
    ) -> type[AttentionBackend]:
        if among is None:
            among, _ = self._candidates(config)
        chosen = super().select(config, explicit, compute_capability, among)
        on_gpu = config is not None and config.device_type == "cuda"
        if on_gpu and explicit is None and chosen.name == "reference":
            verdicts = {v.name: v for v in self.explain(config, compute_capability)}
            _warn_slow(verdicts["triton"].reason)
        return chosen


@lru_cache(maxsize=256)
def _warn_slow(reason: str) -> None:
    """Warn once per reason."""
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
