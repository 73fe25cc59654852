"""Chooses backends: one per batch, or per part of a batch that mixes prompts and decode steps.

Three steps: select a backend for the whole batch, let it say which sequences it leaves out
(`AttentionBackend.split_off`), select a backend for each of these parts.

Why the batch is not split before the first selection:

- A split takes lengths, which are on the GPU. Reading them back syncs the host, and a CUDA graph
  cannot capture it. Selection takes only what the host knows (`AttentionConfig`), so that only
  batches for `dense`, which reads lengths back for its plan anyway, pay for it.
- Every backend but `dense` takes the whole batch, also if it was named, or chosen for batch
  invariance. So whether to split is known only after a backend is selected.
- What to leave out depends on the chosen backend: for `dense` on its workspace and on the time to
  unpack a sequence's pages. Configs of the parts have `split_off` set, with which `dense` refuses
  them, but for those that it takes another way (`Part.MERGED`).

The first selection is cached for all layers of a step.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from halfbyte.attention.base import (
    AttentionBackend,
    AttentionConfig,
    AttentionInputs,
    OverlapsStore,
    ResultBySequence,
)
from halfbyte.attention.registry import ATTENTION_BACKENDS


def run(
    inputs: AttentionInputs,
    backend: str | None = None,
    store: Callable[[], None] | None = None,
) -> None:
    """Run validated work on the named backend, or on the best one.

    Args:
        store: stores the step's tokens in the pages, at least one; None if they are there already.
    """
    chosen = _select(inputs, backend)
    if store is not None and issubclass(chosen, OverlapsStore):
        chosen.store_and_forward(inputs, store)
        return
    if store is not None:
        store()
    if inputs.recent is None or chosen.attends_to_recent(inputs):
        run_on(chosen, inputs)
        return
    # Here, because the import needs Triton.
    from halfbyte.attention.recent.launcher import run_with_recent

    run_with_recent(inputs, partial(run_packed, chosen))


def run_packed(backend: type[AttentionBackend], inputs: AttentionInputs) -> ResultBySequence | None:
    """As `run_on`, but a result that lies in one tensor by sequence is returned, not copied."""
    result = backend.forward_by_sequence(inputs)
    if result is None:
        run_on(backend, inputs)
    return result


def run_on(backend: type[AttentionBackend], inputs: AttentionInputs) -> None:
    """Run a backend; sequences that it splits off run on the backends that are best for them."""
    for part in backend.split_off(inputs):
        batch = part.inputs_of(inputs)
        run(batch)
        part.copy_results(batch, inputs)
    backend.forward(inputs)


class _Choice(NamedTuple):
    """What a choice of a backend depends on."""

    backend: str | None
    config: AttentionConfig


def _select(inputs: AttentionInputs, backend: str | None = None) -> type[AttentionBackend]:
    """The choice is cached for all calls that share plans and have the same config."""
    config = inputs.config()
    return inputs.plans.get(
        _Choice(backend, config), lambda: ATTENTION_BACKENDS.select(config, explicit=backend)
    )
