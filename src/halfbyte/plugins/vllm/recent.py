"""Rings for the last tokens of running requests, beside vLLM's pages.

Attention metadata does not name a step's requests. So the runner's `execute_model` is wrapped: the
scheduler's output gives the tokens of each request in a step, and the runner their order.

The rings are the plug-in's own memory, one entry for each of `max_num_seqs` requests, allocated
with the model so that vLLM counts it. A vLLM KV cache group (`CircularBufferSpec`) would share
memory with the pages, but all groups have one block size, and a ring is as large as 230 packed
tokens: it would need its own layout, a group per few layers, and coarser prefix hits. Nor would it
record which tokens a ring holds.

A request holds an entry from its first step until it finishes or is preempted. Tokens missing from
its ring after a prefix-cache hit or a resume are filled in from its pages, in every layer after the
step's tokens are stored: hit pages may be written in the same step.
"""

import logging
from dataclasses import dataclass, fields
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from halfbyte.after_import import after_import
from halfbyte.kvcache.recent import kept_after_crop, missing_positions
from halfbyte.kvcache.recent_step import RecentStep
from halfbyte.plugins.vllm.options import LastModel
from halfbyte.plugins.vllm.recipes import has_nvfp4_keys, resolve_options
from halfbyte.plugins.vllm.registry import uses_halfbyte

logger = logging.getLogger("halfbyte")

_RUNNER = "vllm.v1.worker.gpu_model_runner"
"""Model runner V1, on CPUs as well."""
_SCHEDULED = {
    "SchedulerOutput": (
        "finished_req_ids",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
    ),
    "CachedRequestData": ("num_computed_tokens", "req_ids", "resumed_req_ids"),
    "NewRequestData": ("num_computed_tokens", "req_id"),
}
"""Required fields of the scheduler's output: attributes of vLLM's classes."""
_ENTRIES = "halfbyte_ring_entries"
"""Attribute of a model runner."""
_IS_TOLD = "halfbyte_follows_steps"
"""Attribute of its class once it is wrapped."""


@dataclass
class _Held:
    entry: int
    length: int
    """Tokens computed after the step."""
    kept_from: int
    """The entry holds positions from here on, up to the ring's capacity."""


class RingEntries:
    """Assignment of ring entries to requests, and the tokens each ring holds.

    Args:
        capacity: max running requests.
        tokens: R, also the slots of a ring: without drafts no tokens are rolled back.
    """

    def __init__(self, capacity: int, tokens: int) -> None:
        self.tokens = tokens
        self._free = list(range(capacity - 1, -1, -1))
        self._held: dict[str, _Held] = {}
        self._counts: dict[str, int] = {}
        self._missing: dict[str, range] = {}

    def begin(self, scheduled: Any) -> None:
        """Update the entries for a step.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
        """
        for request in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            if request in self._held:
                self._free.append(self._held.pop(request).entry)
        self._missing, self._counts = {}, scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            self._continue(new.req_id, new.num_computed_tokens, is_new=True)
        cached = scheduled.scheduled_cached_reqs
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._continue(request, computed, is_new=request in cached.resumed_req_ids)

    def step(self, requests: list[str], device: torch.device) -> RecentStep:
        """The step's reads and writes of the rings.

        Args:
            requests: in the order of the step's rows.
            device: for the tensors.
        """
        held = [self._held[request] for request in requests]
        return RecentStep.of(
            self.tokens,
            self.tokens,
            [x.entry for x in held],
            [x.length for x in held],
            [self._counts[request] for request in requests],
            [self._missing[request] for request in requests],
            device,
        )

    def _continue(self, request: str, computed: int, is_new: bool) -> None:
        """Record that a request's next tokens follow `computed` ones."""
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = _Held(self._take(), computed, computed)
        elif is_new or computed > held.length:  # its ring holds none of the computed tokens
            held.kept_from = computed
        else:  # rolled back, or unchanged
            held.kept_from = kept_after_crop(held.kept_from, held.length, computed, self.tokens)
        missing = missing_positions(held.kept_from, computed, self.tokens)
        self._missing[request] = missing
        held.kept_from = min(held.kept_from, missing.start)
        held.length = computed + self._counts[request]

    def _take(self) -> int:
        if not self._free:  # evict a waiting request: resuming refills its ring from pages
            waiting = next(x for x in self._held if x not in self._counts)
            self._free.append(self._held.pop(waiting).entry)
        return self._free.pop()


class _Running:
    """The current step of this process's runner."""

    runner: Any = None
    step: RecentStep | None = None


def running_step(num_tokens: int, num_requests: int, device: torch.device) -> RecentStep | None:
    """The ring operations of the step being prepared; None in a dummy run.

    Args:
        num_tokens, num_requests: of the step's metadata.
        device: of the rings.

    Raises:
        RuntimeError: they do not match the scheduler's step (a bug in the plug-in).
    """
    runner = _Running.runner
    if runner is None:
        return None
    if _Running.step is None:
        requests = list(runner.input_batch.req_ids)
        _Running.step = getattr(runner, _ENTRIES).step(requests, device)
    step = _Running.step
    if len(step.entries) != num_requests or step.num_tokens != num_tokens:
        raise RuntimeError(
            f"halfbyte: expected a step of {num_requests} requests and {num_tokens} tokens, the "
            f"scheduler's has {len(step.entries)} and {step.num_tokens}"
        )
    return step


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


def _why_no_rings(vllm_config: Any) -> list[str]:
    """Settings of a run that rings do not support."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    found = {
        "this vLLM does not say which tokens a step has": not is_installed(),
        "model runner V2": getattr(vllm_config, "use_v2_model_runner", False),
        "full CUDA graphs (cudagraph_mode)": mode is not None and mode.has_full_cudagraphs(),
        "speculative decoding": vllm_config.speculative_config is not None,
        "a KV connector": getattr(vllm_config, "kv_transfer_config", None) is not None,
        "an encoder's connector": getattr(vllm_config, "ec_transfer_config", None) is not None,
        "pipeline parallel": parallel.pipeline_parallel_size > 1,
        "micro-batches": getattr(parallel, "use_ubatching", False)
        or getattr(parallel, "enable_dbo", False),
        "kv_sharing_fast_prefill": getattr(cache, "kv_sharing_fast_prefill", False),
        "enable_sleep_mode": getattr(vllm_config.model_config, "enable_sleep_mode", False),
    }
    return [reason for reason, is_so in found.items() if is_so]


def install() -> None:
    """Wrap vLLM's model runner when it is imported."""
    after_import(_RUNNER, _wrap_runner)


def is_installed() -> bool:
    """Whether this vLLM's runner is wrapped."""
    try:
        return hasattr(import_module(_RUNNER).GPUModelRunner, _IS_TOLD)
    except (ImportError, AttributeError):
        return False


def _wrap_runner(module: ModuleType) -> None:
    runner: Any = vars(module)["GPUModelRunner"]
    output = import_module("vllm.v1.core.sched.output")
    for name, needed in _SCHEDULED.items():
        if missing := set(needed) - {field.name for field in fields(getattr(output, name))}:
            raise AttributeError(f"{name} has no {', '.join(sorted(missing))}")
    execute = runner.execute_model

    @wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *more: Any, **options: Any) -> Any:
        entries = _entries_of(self)
        if entries is None:
            return execute(self, scheduler_output, *more, **options)
        entries.begin(scheduler_output)
        if scheduler_output.num_scheduled_tokens:  # else it may be a dummy run
            _Running.runner = self
        try:
            return execute(self, scheduler_output, *more, **options)
        finally:
            _Running.runner = _Running.step = None

    runner.execute_model = execute_model
    setattr(runner, _IS_TOLD, True)


def _entries_of(runner: Any) -> RingEntries | None:
    if not hasattr(runner, _ENTRIES):
        config = runner.vllm_config
        tokens = ring_tokens(config)
        capacity = config.scheduler_config.max_num_seqs
        setattr(runner, _ENTRIES, RingEntries(capacity, tokens) if tokens else None)
    entries: RingEntries | None = getattr(runner, _ENTRIES)
    return entries
