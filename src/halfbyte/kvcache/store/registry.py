"""The registry of store backends, and how one is selected."""

import logging
from functools import lru_cache

from halfbyte.dispatch import Registry
from halfbyte.kvcache.store.base import StoreBackend, StoreConfig

logger = logging.getLogger(__name__)

STORE_BACKENDS: Registry[StoreBackend] = Registry(
    "store backend",
    {
        "cuda": "halfbyte.kvcache.store.cuda.store:CudaStore",
        "triton": "halfbyte.kvcache.store.triton:TritonStore",
        "cpu": "halfbyte.kvcache.store.cpu:CpuStore",
        "reference": "halfbyte.kvcache.store.reference:ReferenceStore",
    },
)
"""Best first."""
_OF_DEVICE = {"cuda": "triton", "cpu": "cpu"}
"""The fast backend per device type; logged if the reference replaces it."""


@lru_cache(maxsize=256)
def select_store(config: StoreConfig, backend: str | None = None) -> type[StoreBackend]:
    """The backend of a name, or the best that can do the work.

    Logs, once per reason, if only the reference can do the work.

    Raises:
        NoImplementationError: the requested backend is unknown or cannot do the work.
    """
    chosen = STORE_BACKENDS.select(config, explicit=backend)
    missed = _OF_DEVICE.get(config.device_type)
    if backend is None and chosen.name == "reference" and missed is not None:
        verdicts = {verdict.name: verdict for verdict in STORE_BACKENDS.explain(config)}
        # The CPU library logs by itself that it is not built.
        if config.device_type == "cuda" or STORE_BACKENDS.get(missed).is_supported()[0]:
            _log_slow(verdicts[missed].reason)
    return chosen


@lru_cache(maxsize=64)
def _log_slow(reason: str) -> None:
    logger.info("K and V are stored by PyTorch operators: %s", reason)
