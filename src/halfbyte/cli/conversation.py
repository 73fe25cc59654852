"""The conversation so far, and requests for the next answer.

A turn is a prompt and its answer. An answer that the user stopped is kept, because the next
question may be about it; a turn without text is dropped, because many chat templates reject two
consecutive messages of one role.

A model without a chat template gets the conversation as one text to continue.
"""

from collections.abc import Callable, Generator
from contextlib import closing

from halfbyte.cli.openai_client import Client
from halfbyte.cli.openai_protocol import Chunk, NoChatTemplateError

# Base models rarely stop by themselves, and servers' default is 16 tokens.
MAX_CONTINUATION_TOKENS = 256


class Conversation:
    """Turns with one model.

    Args:
        client: of the server.
        model: its name there.
        system: system message, or the beginning of the text to continue.
        temperature: None leaves it to the server.
        max_tokens: per answer; None leaves it to the server.
        on_no_template: called once, if the model has no chat template.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        on_no_template: Callable[[], None] = lambda: None,
    ) -> None:
        self.turns: list[tuple[str, str]] = []
        self._client = client
        self._model = model
        self._system = system
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._on_no_template = on_no_template
        self._has_template = True

    def ask(self, prompt: str) -> Generator[Chunk]:
        """Stream the answer; closing the iterator stops it and keeps the text so far.

        Raises:
            EndpointError: the server or the network failed.
        """
        answer = ""
        try:
            with closing(self._stream(prompt)) as chunks:
                for chunk in chunks:
                    answer += chunk.text
                    yield chunk
        finally:
            if answer:
                self.turns.append((prompt, answer))

    def _stream(self, prompt: str) -> Generator[Chunk]:
        sampling = {"temperature": self._temperature, "max_tokens": self._max_tokens}
        if self._has_template:
            try:
                yield from self._client.chat(self._model, self._messages(prompt), **sampling)
                return
            except NoChatTemplateError:
                self._has_template = False
                self._on_no_template()
        sampling["max_tokens"] = self._max_tokens or MAX_CONTINUATION_TOKENS
        yield from self._client.complete(self._model, self._text(prompt), **sampling)

    def _messages(self, prompt: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for question, answer in self.turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return [*messages, {"role": "user", "content": prompt}]

    def _text(self, prompt: str) -> str:
        parts = [self._system] if self._system else []
        parts += [question + answer for question, answer in self.turns]
        return "\n".join([*parts, prompt])
