"""Chooses backends: one per batch, or per part of a batch that mixes prompts and decode steps.

A backend is selected for the whole batch first, and then asked which sequences it leaves out
(`AttentionBackend.split_off`). Splitting first would take lengths, which are on the GPU: reading
them back syncs the host, and cannot be captured in a CUDA graph. Selection only takes what the host
knows (`AttentionConfig`), so that only batches that run on `dense`, which reads lengths back for
its plan anyway, are split. What `dense` leaves out is marked (`split_off`): it depends on lengths
and on the size of its workspace, so that selection without the mark would find `dense` again.
"""

from functools import partial
from typing import NamedTuple

from halfbyte.attention.base import AttentionBackend, AttentionConfig, AttentionInputs
from halfbyte.attention.registry import ATTENTION_BACKENDS


def run(inputs: AttentionInputs, backend: str | None = None) -> None:
    """Run validated work on the named backend, or on the best one."""
    chosen = _select(inputs, backend)
    if inputs.recent is None or chosen.takes_recent:
        attend(chosen, inputs)
        return
    # Here, because the import needs Triton.
    from halfbyte.attention.recent.launcher import attend_with_recent

    attend_with_recent(inputs, partial(attend, chosen))


def attend(backend: type[AttentionBackend], inputs: AttentionInputs) -> None:
    """Run a backend; sequences that it splits off run on the backends that are best for them."""
    for part in backend.split_off(inputs):
        batch = part.inputs_of(inputs)
        _select(batch).forward(batch)
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
