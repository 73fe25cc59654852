"""`halfbyte chat`

Answers are streamed to stdout without control characters; remarks and errors go to stderr.
Reasoning and timings are shown only on a terminal.
"""

import io
import math
import os
import sys
import time
from contextlib import closing, suppress
from typing import Annotated

import typer
from rich.text import Text

from halfbyte.cli import signals
from halfbyte.cli.console import err, out, print_error, stdin
from halfbyte.cli.conversation import MAX_CONTINUATION_TOKENS, Conversation
from halfbyte.cli.openai_client import Client
from halfbyte.cli.openai_protocol import EndpointError, replace_surrogates, strip_control

_HELP = """\
/reset   forget the conversation, keep the system message
/help    show this
/quit    leave, as Ctrl-D and Ctrl-C do
A \\ at the end of a line continues it on the next one.
Ctrl-C while an answer comes stops the answer."""


def chat(
    url: Annotated[
        str, typer.Option(help="Base URL of the API; nothing is sent anywhere else.")
    ] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None, typer.Option(help="Name of the model on the server; by default its first.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message: how the model is to behave.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; by default the server's.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Max tokens of an answer; by default the server's limit, or "
            f"{MAX_CONTINUATION_TOKENS} without a chat template.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", help="API key, if the server requires one."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Answer this and exit. By default piped standard input; on a terminal, chat."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Max seconds without data from the server.")
    ] = 300.0,
) -> None:
    """Talk to a model that `halfbyte serve`, or any OpenAI-compatible server, serves.

    In a terminal, it is a conversation: /help lists what you can type, Ctrl-C stops an answer,
    Ctrl-D leaves. With --prompt, or with text on standard input, it is one answer:

        halfbyte chat --prompt "Why is the sky blue?" > answer.txt

    A base model, which has no chat template, continues your text instead.
    """
    _check(temperature, max_tokens)
    client = Client(url, api_key, timeout)
    if prompt is None and not stdin().isatty():
        prompt = _stdin()
    if prompt is not None and not prompt.strip():
        raise ValueError("prompt: is empty")
    for screen in (sys.stdout, sys.stderr):  # models may output characters outside the encoding
        if isinstance(screen, io.TextIOWrapper):
            screen.reconfigure(errors="replace")
    if model is None:
        model = _first_model(client)
    conversation = Conversation(
        client,
        model,
        system=system and replace_surrogates(system),
        temperature=temperature,
        max_tokens=max_tokens,
        on_no_template=lambda: _remark(
            f"{model} has no chat template: it continues your text instead (/completions, at "
            f"most {max_tokens or MAX_CONTINUATION_TOKENS} tokens: see --max-tokens)"
        ),
    )
    try:
        if prompt is not None:
            _answer(conversation, prompt)
        else:
            _remark(f"{model} at {client.url}; /help lists commands, Ctrl-D leaves")
            _talk(conversation)
    except BrokenPipeError:  # the reader of stdout has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + 13) from None  # as a shell reports SIGPIPE


def _check(temperature: float | None, max_tokens: int | None) -> None:
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a number, 0 or more, got {temperature:g}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens: expected 1 or more, got {max_tokens}")


def _stdin() -> str:
    try:
        return stdin().read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: expected text, got undecodable bytes: {error}") from None


def _first_model(client: Client) -> str:
    names = client.models()
    if not names:
        raise EndpointError(f"{client.url}/models", "lists no model", "name one with --model")
    return names[0]


def _talk(conversation: Conversation) -> None:
    """Run the conversation until the user quits; an error ends an answer, not the conversation."""
    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history in input())
    while True:
        try:
            text = _read()
        except (EOFError, KeyboardInterrupt) as end:
            err.print()
            if isinstance(end, EOFError):
                return
            raise
        match text.strip():
            case "":
                continue
            case "/quit":
                return
            case "/help":
                _remark(_HELP)
            case "/reset":
                conversation.turns.clear()
                _remark("forgotten")
            case command if command.startswith("/") and command[1:].isalpha():
                _remark(f"{command}: no such command; /help lists them")
            case _:
                try:
                    _answer(conversation, text)
                except KeyboardInterrupt:
                    signals.forget()
                    _remark("stopped")
                except EndpointError as error:
                    print_error(error)


def _read() -> str:
    """Read the user's input, up to a line that does not end with a backslash."""
    lines: list[str] = []
    prompt = "> "
    while True:
        if sys.stdout.isatty():
            line = input(prompt)
        else:  # input() would print its prompt there
            err.print(prompt, end="")
            line = input()
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])
        prompt = ". "


def _answer(conversation: Conversation, prompt: str) -> None:
    """Stream one answer; on a terminal, also the reasoning and the timing."""
    terminal = sys.stdout.isatty()
    screen = _Screen()
    times = [time.perf_counter()]
    tokens = finish_reason = None
    try:
        with closing(conversation.ask(replace_surrogates(prompt))) as chunks:
            for chunk in chunks:
                if chunk.text or chunk.reasoning:
                    times.append(time.perf_counter())
                if terminal:
                    screen.write_reasoning(chunk.reasoning)
                screen.write(chunk.text)
                tokens = tokens if chunk.completion_tokens is None else chunk.completion_tokens
                finish_reason = chunk.finish_reason or finish_reason
    finally:
        screen.end_line()
    if not screen.has_answer:
        _remark(f"the answer is empty (finish reason: {finish_reason or 'none'})")
    if terminal and len(times) > 1:
        _remark(_speed(times, tokens, finish_reason))


def _speed(times: list[float], tokens: int | None, finish_reason: str | None) -> str:
    """Timing of an answer, from the times of the request and of each chunk, in seconds."""
    first, last = times[1], times[-1]
    parts = [] if tokens is None else [f"{tokens} token{'s' * (tokens != 1)}"]
    if tokens is not None and tokens > 1 and last > first:
        parts.append(f"{(tokens - 1) / (last - first):,.1f} tokens/s")
    parts.append(f"first after {first - times[0]:.2f} s")
    if finish_reason == "length":
        parts.append("cut at the token limit")
    return ", ".join(parts)


class _Screen:
    """Writes the model's reasoning, dimmed, and then its answer to stdout."""

    def __init__(self) -> None:
        self.has_answer = False
        self._line_is_open = False

    def write_reasoning(self, text: str) -> None:
        if text := strip_control(text):
            self._line_is_open = not text.endswith("\n")
            out.print(Text(text, style="dim", end=""), end="")

    def write(self, text: str) -> None:
        if text := strip_control(text):
            if not self.has_answer:  # a new line after the reasoning, if any
                self.end_line()
            self.has_answer = True
            self._line_is_open = not text.endswith("\n")  # Ctrl-C may interrupt the write
            # Not with rich, which would replace tabs.
            sys.stdout.write(text)
            sys.stdout.flush()

    def end_line(self) -> None:
        if self._line_is_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._line_is_open = False


def _remark(text: str) -> None:
    err.print(strip_control(text), style="dim", markup=False, emoji=False)
