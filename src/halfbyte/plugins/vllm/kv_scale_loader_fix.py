"""Fix for vLLM 0.24, which cannot load K and V scales of models with fused q, k and v."""

import inspect
from typing import Any


def accept_shard_ids() -> None:
    """Make the loader of K and V scales accept the shard id that fused layers pass.

    Otherwise such checkpoints raise TypeError. No effect if the loader accepts it already.
    """
    from vllm.model_executor.layers.quantization import kv_cache

    scale = getattr(kv_cache, "KVCacheScaleParameter", None)
    loader = getattr(scale, "weight_loader", None)
    if scale is None or loader is None or len(inspect.signature(loader).parameters) != 2:
        return

    def weight_loader(param: Any, loaded_weight: Any, *shard: Any) -> None:
        loader(param, loaded_weight)

    scale.weight_loader = staticmethod(weight_loader)
