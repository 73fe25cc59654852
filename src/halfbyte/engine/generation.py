"""Runs requests until they finish, and turns their tokens into text."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from halfbyte.engine.core import EngineCore
from halfbyte.engine.detokenizer import Detokenizer
from halfbyte.engine.interrupts import interrupts_deferred
from halfbyte.engine.memory import name_memory_options
from halfbyte.engine.outputs import RequestOutput, completion_of
from halfbyte.engine.prompts import Prompt
from halfbyte.engine.request import FinishReason, Request


@dataclass(frozen=True)
class NewToken:
    """One generated token.

    Args:
        index: of the prompt in the call.
        token: its id.
        text: the new text, see `Detokenizer.push`; may be empty.
        completion: which of the prompt's `SamplingParams.n`.
    """

    index: int
    token: int
    text: str
    completion: int = 0


TokenStream = Generator[NewToken, None, list[RequestOutput]]


def run(
    core: EngineCore,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    requests: Sequence[Sequence[Request]],
) -> TokenStream:
    """Yield every token as it is generated; the generator's return value is the outputs.

    Args:
        core: idle; it is idle again afterwards, also after an error.
        tokenizer: None for no text.
        prompts: as the user gave them.
        requests: of each prompt, not yet queued.

    Raises:
        RuntimeError: at the first token, if the engine is busy.
    """
    places = {
        request.id: (index, completion)
        for index, of_prompt in enumerate(requests)
        for completion, request in enumerate(of_prompt)
    }
    texts = [[_detokenizer(tokenizer, request) for request in one] for one in requests]
    if core.scheduler.has_work:
        raise RuntimeError(
            "an LLM generates one batch at a time, and another is unfinished: wait for it, or "
            "close its stream"
        )
    try:
        for request in chain.from_iterable(requests):
            core.add(request)
        with core.runner.attached():
            yield from _tokens(core, places, texts)
        for text in chain.from_iterable(texts):
            if text:  # of a request that ended with an error
                text.finish()
    finally:
        # Also when the caller closes the generator or a step fails, so that all pages are freed.
        with interrupts_deferred():
            for request in chain.from_iterable(requests):
                core.abort(request, FinishReason.ERROR)
    return [
        RequestOutput(
            prompt if isinstance(prompt, str) else None,
            of_prompt[0].prompt,
            [
                completion_of(request, i, text)
                for i, (request, text) in enumerate(zip(of_prompt, of_text, strict=True))
            ],
        )
        for prompt, of_prompt, of_text in zip(prompts, requests, texts, strict=True)
    ]


def _tokens(
    core: EngineCore,
    places: dict[int, tuple[int, int]],
    texts: Sequence[Sequence[Detokenizer | None]],
) -> Iterator[NewToken]:
    advice = (
        f"a step of up to max_batched_tokens {core.scheduler.max_batched_tokens} and max_num_seqs "
        f"{core.scheduler.max_num_seqs}; give fewer, or a smaller num_pages or "
        "gpu_memory_utilization, which leaves more"
    )
    while core.scheduler.has_work:
        with name_memory_options(advice):
            produced = core.step()
        for request, token in produced:
            index, completion = places[request.id]
            text = texts[index][completion]
            chunk = text.push(token) if text else ""
            if text and text.stopped:
                request.finish(FinishReason.STOP)
                core.abort(request, FinishReason.STOP)
            elif text and request.is_finished:
                chunk += text.finish()
            yield NewToken(index, token, chunk, completion)


def _detokenizer(tokenizer: Any, request: Request) -> Detokenizer | None:
    if tokenizer is None:
        return None
    params = request.params
    return Detokenizer(tokenizer, params.stop, request.prompt, params.min_tokens)
