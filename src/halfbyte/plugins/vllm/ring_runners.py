"""vLLM's model runners, wrapped so that attention metadata knows a step's requests.

The scheduler's output gives the tokens of each request in a step, and the runner their order: V1
has it in its input batch, V2 in what `prepare_inputs` returns.

A step in which a ring lacks tokens does not run as a full CUDA graph: the tokens are filled in from
the pages in every layer after the step's tokens are stored, because a page that is hit may be
written in the same step.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from halfbyte.after_import import after_import
from halfbyte.plugins.vllm.ring_entries import RingEntries, ScheduledRings

V1 = "vllm.v1.worker.gpu_model_runner"
"""Model runner V1, on CPUs as well."""
V2 = "vllm.v1.worker.gpu.model_runner"
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


class _Dispatch(NamedTuple):
    """The object of a model runner that chooses the CUDA graph of a step."""

    attribute: str
    """Its name in the runner."""
    module: str
    class_name: str
    argument: str
    """Argument of its `dispatch` that can exclude full graphs."""


_DISPATCHERS = {
    V1: _Dispatch(
        "cudagraph_dispatcher",
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher",
        "invalid_modes",
    ),
    V2: _Dispatch(
        "cudagraph_manager",
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager",
        "uniform_token_count",
    ),
}
_ENTRIES = "halfbyte_ring_entries"
"""Attribute of a model runner."""
_IS_WRAPPED = "halfbyte_follows_steps"
"""Attribute that marks wrapped classes, of runners and of `_DISPATCHERS`."""


class _Running:
    """The current step of this process's runner."""

    entries: RingEntries | None = None
    requests: Callable[[], Sequence[str]] | None = None
    rings: ScheduledRings | None = None


def running_rings() -> ScheduledRings | None:
    """Rings of the step being prepared; None in a dummy run."""
    if _Running.entries is None or _Running.requests is None:
        return None
    if _Running.rings is None:
        _Running.rings = _Running.entries.step(list(_Running.requests()))
    return _Running.rings


def install(make_entries: Callable[[Any], RingEntries | None]) -> None:
    """Wrap vLLM's model runners when they are imported.

    Args:
        make_entries: those for a `vllm_config`; None without rings.
    """
    after_import(V1, lambda module: _wrap(module, V1, make_entries))
    after_import(V2, lambda module: _wrap(module, V2, make_entries))


def is_wrapped(name: str) -> bool:
    """Whether this vLLM's runner is wrapped.

    Args:
        name: `V1` or `V2`.
    """
    try:
        return hasattr(import_module(name).GPUModelRunner, _IS_WRAPPED)
    except (ImportError, AttributeError):
        return False


def can_avoid_full_graphs(name: str) -> bool:
    """Whether single steps can be kept from full CUDA graphs.

    Args:
        name: `V1` or `V2`.
    """
    of = _DISPATCHERS[name]
    try:
        dispatch = getattr(import_module(of.module), of.class_name).dispatch
    except (ImportError, AttributeError):
        return False
    return of.argument in inspect.signature(dispatch).parameters


def _wrap(module: ModuleType, name: str, make_entries: Callable[[Any], RingEntries | None]) -> None:
    runner: Any = vars(module)["GPUModelRunner"]
    if hasattr(runner, _IS_WRAPPED):
        return
    output = import_module("vllm.v1.core.sched.output")
    for class_name, needed in _SCHEDULED.items():
        known = {field.name for field in fields(getattr(output, class_name))}
        if missing := set(needed) - known:
            raise AttributeError(f"{class_name} has no {', '.join(sorted(missing))}")
    if name == V2:
        _wrap_prepare_inputs(runner)
    execute = runner.execute_model
    parameters = inspect.signature(execute)

    @wraps(execute)
    def execute_model(self: Any, *arguments: Any, **options: Any) -> Any:
        given = parameters.bind(self, *arguments, **options).arguments
        entries = None if given.get("dummy_run") else _entries_of(self, make_entries)
        if entries is None:
            return execute(self, *arguments, **options)
        scheduled = given["scheduler_output"]
        entries.begin(scheduled)
        if scheduled.num_scheduled_tokens:  # a step without tokens may be a dummy run
            _Running.entries = entries
            if name == V1:
                _Running.requests = lambda: self.input_batch.req_ids
        _keep_from_full_graphs(self, name)
        try:
            return execute(self, *arguments, **options)
        finally:
            _Running.entries = _Running.requests = _Running.rings = None

    runner.execute_model = execute_model
    setattr(runner, _IS_WRAPPED, True)


def _wrap_prepare_inputs(runner: Any) -> None:
    prepare = runner.prepare_inputs

    @wraps(prepare)
    def prepare_inputs(self: Any, *arguments: Any, **options: Any) -> Any:
        batch = prepare(self, *arguments, **options)
        if _Running.entries is not None:
            _Running.requests = lambda: batch.req_ids
        return batch

    runner.prepare_inputs = prepare_inputs


def _entries_of(
    runner: Any, make_entries: Callable[[Any], RingEntries | None]
) -> RingEntries | None:
    if not hasattr(runner, _ENTRIES):
        setattr(runner, _ENTRIES, make_entries(runner.vllm_config))
    entries: RingEntries | None = getattr(runner, _ENTRIES)
    return entries


def _keep_from_full_graphs(runner: Any, name: str) -> None:
    """Wrap a runner's choice of CUDA graphs, once."""
    dispatcher = getattr(runner, _DISPATCHERS[name].attribute, None)
    if dispatcher is None or hasattr(dispatcher, _IS_WRAPPED):
        return
    dispatch = dispatcher.dispatch
    parameters = inspect.signature(dispatch)

    @wraps(dispatch)
    def dispatch_without_full(*arguments: Any, **options: Any) -> Any:
        entries = _Running.entries
        if entries is None or not entries.lacks_tokens:
            return dispatch(*arguments, **options)
        call = parameters.bind(*arguments, **options)
        if name == V1:
            from vllm.config import CUDAGraphMode

            invalid = call.arguments.get("invalid_modes") or ()
            call.arguments["invalid_modes"] = {*invalid, CUDAGraphMode.FULL}
        else:  # without these, V2 finds no full graph for a batch
            for bound in ("uniform_token_count", "max_query_len"):
                if bound in parameters.parameters:
                    call.arguments[bound] = None
        return dispatch(*call.args, **call.kwargs)

    dispatcher.dispatch = dispatch_without_full
    setattr(dispatcher, _IS_WRAPPED, True)
