"""`LLM`: text in, text out, with every K and V in a packed, paged cache."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.engine.core import EngineCore
from halfbyte.engine.generation import NewToken, TokenStream, run
from halfbyte.engine.memory import default_num_pages, make_pool, name_memory_options
from halfbyte.engine.model import context_length, eos_ids, model_and_tokenizer
from halfbyte.engine.options import (
    check_cache_options,
    check_memory_share,
    check_sizes,
    one_of,
)
from halfbyte.engine.outputs import RequestOutput
from halfbyte.engine.progress import capture_bar, progress_bar
from halfbyte.engine.prompts import (
    Message,
    Prompt,
    apply_chat_template,
    as_batch,
    as_conversations,
    encode,
)
from halfbyte.engine.request import Request
from halfbyte.engine.sampling_params import SamplingParams
from halfbyte.kvcache import KVRecipe, KVScales, plan_kv_cache
from halfbyte.kvcache.recent import RecentTokens
from halfbyte.models import KVQuantization, LayerDTypes
from halfbyte.models.kv_setup import KVSetup
from halfbyte.models.loader import device_or_default

_MAX_BATCHED_TOKENS = defaultdict(lambda: 512, {"cuda": 4096})

SamplingParamsOfAll = SamplingParams | Sequence[SamplingParams] | None


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
            need, at most 2 GiB on a CPU and 80 % of the free memory on a GPU (or see
            `gpu_memory_utilization`); logs a warning if one sequence of full length does not fit.
        max_model_len: context in tokens; by default the model's.
        max_batched_tokens: tokens per step; longer prompts run in chunks. By default 512 on a
            CPU and 4,096 on a GPU, whose prefill is efficient for long chunks only.
        max_num_seqs: requests that run at once.
        kv_scales: global scales, or a file of them; by default see `find_kv_scales`, else one
            calibration pass.
        kv_recipe: transforms of K and V before quantization, see `KVRecipe`; by default `balanced`,
            or `plain` where the scales or the backend support only untransformed K.
        attention_backend: name of an attention backend, or None to choose.
        linear_backend: name of a backend for NVFP4 layers, or None to choose; see `load_model`.
        moe_backend: name of a backend for 4-bit experts, or None to choose; see `load_model`.
        quantize_activations: for layers stored as W4A4; see `load_model`.
        batch_invariant: bitwise equal results for any batch and any split of prompts into chunks:
            every matrix product of the model has a fixed order of summation.
        cuda_graphs: run decode steps on a GPU as CUDA graphs, captured at start-up; models that
            cannot be captured run without them, after one warning.
        torch_compile: compile the layers of these graphs with `torch.compile` at start-up (some 10
            seconds, less the second time), unless `batch_invariant`: several times fewer kernels,
            rounded slightly differently; models that cannot be compiled run without, after one
            warning.
        gpu_memory_utilization: max share of the GPU's memory in use, including weights and other
            programs, as in vLLM; instead of `num_pages`.
        max_num_batched_tokens: vLLM's name for `max_batched_tokens`.
        enforce_eager: vLLM's name for neither CUDA graphs nor `torch.compile`.

    Raises:
        ModelLoadError, UnsupportedModelError: the model cannot be loaded or is not supported.
        ValueError: an unknown format, or one that cannot store the model's head size.
        torch.OutOfMemoryError: no memory for the cache; names the options to reduce.
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
        moe_backend: str | None = None,
        quantize_activations: bool | None = None,
        batch_invariant: bool = False,
        cuda_graphs: bool = True,
        torch_compile: bool = True,
        gpu_memory_utilization: float | None = None,
        max_num_batched_tokens: int | None = None,
        enforce_eager: bool = False,
    ) -> None:
        # Check options before reading the weights.
        where = device_or_default(device) if isinstance(model, str | Path) else model.device
        check_cache_options(kv_cache_dtype, v_cache_dtype, kv_scales, attention_backend, where)
        kv_recipe = None if kv_recipe is None else KVRecipe.parse(kv_recipe)
        check_sizes(
            block_size=block_size,
            num_pages=num_pages,
            max_model_len=max_model_len,
            max_batched_tokens=max_batched_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        max_batched_tokens = one_of(
            max_batched_tokens=max_batched_tokens, max_num_batched_tokens=max_num_batched_tokens
        )
        check_memory_share(gpu_memory_utilization, num_pages, where)
        model, self.tokenizer = model_and_tokenizer(
            model,
            tokenizer,
            dtype=dtype,
            device=device,
            linear_backend=linear_backend,
            moe_backend=moe_backend,
            quantize_activations=quantize_activations,
            batch_invariant=batch_invariant,
        )
        self.model = model
        max_model_len = context_length(model, max_model_len)
        specs, self.kv_scales, self.recipe = KVSetup.of(
            model,
            kv_cache_dtype,
            block_size,
            v_cache_dtype=v_cache_dtype,
            kv_scales=kv_scales,
            kv_recipe=kv_recipe,
            attention_backend=attention_backend,
            tokenizer=self.tokenizer,
        )
        plan = plan_kv_cache(specs)
        # Before the pool, which takes most of the remaining memory.
        with name_memory_options(f"the last tokens of max_num_seqs {max_num_seqs}; give fewer"):
            recent = RecentTokens.of(plan, self.recipe, model.dtype, model.device, 1 + max_num_seqs)
        num_pages = num_pages or default_num_pages(
            plan, max_model_len, max_num_seqs, model.device, gpu_memory_utilization
        )
        self.pool = make_pool(plan, num_pages, model.device)
        self.core = EngineCore(
            model,
            self.pool,
            KVQuantization.of(self.pool, self.kv_scales, self.recipe),
            max_model_len=max_model_len,
            max_batched_tokens=max_batched_tokens or _MAX_BATCHED_TOKENS[model.device.type],
            max_num_seqs=max_num_seqs,
            attention_backend=attention_backend,
            batch_invariant=batch_invariant,
            cuda_graphs=cuda_graphs and not enforce_eager,
            torch_compile=torch_compile,
            recent=recent,
            eos_ids=eos_ids(self.tokenizer),
        )
        self._capture_graphs()

    def _capture_graphs(self) -> None:
        graphs = self.core.runner.graphs
        with capture_bar(graphs.num_captures if graphs else 0) as progress:
            self.core.runner.capture_graphs(progress)

    def __repr__(self) -> str:
        formats = dict.fromkeys(
            dtype.value
            for layer in range(self.pool.plan.num_layers)
            for dtype in (self.pool.layout(layer).k_dtype, self.pool.layout(layer).v_dtype)
        )
        return (
            f"LLM({type(self.model).__name__}, kv_cache_dtype={'+'.join(formats)}, "
            f"kv_recipe={self.recipe.name}, device={self.pool.device}, "
            f"num_pages={self.pool.num_pages}, max_model_len={self.core.max_model_len}, "
            f"max_num_seqs={self.core.scheduler.max_num_seqs})"
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParamsOfAll = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for a batch of prompts.

        Args:
            prompts: texts or lists of token ids, or a single one.
            sampling_params: for all, or one for each; by default `SamplingParams()`.
            use_tqdm: whether to show a progress bar; by default for more than one prompt where
                standard error is a terminal.

        Returns:
            Outputs in the order of the prompts. A request that ran out of pages, or whose logits
            give no token, has the finish reason `error`; other requests are not affected.

        Raises:
            ValueError: an empty prompt, one that fills the context, or token ids outside the
                vocabulary.
            torch.OutOfMemoryError: a step needs more memory than there is.
        """
        batch = as_batch(prompts)
        requests = self._requests(
            [encode(self.tokenizer, prompt) for prompt in batch], sampling_params
        )
        return self._finish(batch, requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParamsOfAll = None,
        *,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to conversations, formatted by the tokenizer's chat template.

        Args:
            messages: a conversation, `[{"role": "user", "content": "…"}, …]`, or a list of them.
            sampling_params, use_tqdm: as of `generate`.
            chat_template: Jinja text; by default the tokenizer's own.
            add_generation_prompt: begin the answer's message.
            continue_final_message: continue the last message instead; needs
                `add_generation_prompt=False`.
            tools: tools the model may call, as for transformers' `apply_chat_template`.
            chat_template_kwargs: further variables of the template, such as `enable_thinking`.

        Returns:
            As `generate`; `prompt` is the conversation's text.

        Raises:
            ValueError: no chat template, or malformed messages; and as `generate`.
        """
        prompts = [
            apply_chat_template(
                self.tokenizer,
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                options=chat_template_kwargs or {},
            )
            for conversation in as_conversations(messages)
        ]
        # The template has added the special tokens already.
        ids = [encode(self.tokenizer, text, add_special_tokens=False) for text in prompts]
        return self._finish(prompts, self._requests(ids, sampling_params), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParamsOfAll = None,
    ) -> TokenStream:
        """As `generate`, but yields every token as it is generated.

        Prompts are checked immediately and queued when the iteration begins. Closing the generator
        aborts their requests. The outputs are the generator's return value.

        Raises:
            ValueError: as `generate`.
            RuntimeError: at the first token, if another generation of this object is unfinished.
        """
        batch = as_batch(prompts)
        ids = [encode(self.tokenizer, prompt) for prompt in batch]
        requests = self._requests(ids, sampling_params)
        return run(self.core, self.tokenizer, batch, requests)

    def _requests(
        self, prompts: Sequence[list[int]], sampling_params: SamplingParamsOfAll
    ) -> list[list[Request]]:
        """Requests per prompt, `SamplingParams.n` of them."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if not isinstance(sampling_params, Iterable):
            raise ValueError(f"sampling_params: expected SamplingParams, got {sampling_params!r}")
        sampling_params = list(sampling_params)
        for params in sampling_params:
            if not isinstance(params, SamplingParams):
                raise ValueError(f"sampling_params: expected SamplingParams, got {params!r}")
            if params.stop and self.tokenizer is None:
                raise ValueError("stop: this model has no tokenizer; use stop_token_ids")
        if len(sampling_params) != len(prompts):
            raise ValueError(f"sampling_params: {len(sampling_params)} for {len(prompts)} prompts")
        return [
            [self.core.request(ids, params, completion) for completion in range(params.n)]
            for ids, params in zip(prompts, sampling_params, strict=True)
        ]

    def _finish(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Sequence[Request]],
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        """Run requests until they finish."""
        with progress_bar(sum(map(len, requests)), use_tqdm) as update:
            stream = run(self.core, self.tokenizer, prompts, requests)
            while True:
                try:
                    next(stream)
                except StopIteration as end:
                    outputs: list[RequestOutput] = end.value
                    return outputs
                update(self.core.scheduler.num_unfinished)


__all__ = ["LLM", "NewToken", "SamplingParamsOfAll", "TokenStream"]
