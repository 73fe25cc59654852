"""Causal attention on packed pages of the KV cache, with interchangeable backends."""

from halfbyte.attention.base import (
    AttentionBackend,
    AttentionConfig,
    AttentionInputs,
    AttentionPlans,
)
from halfbyte.attention.interface import paged_attention
from halfbyte.attention.reference import attend
from halfbyte.attention.registry import ATTENTION_BACKENDS, check_attention_backend

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "AttentionConfig",
    "AttentionInputs",
    "AttentionPlans",
    "attend",
    "check_attention_backend",
    "paged_attention",
]
