"""`LLM`: text in, text out, with every K and V in a packed, paged cache."""

import logging
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.attention import check_attention_backend
from halfbyte.engine.core import EngineCore
from halfbyte.engine.detokenizer import Detokenizer
from halfbyte.engine.outputs import RequestOutput, completion_of
from halfbyte.engine.request import FinishReason, Request
from halfbyte.engine.sampling_params import SamplingParams
from halfbyte.kvcache import KVCachePlan, KVRecipe, KVScales, PagedKVPool, plan_kv_cache
from halfbyte.kvcache.recent import RecentTokens
from halfbyte.layouts.arguments import integer
from halfbyte.models import (
    KVQuantization,
    LayerDTypes,
    check_layer_dtypes,
    load_model,
    load_tokenizer,
)
from halfbyte.models.kv_setup import KVSetup
from halfbyte.models.loading import device_or_default

logger = logging.getLogger("halfbyte")

_GPU_MEMORY_SHARE = 0.8
_CPU_POOL_BYTES = 2 * 2**30

_MAX_BATCHED_TOKENS = defaultdict(lambda: 512, {"cuda": 4096})

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class NewToken:
    """One generated token.

    Args:
        index: of the prompt in the call.
        token: its id.
        text: the text that has become certain with it; may be empty.
        completion: which of the prompt's `SamplingParams.n`.
    """

    index: int
    token: int
    text: str
    completion: int = 0


TokenStream = Generator[NewToken, None, list[RequestOutput]]


class LLM:
    """A model ready to generate.

    Args:
        model: folder or hub id of a checkpoint, or a loaded transformers model.
        tokenizer: of transformers, or the folder or hub id of one; by default the checkpoint's.
            Without one, prompts are token ids.
        kv_cache_dtype: format, or formats per layer (see `LayerDTypes`).
        v_cache_dtype: format or formats of V, where they differ from K's.
        dtype: of weights and computation; `auto` for the checkpoint's.
        device: by default a GPU if there is one.
        block_size: tokens per page.
        num_pages: pages of the pool; by default as many as `max_num_seqs` sequences of full length
            need, at most 2 GiB on a CPU and 80 % of the free memory on a GPU; the log says so where
            that is less than one of them needs.
        max_model_len: context in tokens; by default the model's.
        max_batched_tokens: tokens per step; longer prompts are fed in chunks. By default 512 on a
            CPU and 4,096 on a GPU, whose prefill is efficient for long chunks only.
        max_num_seqs: requests that run at once.
        kv_scales: global scales, or a file of them; by default see `find_kv_scales`, else one
            calibration pass.
        kv_recipe: what is done to K and V before they are packed, see `KVRecipe`; by default
            `balanced`, or `plain` where scales or the backend are for K as it is.
        attention_backend: name of an attention backend, or None to choose.
        linear_backend: name of a backend for NVFP4 layers, or None to choose; see `load_model`.
        quantize_activations: of layers that are stored as W4A4; see `load_model`.
        batch_invariant: ask for bitwise equal results whatever else is in the batch.
        cuda_graphs: run decode steps on a GPU as CUDA graphs; models that cannot be captured run
            without, after one warning.

    Raises:
        ModelLoadError, UnsupportedModelError: the model cannot be loaded or is not supported.
        ValueError: an unknown format, or one that cannot store the model's head size.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: Any = None,
        *,
        kv_cache_dtype: LayerDTypes = "nvfp4",
        v_cache_dtype: LayerDTypes | None = None,
        dtype: str | torch.dtype = "auto",
        device: torch.device | str | None = None,
        block_size: int = 16,
        num_pages: int | None = None,
        max_model_len: int | None = None,
        max_batched_tokens: int | None = None,
        max_num_seqs: int = 64,
        kv_scales: KVScales | str | Path | None = None,
        kv_recipe: str | KVRecipe | None = None,
        attention_backend: str | None = None,
        linear_backend: str | None = None,
        quantize_activations: bool | None = None,
        batch_invariant: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        where = device_or_default(device) if isinstance(model, str | Path) else model.device
        # What can be wrong without the weights shows before they are read.
        check_attention_backend(attention_backend, where)
        check_layer_dtypes(kv_cache_dtype)
        if v_cache_dtype is not None:
            check_layer_dtypes(v_cache_dtype)
        if kv_recipe is not None:
            kv_recipe = KVRecipe.parse(kv_recipe)
        for name, number in (
            ("block_size", block_size),
            ("num_pages", num_pages),
            ("max_model_len", max_model_len),
            ("max_batched_tokens", max_batched_tokens),
            ("max_num_seqs", max_num_seqs),
        ):
            if number is not None and integer(name, number) < 1:
                raise ValueError(f"{name}: expected at least 1, got {number}")
        if kv_scales is not None and not isinstance(kv_scales, KVScales | str | Path):
            found = type(kv_scales).__name__
            raise ValueError(f"kv_scales: expected KVScales or a file, got {found}")
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer)
        if isinstance(model, str | Path):
            tokenizer = tokenizer or load_tokenizer(model)
            model = load_model(
                model,
                dtype=dtype,
                device=device,
                linear_backend=linear_backend,
                quantize_activations=quantize_activations,
                batch_invariant=batch_invariant,
            )
        elif linear_backend is not None or quantize_activations is not None:
            raise ValueError(
                "linear_backend, quantize_activations: are for models that are loaded here; "
                "give them to load_model"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        context = getattr(model.config, "max_position_embeddings", 2**31)
        if max_model_len is not None and max_model_len > context:
            raise ValueError(f"max_model_len: expected 1 .. {context}, got {max_model_len}")
        max_model_len = max_model_len or context
        specs, self.kv_scales, self.recipe = KVSetup.of(
            model,
            kv_cache_dtype,
            block_size,
            v_cache_dtype=v_cache_dtype,
            kv_scales=kv_scales,
            kv_recipe=kv_recipe,
            attention_backend=attention_backend,
            tokenizer=tokenizer,
        )
        recipe = self.recipe
        plan = plan_kv_cache(specs)
        # First, because the pool takes most of what is left.
        recent = RecentTokens.of(plan, recipe, model.dtype, model.device, 1 + max_num_seqs)
        if num_pages is None:
            num_pages = _default_num_pages(plan, max_model_len, max_num_seqs, model.device)
        self.pool = PagedKVPool(plan, num_pages, model.device)
        self.core = EngineCore(
            model,
            self.pool,
            KVQuantization.of(self.pool, self.kv_scales, recipe),
            max_model_len=max_model_len,
            max_batched_tokens=_MAX_BATCHED_TOKENS[self.model.device.type]
            if max_batched_tokens is None
            else max_batched_tokens,
            max_num_seqs=max_num_seqs,
            attention_backend=attention_backend,
            batch_invariant=batch_invariant,
            cuda_graphs=cuda_graphs,
            recent=recent,
            eos_ids=()
            if getattr(tokenizer, "eos_token_id", None) is None
            else (tokenizer.eos_token_id,),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for a batch of prompts.

        Args:
            prompts: texts or lists of token ids, or one of either.
            sampling_params: for all, or one for each; by default `SamplingParams()`.

        Returns:
            Outputs in the order of the prompts. A request that ran out of pages has the finish
            reason `error`; the others are not affected.

        Raises:
            ValueError: an empty prompt, one that leaves no room in the context, or token ids that
                the model does not have.
        """
        stream = self.stream(prompts, sampling_params)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                outputs: list[RequestOutput] = end.value
                return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> TokenStream:
        """As `generate`, yielding every token as it comes; the outputs are the generator's value.

        Prompts are checked at once and queued when the iteration begins; closing the generator ends
        their requests.

        Raises:
            ValueError: as `generate`.
            RuntimeError: at the first token, if another generation of this object is unfinished.
        """
        batch = _as_batch(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(batch)
        if not isinstance(sampling_params, Iterable):
            raise ValueError(f"sampling_params: expected SamplingParams, got {sampling_params!r}")
        sampling_params = list(sampling_params)
        for params in sampling_params:
            if not isinstance(params, SamplingParams):
                raise ValueError(f"sampling_params: expected SamplingParams, got {params!r}")
            if params.stop and self.tokenizer is None:
                raise ValueError("stop: this model has no tokenizer; use stop_token_ids")
        if len(sampling_params) != len(batch):
            raise ValueError(f"sampling_params: {len(sampling_params)} for {len(batch)} prompts")
        requests = [
            [self.core.request(ids, params, completion) for completion in range(params.n)]
            for ids, params in zip(map(self._encode, batch), sampling_params, strict=True)
        ]
        return self._run(batch, requests)

    def _run(self, prompts: Sequence[Prompt], requests: Sequence[Sequence[Request]]) -> TokenStream:
        places = {
            request.id: (index, completion)
            for index, of_prompt in enumerate(requests)
            for completion, request in enumerate(of_prompt)
        }
        texts = [[self._detokenizer(request) for request in one] for one in requests]
        if self.core.scheduler.has_work:
            raise RuntimeError(
                "an LLM generates one batch at a time, and another is unfinished: wait for it, or "
                "close its stream"
            )
        try:
            for request in chain.from_iterable(requests):
                self.core.add(request)
            with self.core.runner.attached():
                yield from self._tokens(places, texts)
            for text in chain.from_iterable(texts):
                if text:  # of one that ended with an error
                    text.finish()
        finally:
            # Also when the caller stops listening or a step fails: the pool stays whole.
            for request in chain.from_iterable(requests):
                self.core.abort(request, FinishReason.ERROR)
        return [
            RequestOutput(
                prompt if isinstance(prompt, str) else None,
                of_prompt[0].prompt,
                [
                    completion_of(*x)
                    for x in zip(of_prompt, range(len(of_prompt)), text, strict=True)
                ],
            )
            for prompt, of_prompt, text in zip(prompts, requests, texts, strict=True)
        ]

    def _tokens(
        self, places: dict[int, tuple[int, int]], texts: Sequence[Sequence[Detokenizer | None]]
    ) -> Iterator[NewToken]:
        while self.core.scheduler.has_work:
            for request, token in self.core.step():
                index, completion = places[request.id]
                text = texts[index][completion]
                piece = text.push(token) if text else ""
                if text and text.stopped:
                    request.finish(FinishReason.STOP)
                    self.core.abort(request, FinishReason.STOP)
                elif text and request.is_finished:
                    piece += text.finish()
                yield NewToken(index, token, piece, completion)

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        params = request.params
        return Detokenizer(self.tokenizer, params.stop, request.prompt, params.min_tokens)

    def _encode(self, prompt: Prompt) -> list[int]:
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise ValueError(
                f"prompt: expected a text or a list of token ids, got {type(prompt).__name__}"
            )
        if not isinstance(prompt, str):
            return [integer("prompt", token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("prompt: this model has no tokenizer; give token ids")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ValueError("prompt: is not valid text") from None
        ids: list[int] = self.tokenizer(prompt).input_ids
        return ids if prompt else []


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if hasattr(prompts, "tolist"):  # a tensor or an array of token ids
        prompts = prompts.tolist()
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(
            "prompts: expected texts or lists of token ids, got "
            f"{type(prompts).__name__} (of a tokenizer's result its input_ids)"
        )
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if batch and isinstance(batch[0], Integral) else batch


def _default_num_pages(
    plan: KVCachePlan, max_model_len: int, max_num_seqs: int, device: torch.device
) -> int:
    """Enough for `max_num_seqs` full sequences, within the memory at hand."""
    per_sequence = sum(
        max(spec.max_live_pages(max_model_len, max_chunk=max_model_len) for spec in group.specs)
        for group in plan.groups
    )
    budget = _CPU_POOL_BYTES
    if device.type == "cuda":
        budget = int(_GPU_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
    affordable = max(1, budget // plan.page_bytes)
    if affordable < per_sequence:
        logger.warning(
            "the KV cache has room for %.0f %% of a sequence of max_model_len %d; longer ones will "
            "end with an error: give a smaller max_model_len, or num_pages (%d for one sequence)",
            *(100 * affordable / per_sequence, max_model_len, 1 + per_sequence),
        )
    return 1 + min(max_num_seqs * per_sequence, affordable)
