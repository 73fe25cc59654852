"""A layer's step whose sequences have rings for their last tokens."""

from collections.abc import Callable
from typing import TypeVar

from halfbyte.attention.recent.fill import Rings, fill_rings
from halfbyte.kvcache.recent import RecentInputs
from halfbyte.kvcache.recent_step import LayerPages, RecentStep
from halfbyte.kvcache.store import NewTokens

Result = TypeVar("Result")


def attend_with_rings(
    attend: Callable[..., Result],
    step: RecentStep,
    rings: Rings,
    tokens: int,
    packed: LayerPages,
    new: NewTokens,
    window: int | None = None,
) -> Result:
    """Store the step's tokens in pages and rings, fill what rings lack, and attend.

    Args:
        attend: `paged_attention` with all arguments but `new` and `recent`.
        step: of the batch.
        rings: K and V of the layer, `[entries, kv_heads, ring, D]` and `[entries, kv_heads, ring,
            Dv]`, contiguous.
        tokens: R, as of `RecentInputs`.
        packed: the layer's pages, with all tokens before the step's.
        new: the step's tokens.
        window: of the layer's attention.
    """
    slots = step.slots_in(rings)
    whole = new._replace(recent=slots) if step.write_first else new
    unstored: NewTokens | None = whole
    if step.missing:
        # What a ring lacks may be among the step's tokens: two prompts may share a prefix.
        whole.store(packed.pages, packed.layout, packed.k_scale, packed.v_scale, packed.transform)
        fill_rings(step, rings, packed, window)
        unstored = None
    own = new.key[: step.num_tokens], new.value[: step.num_tokens]
    result = attend(new=unstored, recent=RecentInputs(tokens, *rings, step.entries, *own))
    if not step.write_first:
        # They overwrite slots that the step's own queries read.
        slots.write(new.key, new.value)
    return result
