"""An OpenAI-compatible server for tests: sends given replies and records requests."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[["_Handler"], None]


class OpenAIServer(ThreadingHTTPServer):
    """Answers POST requests with `replies`, one after the other, the last one again and again.

    Attributes:
        models: names that GET /v1/models lists.
        requests: (path, headers, body) of the POST requests.
        other_paths: of the GET requests.
        given_up: set once a client closes the connection of a `hold`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: list[str] = ["tiny", "other"]
        self.replies: list[Reply] = []
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.other_paths: list[str] = []
        self.given_up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def bodies(self) -> list[Any]:
        return [body for _, _, body in self.requests]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OpenAIServer

    def do_GET(self) -> None:
        self.server.other_paths.append(self.path)
        if self.path == "/v1/models":
            as_json({"data": [{"id": name} for name in self.server.models]})(self)
        else:
            as_json({"detail": "Not Found"}, 404)(self)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, headers, body))
        replies = self.server.replies
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        with suppress(ConnectionError):  # a client may leave
            reply(self)

    def start(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send_chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def serving() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def as_json(value: object, status: int = 200, **headers: str) -> Reply:
    """One JSON object."""

    def reply(handler: _Handler) -> None:
        content = json.dumps(value).encode()
        length = str(len(content))
        handler.start(status, Content_Type="application/json", Content_Length=length, **headers)
        handler.wfile.write(content)

    return reply


def stream(*chunks: bytes, complete: bool = True) -> Reply:
    """An event stream, written chunk by chunk; not `complete`: cut off by a lost connection."""

    def reply(handler: _Handler) -> None:
        handler.start(200, Content_Type="text/event-stream", Transfer_Encoding="chunked")
        for chunk in chunks:
            handler.send_chunk(chunk)
        if complete:
            handler.send_chunk(b"")
        handler.close_connection = True

    return reply


def hold(*chunks: bytes) -> Reply:
    """An event stream that continues with comments until the client closes the connection."""

    def reply(handler: _Handler) -> None:
        handler.start(200, Content_Type="text/event-stream", Transfer_Encoding="chunked")
        end = time.monotonic() + 20
        try:
            for chunk in chunks:
                handler.send_chunk(chunk)
            while time.monotonic() < end:
                handler.send_chunk(b": still there\n\n")
                time.sleep(0.01)
        except ConnectionError:
            handler.server.given_up.set()
        handler.close_connection = True

    return reply


def silence(seconds: float, *chunks: bytes) -> Reply:
    """An event stream that stops after the chunks; without any, not even a status."""

    def reply(handler: _Handler) -> None:
        if chunks:
            handler.start(200, Content_Type="text/event-stream", Transfer_Encoding="chunked")
        for chunk in chunks:
            handler.send_chunk(chunk)
        time.sleep(seconds)

    return reply


def event(value: object) -> bytes:
    return b"data: %s\n\n" % json.dumps(value, ensure_ascii=False).encode()


def delta(text: str, **fields: str) -> bytes:
    """An event of a streamed chat completion."""
    return event({"choices": [{"index": 0, "delta": {"content": text, **fields}}]})


def continued(text: str) -> bytes:
    """An event of a completion."""
    return event({"choices": [{"index": 0, "text": text}]})


def end(tokens: int | None = None, reason: str = "stop") -> bytes:
    """The last events of a stream."""
    events = event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if tokens is not None:
        events += event({"choices": [], "usage": {"completion_tokens": tokens}})
    return events + b"data: [DONE]\n\n"


NO_TEMPLATE = as_json(
    {
        "error": {
            "message": "As of transformers v4.44, default chat template is no longer allowed, so "
            "you must provide a chat template if the tokenizer does not define one.",
            "type": "BadRequestError",
            "code": 400,
        }
    },
    400,
)
