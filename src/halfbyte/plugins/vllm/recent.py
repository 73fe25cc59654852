"""When running requests have rings for their last tokens, beside vLLM's pages.

The rings are the plug-in's own memory, one entry for each of `max_num_seqs` requests, allocated
with the model so that vLLM counts it. A vLLM KV cache group (`CircularBufferSpec`) would share
memory with the pages, but all groups have one block size, and a ring is as large as 230 packed
tokens: it would need its own layout, a group per few layers, and coarser prefix hits. Nor would it
record which tokens a ring holds.
"""

import logging
from typing import Any

from halfbyte.plugins.vllm import ring_runners
from halfbyte.plugins.vllm.options import LastModel
from halfbyte.plugins.vllm.recipes import has_nvfp4_keys, resolve_options
from halfbyte.plugins.vllm.registry import uses_halfbyte
from halfbyte.plugins.vllm.ring_entries import RingEntries

logger = logging.getLogger("halfbyte")

_DRAFTS_OF_PROMPTS = ("ngram", "suffix")
"""Methods of speculative decoding without layers of their own. `ngram_gpu` changes the tokens of a
step after the scheduler has named them."""


def ring_tokens(vllm_config: Any) -> int:
    """Number of last tokens that layers with K in NVFP4 keep in 16 bits; 0 without rings.

    Logs why, if the recipe has rings but the run's configuration does not support them.
    """
    if not uses_halfbyte(vllm_config):
        return 0
    options = resolve_options(vllm_config)
    if not options.recent_tokens or not has_nvfp4_keys(vllm_config, options):
        return 0
    reasons = _why_no_rings(vllm_config)
    if not reasons:
        return options.recent_tokens
    if LastModel.without_rings is not vllm_config.model_config:
        LastModel.without_rings = vllm_config.model_config
        logger.warning(
            "kv_recipe %s without the last %d tokens in 16 bits: %s",
            *(options.kv_recipe, options.recent_tokens, ", ".join(reasons)),
        )
    return 0


def ring_slots(vllm_config: Any, tokens: int) -> int:
    """Slots of a ring: R, and twice the drafts of a step.

    The scheduler may count the drafts of a step as accepted until it has the next one's results.

    Args:
        vllm_config: of the run.
        tokens: R.
    """
    draft = vllm_config.speculative_config
    return tokens + 2 * ((draft.num_speculative_tokens or 0) if draft is not None else 0)


def make_entries(vllm_config: Any) -> RingEntries | None:
    """Entries for the requests of a run; None without rings."""
    tokens = ring_tokens(vllm_config)
    if not tokens:
        return None
    capacity = vllm_config.scheduler_config.max_num_seqs
    return RingEntries(capacity, tokens, ring_slots(vllm_config, tokens))


def install() -> None:
    """Follow the steps of vLLM's model runners."""
    ring_runners.install(make_entries)


def _why_no_rings(vllm_config: Any) -> list[str]:
    """Settings of a run that rings do not support."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    is_v2 = bool(getattr(vllm_config, "use_v2_model_runner", False))
    runner = ring_runners.V2 if is_v2 else ring_runners.V1
    has_full_graphs = mode is not None and mode.has_full_cudagraphs()
    draft = vllm_config.speculative_config
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    found = {
        "this vLLM does not say which tokens a step has": not ring_runners.is_wrapped(runner),
        "full CUDA graphs (cudagraph_mode)": has_full_graphs
        and not ring_runners.can_avoid_full_graphs(runner),
        "data parallel with model runner V2": is_v2
        and getattr(parallel, "data_parallel_size", 1) > 1,
        f"drafts by {getattr(draft, 'method', None)}": draft is not None
        and draft.method not in _DRAFTS_OF_PROMPTS,
        # It takes tokens back that a ring may have from blocks that failed to load.
        "kv_load_failure_policy recompute": getattr(transfer, "kv_load_failure_policy", None)
        == "recompute",
        "an encoder's connector": getattr(vllm_config, "ec_transfer_config", None) is not None,
        "micro-batches": getattr(parallel, "use_ubatching", False)
        or getattr(parallel, "enable_dbo", False),
        "kv_sharing_fast_prefill": getattr(cache, "kv_sharing_fast_prefill", False),
        "enable_sleep_mode": getattr(vllm_config.model_config, "enable_sleep_mode", False),
    }
    return [reason for reason, is_so in found.items() if is_so]
