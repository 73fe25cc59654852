"""What every attention backend is given, and what it must answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch

from halfbyte.dispatch import CPU, Answer, compute_capability_of, missing_module, runs_on_gpu
from halfbyte.kvcache.recent import RecentInputs, packed_part
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout, page_stride

_OLDEST = 80
"""Compute capability of the GPUs that kernels of ours run on."""


@dataclass(frozen=True)
class AttentionConfig:
    """The work, without its data: what decides whether a backend can do it."""

    layout: PageLayout
    num_heads: int
    query_dtype: torch.dtype
    device_type: str
    num_tokens: int
    """Query tokens in all."""
    num_seqs: int
    sliding_window: int | None = None
    has_sinks: bool = False
    softcap: float | None = None
    batch_invariant: bool = False
    """A row must not depend on the rest of the batch, nor the choice of a backend."""
    return_lse: bool = False
    aligned_pages: bool = True
    """Whether pages begin at multiples of 16 bytes, less than 4 GiB apart."""
    transform: bool = False
    """Whether K was changed before it was packed (`KVTransform`)."""
    segment: int = 0
    """Tokens that share a mean of K; 0 where K is not centred."""
    recent: bool = False
    """Whether the last tokens are not read from the pages (`RecentInputs`)."""
    compute_capability: int = CPU
    """Of the machine that the work is for, as `dispatch` counts."""


_Prepared = TypeVar("_Prepared")


class AttentionPlans:
    """What is prepared, and which backends are chosen, once for all layers of a step.

    Hand one object to every call that has the same `query_start_loc` and `seq_lens`, with the same
    values in them, one call after the other on one stream. In a CUDA graph, make the object inside
    the capture: then every replay prepares anew, from the lengths of its time. That is for decode
    steps; `dense`, for prefill, reads lengths back, which no capture allows.
    """

    def __init__(self) -> None:
        self._prepared: dict[Hashable, Any] = {}

    def get(self, key: Hashable, prepare: Callable[[], _Prepared]) -> _Prepared:
        """What was prepared under a key; prepared now if nothing was."""
        if key not in self._prepared:
            self._prepared[key] = prepare()
        return self._prepared[key]


@dataclass(frozen=True)
class AttentionInputs:
    """The work with its data, already validated; fields as `paged_attention` documents them."""

    query: torch.Tensor
    pages: torch.Tensor
    layout: PageLayout
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    sliding_window: int | None
    sinks: torch.Tensor | None
    softcap: float | None
    batch_invariant: bool
    given_out: torch.Tensor | None
    """Where the caller wants the result, if anywhere."""
    lse: torch.Tensor | None
    """float32 `[tokens, heads]`, to be written whole, or None if nobody asks."""
    plans: AttentionPlans
    transform: KVTransform | None = None
    recent: RecentInputs | None = None

    @cached_property
    def out(self) -> torch.Tensor:
        """`[tokens, heads, head_size_v]`, to be written whole.

        On a GPU of the query's dtype, with rows contiguous and aligned to 16 bytes: the caller's
        tensor where it is so. On a CPU the caller's tensor, whatever it is.
        """
        given = self.given_out
        if given is not None and (not given.is_cuda or self._suits_kernels(given)):
            return given
        return self.query.new_empty((*self.query.shape[:2], self.layout.head_size_v))

    def _suits_kernels(self, out: torch.Tensor) -> bool:
        aligned = not any(x % 8 for x in (out.storage_offset(), *out.stride()[:2]))
        return out.dtype == self.query.dtype and out.stride(2) == 1 and aligned

    def answer(self, result: torch.Tensor) -> None:
        """Make a tensor of `out`'s shape the output, without a copy where the caller gave none."""
        self.__dict__["out"] = result

    def deliver(self) -> torch.Tensor:
        """The output, in the caller's tensor if there is one."""
        if self.given_out is None or self.given_out is self.out:
            return self.out
        return self.given_out.copy_(self.out)

    @cached_property
    def packed(self) -> "AttentionInputs":
        """The work on what is read from the pages; its output is its own."""
        if self.recent is None:
            return self
        tokens, window = self.recent.tokens, self.sliding_window
        key = ("lengths of what is packed", tokens, window or 0)
        lengths, packed_window = self.plans.get(
            key, lambda: packed_part(tokens, self.seq_lens, window or 0)
        )
        return replace(
            self,
            seq_lens=lengths,
            sliding_window=packed_window or None,
            given_out=None,
            plans=self.plans.get(("packed", *key), AttentionPlans),
            recent=None,
        )

    @property
    def num_segments(self) -> int:
        """Means of K that a sequence of all that block tables have room for has; 0 without."""
        if self.transform is None or not self.transform.shared_tokens:
            return 0
        return -(-self.block_tables.shape[1] * self.layout.block_size // self.transform.segment)

    def config(self) -> AttentionConfig:
        """The work, without its data."""
        return AttentionConfig(
            layout=self.layout,
            num_heads=self.query.shape[1],
            query_dtype=self.query.dtype,
            device_type=self.query.device.type,
            num_tokens=self.query.shape[0],
            num_seqs=self.seq_lens.shape[0],
            sliding_window=self.sliding_window,
            has_sinks=self.sinks is not None,
            softcap=self.softcap,
            batch_invariant=self.batch_invariant,
            # What the last tokens gave is joined by it.
            return_lse=self.lse is not None or (self.recent is not None and self.query.is_cuda),
            aligned_pages=_aligned(self.pages),
            transform=self.transform is not None,
            segment=0 if self.transform is None else self.transform.shared_tokens,
            recent=self.recent is not None,
            compute_capability=compute_capability_of(self.query.device),
        )


def _aligned(pages: torch.Tensor) -> bool:
    stride = page_stride(pages)
    return (pages.data_ptr() | stride) % 16 == 0 and stride < 2**32


class AttentionBackend(ABC):
    """A way to attend to packed pages. Stateless: one class, never an instance."""

    name: ClassVar[str]
    takes_transforms: ClassVar[bool] = False
    """Whether it reads K that went through a `KVTransform`."""
    takes_recent: ClassVar[bool] = False
    """Whether it reads the last tokens from `RecentInputs`."""

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether it runs on a machine; None means this one."""

    @classmethod
    @abstractmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """Whether it can do the work."""

    @classmethod
    @abstractmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """Fill `inputs.out`, and `inputs.lse` where it is not None."""


class GpuAttention(AttentionBackend):
    """A backend for NVIDIA GPUs from SM80 that needs some module."""

    module: ClassVar[str]
    """Without it there is no such backend."""
    module_source: ClassVar[str]
    """Who installs it, for messages."""
    purpose: ClassVar[str]

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later, where the module is installed."""
        return runs_on_gpu(
            compute_capability,
            _OLDEST,
            lambda: missing_module(cls.module, cls.module_source),
            cls.purpose,
        )
