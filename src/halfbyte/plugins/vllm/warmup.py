"""Compiles the attention kernels of a model when its worker starts, not in the first requests.

vLLM's own warm-up runs attention in captured decode steps only (model runner V1), or on prompts of
two tokens (V2).
"""

from collections.abc import Iterator, Sequence
from functools import wraps
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from halfbyte.after_import import after_import
from halfbyte.attention.prefill.plan import MAX_DECODE_QUERIES, MAX_KEYS_PER_QUERY
from halfbyte.kvcache.recent import missing_positions
from halfbyte.kvcache.recent_step import MissingTokens
from halfbyte.plugins.vllm.formats import block_size_of
from halfbyte.plugins.vllm.registry import uses_halfbyte
from halfbyte.plugins.vllm.ring_entries import ScheduledRings
from halfbyte.plugins.vllm.ring_step import RingBuffers

_WORKER = "vllm.v1.worker.gpu_worker"
_IS_WRAPPED = "halfbyte_warms_up"
"""Attribute of the worker's class, once it is wrapped."""


class Tokens(NamedTuple):
    """A sequence of a batch: its new tokens, and the tokens before them."""

    new: int
    cached: int

    @property
    def length(self) -> int:
        """New and earlier tokens."""
        return self.new + self.cached

    def pages(self, block_size: int) -> int:
        """Pages for all tokens."""
        return -(-self.length // block_size)


_BEYOND = 400
"""Cached tokens beyond a bound: the last ones may be read from rings instead of pages."""
_BATCHES = (
    (Tokens(1, 40),),
    (Tokens(1, 40), Tokens(1, 700), Tokens(1, 16)),
    *((Tokens(new, 60), Tokens(new, 300)) for new in range(2, 9)),
    (Tokens(17, 0),),
    (Tokens(17, 300),),
    (Tokens(40, 2000), Tokens(1, 300)),
    (Tokens(160, 0), Tokens(160, 600)),
    (Tokens(600, 0), Tokens(300, 900), Tokens(1, 33)),
    # In a batch with prompts, `attention.recent` reads the last tokens of decode steps, too, where
    # the prompts' kernel does not read last tokens itself.
    *((Tokens(160, 0), Tokens(new, 300)) for new in range(1, 9)),
    # Few cached tokens, but enough sequences to fill the GPU without unpacking.
    (Tokens(16, 400),) * 512,
    # The most tiles that a step can have, which decides between two kernels for prompts.
    (Tokens(MAX_DECODE_QUERIES + 1, 0),) * 512,
    (Tokens(2048, 0),),
    (Tokens(2048, 0), Tokens(2048, 0)),
    (Tokens(2300, 0),),  # padded for cuDNN, so that one result is copied
    (Tokens(1280, 0), Tokens(9, 0)),  # one result is copied to its rows of the batch
    # Prefixes of one to eight blocks of `attention.prefill`, whose results are merged. The shortest
    # for each number, and longer ones: small chunks of short prompts are not for dense kernels. On
    # SM90 only keys beyond the workspace are in blocks, of which two (64) are the fewest.
    *(
        (Tokens(new, 1024 * cached + _BEYOND),)
        for cached in (1, 3, 7, 15, 31, 63, 2, 6, 14, 30, 4, 64, 96, 63 + 32, 63 + 64)
        for new in (512, 1024)
    ),
)
"""One batch for each kernel of `halfbyte.attention`: decoding, drafts, short and long prompts, with
and without cached tokens, and mixed batches."""
_MIN_STORED = 160
"""Min tokens of a step of `_stored`; `_BATCHES` have smaller ones."""
_QUERY_TILES = (16, 32, 64, 128)
"""Rows (query tokens times query heads per KV head) of tiles of the `triton` backend."""


def install() -> None:
    """Wrap vLLM's worker for GPUs when it is imported."""
    after_import(_WORKER, _wrap)


def _wrap(module: ModuleType) -> None:
    worker: Any = vars(module)["Worker"]
    if hasattr(worker, _IS_WRAPPED):
        return
    warm_up = worker.compile_or_warm_up_model

    @wraps(warm_up)
    def compile_or_warm_up_model(self: Any, *arguments: Any, **options: Any) -> Any:
        if uses_halfbyte(self.vllm_config) and self.device.type == "cuda":
            warm_up_attention(self.vllm_config, self.device)
        return warm_up(self, *arguments, **options)

    worker.compile_or_warm_up_model = compile_or_warm_up_model
    setattr(worker, _IS_WRAPPED, True)


def warm_up_attention(vllm_config: Any, device: torch.device) -> int:
    """Store K and V of zero and attend to them, in one layer of each kind and batches of all kinds.

    Overwrites pages and rings, so it must run before the first request.

    Args:
        vllm_config: vLLM's, of a loaded model with an allocated cache.
        device: of the model.

    Returns:
        The number of layers that ran.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    from halfbyte.plugins.vllm.attention import HalfbyteAttentionImpl, LayerKind

    layers: dict[LayerKind, Any] = {}
    for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
        if isinstance(layer.impl, HalfbyteAttentionImpl) and layer.kv_cache.numel():
            layers.setdefault(layer.impl.kind(layer.head_size_v), layer)
    for layer in layers.values():
        block_size = block_size_of(layer.kv_cache)
        group = layer.impl.num_heads // layer.impl.num_kv_heads
        for batch in batches(vllm_config, block_size, len(layer.kv_cache), group):
            _run(layer, batch, block_size, vllm_config, device)
    return len(layers)


def batches(
    vllm_config: Any, block_size: int, num_pages: int, group: int
) -> Iterator[list[Tokens]]:
    """Batches that need all kernels of a layer, shortened where they exceed the engine's limits.

    Args:
        block_size: tokens of a page.
        num_pages: of the cache. Sequences may have pages in common.
        group: query heads per KV head.
    """
    scheduler = vllm_config.scheduler_config
    longest = min(vllm_config.model_config.max_model_len, num_pages * block_size)
    most = scheduler.max_num_batched_tokens
    stored = _stored(most, longest, block_size)
    seen = []
    for whole in (*_BATCHES, *_few_new_tokens(group), *stored):
        batch: list[Tokens] = []
        for x in whole[: scheduler.max_num_seqs]:
            new = min(x.new, longest) if batch else min(x.new, longest, most)
            if new + sum(y.new for y in batch) > most:
                break
            batch.append(Tokens(new, min(x.cached, longest - new)))
        if batch and batch not in seen:
            seen.append(batch)
            yield batch


def _stored(max_tokens: int, max_len: int, cached: int) -> Iterator[tuple[Tokens, ...]]:
    """Steps that need all kernels that store. The number of tokens selects one, and each has a
    variant that writes the rings, for prompts without earlier tokens. Sizes double, because each
    kernel's range of tokens spans at least a factor of two or ends at `max_tokens`.

    Args:
        max_tokens: of a step.
        max_len: of a sequence.
        cached: tokens of a sequence that has earlier ones.
    """
    sizes = [_MIN_STORED << i for i in range(max_tokens.bit_length())]
    for size in (*(size for size in sizes if size < max_tokens), max_tokens):
        for start in (0, cached):
            if new := max(0, max_len - start):
                whole, rest = divmod(size, new)
                yield (Tokens(new, start),) * whole + (Tokens(rest, start),) * (rest > 0)


def _few_new_tokens(group: int) -> Iterator[tuple[Tokens, ...]]:
    """Prompts of which all but a few tokens are in the prefix cache. For each tile of queries a
    batch of one prompt, whose keys are split, and one of so many that no split is needed."""
    for rows in _QUERY_TILES:
        new = max(MAX_DECODE_QUERIES + 1, rows // 2 // group + 1)  # the smallest with this tile
        # So many cached tokens that `attention.prefill` does not unpack them.
        prompt = Tokens(new, new * MAX_KEYS_PER_QUERY + _BEYOND)
        yield (prompt,)
        yield (prompt,) * 512


def _run(
    layer: Any,
    batch: Sequence[Tokens],
    block_size: int,
    vllm_config: Any,
    device: torch.device,
) -> None:
    """Store and attend in a layer.

    Q, K and V are as vLLM's models pass them: V is a part of the product of the fused projection.
    """
    from halfbyte.plugins.vllm.metadata import HalfbyteMetadata

    impl = layer.impl
    max_pages = Tokens(vllm_config.model_config.max_model_len, 0).pages(block_size)
    tables = np.zeros((len(batch), max_pages), np.int32)
    slots, first_page = [], 0
    for row, sequence in enumerate(batch):
        pages = sequence.pages(block_size)
        tables[row, :pages] = np.arange(first_page, first_page + pages) % len(layer.kv_cache)
        positions = np.arange(sequence.cached, sequence.length)
        slots.append(tables[row, positions // block_size] * block_size + positions % block_size)
        first_page += pages
    counts = [x.new for x in batch]
    tokens, heads, kv_heads = sum(counts), impl.num_heads, impl.num_kv_heads
    rings = None
    if impl.rings is not None:
        ring = impl.rings[0].shape[2]
        buffers = RingBuffers(len(batch), impl.recent_tokens, ring, device)
        rings = buffers.step(_rings(batch, impl.recent_tokens), len(batch), tokens)
    metadata = HalfbyteMetadata(
        tokens,
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
        torch.tensor([x.length for x in batch], dtype=torch.int32, device=device),
        torch.from_numpy(tables).to(device),
        torch.from_numpy(np.concatenate(slots)).to(device),
        rings=rings,
    )
    head_size, head_size_v = layer.head_size, layer.head_size_v
    zeros: dict[str, Any] = {"dtype": impl.dtype, "device": device}
    sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size_v]
    fused = torch.zeros((tokens, sum(sizes)), **zeros)
    query, key, value = (
        part.view(tokens, -1, size)
        for part, size in zip(
            fused.split(sizes, dim=1), (head_size, head_size, head_size_v), strict=True
        )
    )
    query, key = query.contiguous(), key.contiguous()  # as after rotary embedding
    output = torch.zeros((tokens, heads, head_size_v), **zeros)
    impl.forward(layer, query, key, value, layer.kv_cache, metadata, output)


def _rings(batch: Sequence[Tokens], recent_tokens: int) -> ScheduledRings:
    """Rings as for requests that have just hit the prefix cache."""
    lacking = [
        MissingTokens(row, row + 1, missing_positions(x.cached, x.cached, recent_tokens), x.cached)
        for row, x in enumerate(batch)
        if x.cached
    ]
    entries = np.arange(1, len(batch) + 1, dtype=np.int32)
    starts, counts = np.array([(x.cached, x.new) for x in batch], np.int64).T
    return ScheduledRings(entries, starts, counts, lacking)
