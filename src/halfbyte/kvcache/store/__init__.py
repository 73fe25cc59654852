"""Writing K and V of new tokens to their slots, by interchangeable backends."""

from halfbyte.kvcache.store.base import StoreBackend, StoreConfig, StoreInputs
from halfbyte.kvcache.store.interface import NewTokens, reshape_and_cache
from halfbyte.kvcache.store.reference import read_tokens
from halfbyte.kvcache.store.registry import STORE_BACKENDS

__all__ = [
    "STORE_BACKENDS",
    "NewTokens",
    "StoreBackend",
    "StoreConfig",
    "StoreInputs",
    "read_tokens",
    "reshape_and_cache",
]
