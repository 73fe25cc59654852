"""The interface of attention backends: config, inputs, per-step plans and base classes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from halfbyte.dispatch import CPU, Answer, compute_capability_of, missing_module, runs_on_gpu
from halfbyte.kvcache.recent import RecentInputs, packed_part
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout, page_stride

_MIN_CAPABILITY = 80
"""Min compute capability of halfbyte's kernels."""


class Part(Enum):
    """What sequences are of a mixed batch."""

    WHOLE = auto()
    """They are the batch."""
    LEFT_OUT = auto()
    """A backend left them out: they are for others."""
    MERGED = auto()
    """They are for the same backend, which reads recent tokens with the pages elsewhere, but cannot
    here: attention to these has to be merged."""


@dataclass(frozen=True)
class AttentionConfig:
    """Metadata of a call, by which backends decide whether they support it."""

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
    """Neither a row nor the choice of a backend may depend on the rest of the batch."""
    return_lse: bool = False
    aligned_pages: bool = True
    """Whether pages are aligned to 16 bytes, less than 4 GiB apart."""
    transform: bool = False
    """Whether K was changed before it was packed (`KVTransform`)."""
    segment: int = 0
    """Tokens that share a mean of K; 0 where K is not centred."""
    pairs: int = 0
    """Channel pairs of the means (`PairTables`); 0 where K is not centred, and on CPUs."""
    recent: bool = False
    """Whether recent tokens are read from `RecentInputs` instead of the pages."""
    compute_capability: int = CPU
    """The machine's: 90 for SM90, `dispatch.CPU` without a GPU."""
    split_off: bool = False
    """Whether these sequences were split off a batch with prompts, because unpacking their pages
    would take longer than it saves."""


_Prepared = TypeVar("_Prepared")


class _TypedKey(NamedTuple):
    """A key of `AttentionPlans` with its class, since named tuples of two classes may be equal."""

    kind: type
    key: Hashable


class AttentionPlans:
    """Caches plans and chosen backends for all layers of a step.

    Pass one object to all calls with equal `query_start_loc` and `seq_lens`, in order on one
    stream. In a CUDA graph, create the object inside the capture: then every replay plans anew,
    from the current lengths. This works for decode steps only; `dense`, for prefill, reads lengths
    back to the host, which cannot be captured.
    """

    def __init__(self) -> None:
        self._prepared: dict[_TypedKey, Any] = {}

    def get(self, key: Hashable, prepare: Callable[[], _Prepared]) -> _Prepared:
        """The value cached for a key; calls `prepare` to make it if there is none.

        Args:
            key: a named tuple of what the value depends on besides the lengths. Keys of different
                classes differ, whatever is in them.
            prepare: makes the value.
        """
        typed = _TypedKey(type(key), key)
        if typed not in self._prepared:
            self._prepared[typed] = prepare()
        return self._prepared[typed]


class _PackedKey(NamedTuple):
    """What `AttentionInputs.packed` depends on besides the lengths."""

    recent_tokens: int
    window: int
    """0 for none."""


class _PackedPart(NamedTuple):
    """For attention to the pages: lengths and window without the last tokens; its own plans."""

    seq_lens: torch.Tensor
    window: int
    plans: AttentionPlans


@dataclass
class _Output:
    """The output tensor of a call, once there is one."""

    tensor: torch.Tensor | None = None


@dataclass(eq=False)
class AttentionInputs:
    """Validated arguments of `paged_attention`, see there for the fields, and the output."""

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
    """The caller's output tensor, or None."""
    lse: torch.Tensor | None
    """float32 `[tokens, heads]`, to be filled, or None."""
    plans: AttentionPlans
    transform: KVTransform | None = None
    recent: RecentInputs | None = None
    part: Part = Part.WHOLE
    """Whether they are a part of another batch."""
    _output: _Output = field(default_factory=_Output, init=False, repr=False)

    @property
    def out(self) -> torch.Tensor:
        """`[tokens, heads, head_size_v]`, to be filled.

        On a GPU it has the query's dtype and contiguous rows aligned to 16 bytes: the caller's
        tensor if that fits, else a new one. On a CPU it is the caller's tensor, if given.
        """
        if self._output.tensor is None:
            self._output.tensor = self._make_out()
        return self._output.tensor

    def _make_out(self) -> torch.Tensor:
        given = self.given_out
        if given is not None and (not given.is_cuda or self._suits_kernels(given)):
            return given
        return self.query.new_empty((*self.query.shape[:2], self.layout.head_size_v))

    def _suits_kernels(self, out: torch.Tensor) -> bool:
        aligned = not any(x % 8 for x in (out.storage_offset(), *out.stride()[:2]))
        return out.dtype == self.query.dtype and out.stride(2) == 1 and aligned

    def set_output(self, result: torch.Tensor) -> None:
        """Set the output to a tensor of `out`'s shape; no copy if the caller gave no `out`."""
        self._output.tensor = result

    def copy_to_out(self) -> torch.Tensor:
        """The output; copied to the caller's `out` if that was given and not written directly."""
        if self.given_out is None or self.given_out is self.out:
            return self.out
        return self.given_out.copy_(self.out)

    @cached_property
    def packed(self) -> "AttentionInputs":
        """The part of the work that reads pages, without recent tokens; has its own output."""
        if self.recent is None:
            return self
        key = _PackedKey(self.recent.tokens, self.sliding_window or 0)
        part = self.plans.get(
            key,
            lambda: _PackedPart(
                *packed_part(key.recent_tokens, self.seq_lens, key.window), AttentionPlans()
            ),
        )
        return replace(
            self,
            seq_lens=part.seq_lens,
            sliding_window=part.window or None,
            given_out=None,
            plans=part.plans,
            recent=None,
        )

    @property
    def num_segments(self) -> int:
        """Means of K for a sequence of the block table's capacity; 0 where K is not centred."""
        if self.transform is None or not self.transform.shared_tokens:
            return 0
        return -(-self.block_tables.shape[1] * self.layout.block_size // self.transform.segment)

    @property
    def _num_pairs(self) -> int:
        if self.transform is None or not self.query.is_cuda:
            return 0
        tables = self.transform.pair_tables
        return 0 if tables is None else tables.cos.shape[1]

    def config(self) -> AttentionConfig:
        """Metadata of the call, by which backends decide whether they support it."""
        return self._config

    @cached_property
    def _config(self) -> AttentionConfig:
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
            # On a GPU most backends merge attention to recent tokens by LSE.
            return_lse=self.lse is not None or (self.recent is not None and self.query.is_cuda),
            aligned_pages=_aligned(self.pages),
            transform=self.transform is not None,
            segment=0 if self.transform is None else self.transform.shared_tokens,
            pairs=self._num_pairs,
            recent=self.recent is not None,
            compute_capability=compute_capability_of(self.query.device),
            split_off=self.part is Part.LEFT_OUT,
        )


def _aligned(pages: torch.Tensor) -> bool:
    stride = page_stride(pages)
    return (pages.data_ptr() | stride) % 16 == 0 and stride < 2**32


@dataclass(frozen=True)
class SubBatch:
    """Sequences of a mixed batch, for another backend than the rest."""

    rows: torch.Tensor | None
    """int64, rows of the query; None if the sequences are the whole batch."""
    sequences: torch.Tensor | None
    """int64, their numbers in the batch; None if they are the whole batch."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    plans: AttentionPlans
    """Plans of these sequences."""
    part: Part = Part.LEFT_OUT
    """`LEFT_OUT` or `MERGED`."""

    def inputs_of(self, batch: AttentionInputs) -> AttentionInputs:
        """The inputs of these sequences; writes to new outputs unless they are the whole batch."""
        recent = batch.recent
        if self.rows is None:
            return replace(batch, plans=self.plans, part=self.part)
        if recent is not None:
            recent = recent._replace(
                entries=recent.entries[self.sequences],
                key=recent.key[self.rows],
                value=recent.value[self.rows],
            )
        return replace(
            batch,
            query=batch.query[self.rows],
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_tables=batch.block_tables[self.sequences],
            given_out=None,
            lse=None if batch.lse is None else batch.lse[self.rows],
            plans=self.plans,
            recent=recent,
            part=self.part,
        )

    def copy_results(self, part: AttentionInputs, batch: AttentionInputs) -> None:
        """Copy the outputs of `inputs_of(batch)` to those of the batch."""
        if self.rows is None:
            batch.set_output(part.out)
            return
        batch.out[self.rows] = part.out
        if batch.lse is not None and part.lse is not None:
            batch.lse[self.rows] = part.lse


class ResultBySequence(NamedTuple):
    """A result where a dense kernel wrote it: of each sequence's last T query tokens, the same T
    for all. Earlier query tokens have no visible keys.

    Args:
        out: `[sequences, tokens, heads, head_size_v]`, the last dimension contiguous.
        lse: float32 `[sequences, heads, tokens]`, natural log, without sinks.
    """

    out: torch.Tensor
    lse: torch.Tensor


class AttentionBackend(ABC):
    """An implementation of attention on packed pages. Stateless; never instantiated."""

    name: ClassVar[str]
    takes_transforms: ClassVar[bool] = False
    """Whether it reads K that went through a `KVTransform`."""
    takes_recent: ClassVar[bool] = False
    """Whether it reads recent tokens from `RecentInputs`, in every batch."""
    takes_every_batch: ClassVar[bool] = False
    """Whether it runs both decode steps and prompts: `auto` requires it for batch invariance."""

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether it runs on a machine; None means this one."""

    @classmethod
    @abstractmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """Whether it can do the work."""

    @classmethod
    def attends_to_recent(cls, inputs: AttentionInputs) -> bool:
        """Whether `forward` reads recent tokens; else the caller merges attention to them."""
        return cls.takes_recent

    @classmethod
    def split_off(cls, inputs: AttentionInputs) -> Sequence[SubBatch]:
        """Sequences that `forward` leaves out, because other backends are faster for them."""
        return ()

    @classmethod
    @abstractmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """Fill `inputs.out`, and `inputs.lse` where it is not None."""

    @classmethod
    def forward_by_sequence(cls, inputs: AttentionInputs) -> ResultBySequence | None:
        """`forward` for a caller that reads the result where a kernel wrote it, which saves copies.

        None if a backend or a batch has no such result; then nothing has been computed.
        """
        return None


class GpuAttention(AttentionBackend):
    """A backend for NVIDIA GPUs from SM80 that needs a Python module."""

    module: ClassVar[str]
    """Name of the required module."""
    module_source: ClassVar[str]
    """How to install it, for messages."""
    purpose: ClassVar[str]

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later, where the module is installed."""
        return runs_on_gpu(
            compute_capability,
            _MIN_CAPABILITY,
            lambda: missing_module(cls.module, cls.module_source),
            cls.purpose,
        )


class OverlapsStore(AttentionBackend):
    """A backend that may start before a step's tokens are stored.

    It also takes recent tokens, and splits nothing off.
    """

    @classmethod
    @abstractmethod
    def store_and_forward(cls, inputs: AttentionInputs, store: Callable[[], None]) -> None:
        """`forward`, with a call of `store`, which puts at least one token into the pages."""
