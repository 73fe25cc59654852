"""Parses responses of OpenAI-compatible servers: server-sent events, chunks, errors.

`data:` lines of the events carry JSON; the last one is `[DONE]`. A server may also report an error
within a stream, or answer with one JSON object instead of a stream.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MAX_ERROR_CHARACTERS = 500
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# A trailing CR may be the first half of a CRLF.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class EndpointError(RuntimeError):
    """URL, problem and advice, in one line without control characters."""

    def __init__(self, url: str, problem: str, advice: str) -> None:
        line = f"{url}: {problem.rstrip().removesuffix('.')}; {advice}"
        super().__init__(" ".join(strip_control(line).split()))


class NoChatTemplateError(EndpointError):
    """The model has no chat template, so chat completions are not available."""


@dataclass(frozen=True)
class Chunk:
    """Content of one event of a stream; all fields are optional.

    Args:
        text: of the answer.
        reasoning: the model's reasoning before the answer.
        completion_tokens: tokens of the whole answer, reasoning included.
        finish_reason: why the answer ends here: "stop", "length", …
    """

    text: str = ""
    reasoning: str = ""
    completion_tokens: int | None = None
    finish_reason: str | None = None


def strip_control(text: str) -> str:
    """The text without control characters, other than line feed and tab."""
    return _CONTROL.sub("", text)


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for surrogates, which cannot be encoded."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def event_data(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Data of server-sent events, from arbitrarily split bytes; an incomplete event is dropped.

    See https://html.spec.whatwg.org/multipage/server-sent-events.html.
    """
    rest = b""
    data: list[bytes] = []
    for chunk in chunks:
        *lines, rest = _LINE_END.split(rest + chunk)
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data.clear()


def parse_json(url: str, content: bytes) -> object:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        start = content[:40].decode(errors="replace")
        problem = f"expected JSON, got {start!r}"
        raise EndpointError(
            url, problem, "check that an OpenAI-compatible server is there"
        ) from None
    message = error_message(value)
    if message:
        raise EndpointError(url, f"the server reports: {message}", "look at its log")
    return value


def error_message(value: object) -> str:
    """The message of an error in the format of vLLM, FastAPI or OpenAI; else empty."""
    error = at(value, "error")
    if error is None and at(value, "object") == "error":
        error = value
    if error is None:
        error = at(value, "detail")
    if error is None:
        return ""
    message = at(error, "message") or error
    text = message if isinstance(message, str) else json.dumps(message)
    return replace_surrogates(text)[:_MAX_ERROR_CHARACTERS]


def parse_chunk(url: str, content: bytes) -> Chunk:
    value = parse_json(url, content)
    choice = at(value, "choices", 0)
    # Streams have a delta, single JSON answers a message, completions neither.
    message = at(choice, "delta") or at(choice, "message")
    tokens = at(value, "usage", "completion_tokens")
    finish_reason = _text(at(choice, "finish_reason"))
    return Chunk(
        text=_text(at(message, "content")) or _text(at(choice, "text")),
        reasoning=_text(at(message, "reasoning")) or _text(at(message, "reasoning_content")),
        completion_tokens=tokens if isinstance(tokens, int) else None,
        finish_reason=finish_reason or None,
    )


def at(value: object, *path: str | int) -> object:
    """An element of nested JSON; None if absent."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def _text(value: object) -> str:
    return replace_surrogates(value) if isinstance(value, str) else ""
