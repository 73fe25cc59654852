"""What decode reads beside the pages: a recipe's means, first tokens and recent tokens."""

import ctypes
from typing import NamedTuple

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.kernels.runtime.parameters import KernelArguments, aligned
from halfbyte.kvcache.recent import RecentInputs
from halfbyte.kvcache.transform import MARK, KVTransform

_ROUND = 64
"""Batch-invariant rounds of recent tokens start at multiples of this many: a multiple of a round's
tokens in `recent.cuh` and `recent_wgmma.cuh`."""


class RecipeParams(ctypes.Structure):
    """`Recipe` of `params.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "high", "angles")),
        *((name, ctypes.c_void_p) for name in ("low_mean", "high_mean")),
        *((name, ctypes.c_void_p) for name in ("first_keys", "first_values")),
        *((name, ctypes.c_void_p) for name in ("ring_keys", "ring_values")),
        *((name, ctypes.c_void_p) for name in ("new_keys", "new_values", "entries", "seq_lens")),
        ("key_stride_token", ctypes.c_uint64),
        ("key_stride_head", ctypes.c_uint64),
        ("value_stride_token", ctypes.c_uint64),
        ("value_stride_head", ctypes.c_uint64),
        ("ring", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("reach", "align", "mean_segments")),
    )


class RecipeVariant(NamedTuple):
    """Compile-time options of the kernels for a recipe."""

    rotate: bool = False
    recent: int = 0
    """Recent tokens read in 16 bits; 0 for none."""
    segment: int = 0
    """Tokens that share a mean; 0 where K is not centred."""
    pairs: int = 0
    """Channel pairs of `PairTables`; 0 where K is not centred."""
    knows_first: bool = False
    """Whether pages may mark the first token."""
    halves: bool = False
    """Whether pair i is channels i and `pairs` + i, as RoPE pairs them in most models."""

    @property
    def has_keys(self) -> bool:
        """Whether there may be keys that are not in the pages."""
        return self.recent > 0 or self.knows_first

    def macros(self) -> dict[str, int]:
        """Macros of `decode.cu` and `decode_wgmma.cu`."""
        return {
            "ROTATE": int(self.rotate),
            "RECENT": self.recent,
            "SEGMENT": self.segment,
            "PAIRS": self.pairs,
            "PAIRS_ARE_HALVES": int(self.halves),
            "KNOWS_FIRST": int(self.knows_first),
            "MARK": MARK,
        }


NO_RECIPE = RecipeVariant()


class BoundRecipe(NamedTuple):
    """A recipe's inputs of a call."""

    variant: RecipeVariant
    struct: RecipeParams
    kept: tuple[torch.Tensor, ...]
    """Keeps the tensors alive that the struct points to."""


def variant_of(inputs: AttentionInputs) -> RecipeVariant:
    """Compile-time options for a call."""
    transform, recent = inputs.transform, inputs.recent
    variant = RecipeVariant(recent=0 if recent is None else recent.tokens)
    if transform is None:
        return variant
    tables = transform.pair_tables if inputs.num_segments else None
    return variant._replace(
        rotate=transform.rotate,
        segment=0 if tables is None else transform.segment,
        pairs=0 if tables is None else tables.cos.shape[1],
        # Only the block scales of nvfp4 can mark it.
        knows_first=transform.first_keys is not None and inputs.layout.k_dtype.is_nvfp4,
        halves=transform.pairs_are_halves,
    )


def bind_recipe(inputs: AttentionInputs) -> BoundRecipe:
    """Bind the tensors of a call's recipe.

    Does not sync the GPU, except in the first call with a transform.

    Args:
        inputs: of `paged_attention`, checked, all on one GPU.
    """
    variant = variant_of(inputs)
    arguments = KernelArguments(RecipeParams)
    if inputs.transform is not None:
        _bind_transform(arguments, inputs.transform, variant, inputs.query.dtype)
    if inputs.recent is not None:
        _bind_recent(arguments, inputs.recent, inputs)
    return BoundRecipe(variant, arguments.params, tuple(arguments.tensors))


def _bind_transform(
    arguments: KernelArguments, transform: KVTransform, variant: RecipeVariant, dtype: torch.dtype
) -> None:
    tables = transform.pair_tables
    if variant.segment and tables is not None:
        angles = transform.split_angles
        assert angles is not None, "made from `tables`"
        arguments.bind(low=tables.low, high=tables.high, angles=angles)
        arguments.bind(low_mean=tables.low_mean, high_mean=tables.high_mean)
        arguments.params.mean_segments = len(tables.cos)
    if (first := transform.first_tokens(dtype)) is not None:
        arguments.bind(first_keys=first[0], first_values=first[1])


def _bind_recent(arguments: KernelArguments, recent: RecentInputs, inputs: AttentionInputs) -> None:
    dtype = inputs.query.dtype
    key, value = (aligned(x.to(dtype)) for x in (recent.key, recent.value))
    arguments.bind(
        ring_keys=recent.keys.to(dtype),
        ring_values=recent.values.to(dtype),
        new_keys=key,
        new_values=value,
        entries=recent.entries.contiguous(),
        seq_lens=inputs.seq_lens.contiguous(),
    )
    params = arguments.params
    params.key_stride_token, params.key_stride_head = key.stride()[:2]
    params.value_stride_token, params.value_stride_head = value.stride()[:2]
    params.ring = recent.keys.shape[2]
    params.reach = min(inputs.sliding_window or recent.tokens, recent.tokens)
    # Batch-invariant: rounds start at fixed positions, so that a row does not depend on other rows.
    params.align = _ROUND if inputs.batch_invariant else 1
