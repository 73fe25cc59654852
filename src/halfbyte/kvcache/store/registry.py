"""Which backend stores: the registry, and the choice among them."""

import logging
from functools import lru_cache

import torch

from halfbyte.dispatch import Registry
from halfbyte.kvcache.store.base import StoreBackend, StoreConfig
from halfbyte.layouts import PageLayout

logger = logging.getLogger(__name__)

STORE_BACKENDS: Registry[StoreBackend] = Registry(
    "store backend",
    {
        "triton": "halfbyte.kvcache.store.triton:TritonStore",
        "cpu": "halfbyte.kvcache.store.cpu:CpuStore",
        "reference": "halfbyte.kvcache.store.reference:ReferenceStore",
    },
)
"""Best first."""
_OF_DEVICE = {"cuda": "triton", "cpu": "cpu"}
"""Who is missed where the reference must do the work."""


@lru_cache(maxsize=256)
def select_store(
    layout: PageLayout,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
    device: torch.device,
    backend: str | None = None,
    transform: bool = False,
    weighs_errors: bool = False,
) -> type[StoreBackend]:
    """The backend for such inputs.

    That nobody but the reference can do the work is said in the log, once per reason.

    Raises:
        NoImplementationError: the backend asked for is unknown or cannot do the work.
    """
    config = StoreConfig(layout, key_dtype, value_dtype, device.type, transform, weighs_errors)
    chosen = STORE_BACKENDS.select(config, explicit=backend)
    missed = _OF_DEVICE.get(device.type)
    if backend is None and chosen.name == "reference" and missed is not None:
        verdicts = {verdict.name: verdict for verdict in STORE_BACKENDS.explain(config)}
        # The CPU's kernels say themselves that they are missing.
        if device.type == "cuda" or STORE_BACKENDS.get(missed).is_supported()[0]:
            _warn_slow(verdicts[missed].reason)
    return chosen


@lru_cache(maxsize=64)
def _warn_slow(reason: str) -> None:
    logger.info("K and V are stored by PyTorch operators: %s", reason)
