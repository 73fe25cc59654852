"""halfbyte's log inside vLLM, which by itself shows only its own loggers'."""

import logging
from typing import Any

from halfbyte.plugins.vllm.options import LastModel, Options

logger = logging.getLogger("halfbyte")


def follow_vllm() -> None:
    """Show halfbyte's log where vLLM shows its own, unless the user has configured a handler."""
    vllm = logging.getLogger("vllm")
    if logger.hasHandlers() or not vllm.handlers:
        return
    logger.handlers = list(vllm.handlers)
    if logger.level == logging.NOTSET:
        logger.setLevel(vllm.getEffectiveLevel())


def log_cache(model_config: Any, impl: Any, options: Options, source: str | None) -> None:
    """Log once per engine how K and V are stored.

    Args:
        model_config: vLLM's, of the run's target.
        impl: a layer's attention; the layers that `kv_cache_dtype_skip_layers` names differ.
        options: of the run.
        source: of the scales; None if the formats have none.
    """
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    if LastModel.logged is model_config:
        return
    LastModel.logged = model_config
    if get_tensor_model_parallel_rank() != 0 or not get_pp_group().is_first_rank:
        return
    # As the user named them: recipes choose other block scales for nvfp4.
    common = impl.format.k.value if impl.kv_cache_dtype == "auto" else impl.kv_cache_dtype
    k, v = options.k_dtype or common, options.v_dtype or common
    parts = [f"K and V {k}" if k == v else f"K {k} and V {v}"]
    if impl.format.k.is_nvfp4:
        parts.append(f"recipe {options.kv_recipe}")
    if impl.recent_tokens:
        parts.append(f"last {impl.recent_tokens} tokens in 16 bits")
    if source is not None:
        parts.append(f"scales from {source}")
    logger.info("halfbyte: %s", ", ".join(parts))
