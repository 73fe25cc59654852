"""Batches that mix prompts and decode steps: each part runs on the backend that is best for it."""

import pytest
import torch

from attention.cases import assert_close_to_exact
from attention.prefill.dense_cases import SMALL, inputs_of, make_small
from halfbyte.attention import ATTENTION_BACKENDS, AttentionConfig, router
from halfbyte.attention.prefill.dense import DenseAttention
from halfbyte.attention.reference import ReferenceAttention
from halfbyte.dispatch import Answer

pytest.importorskip("triton")


class Mine(ReferenceAttention):
    """A backend from another package."""

    seen: list[AttentionConfig]

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        cls.seen.append(config)
        return True, "every batch"


def test_parts_of_a_mixed_batch_are_selected_by_their_own_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backends registered by another package are candidates, too."""
    case = make_small(SMALL["with-decoding-sequences"], monkeypatch)
    monkeypatch.setattr(Mine, "seen", [], raising=False)
    monkeypatch.setattr(ATTENTION_BACKENDS, "_targets", {"mine": f"{__name__}:Mine"})
    monkeypatch.setattr(ATTENTION_BACKENDS, "_loaded", {"mine": Mine})
    inputs = inputs_of(case, "cpu", torch.empty(case.query.shape[:2]))
    for _ in range(2):
        router.run_on(DenseAttention, inputs)
        assert_close_to_exact(inputs.out, case)
    # The sequences of 1, 3 and 0 new tokens; chosen once for calls that share plans.
    parts = [(config.num_tokens, config.num_seqs, config.split_off) for config in Mine.seen]
    assert parts == [(4, 3, True)]


def test_a_batch_of_decode_steps_alone_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"query_lens": (1, 3), "seq_lens": (50, 44)}
    case = make_small(lengths, monkeypatch)
    inputs = inputs_of(case, "cpu")
    (part,) = DenseAttention.split_off(inputs)
    batch = part.inputs_of(inputs)
    assert batch.query is inputs.query
    assert batch.block_tables is inputs.block_tables
    router.run_on(DenseAttention, inputs)
    assert_close_to_exact(inputs.out, case)
