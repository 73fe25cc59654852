"""The streaming client against a real server."""

import socket
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import pytest

from cli.openai_server import (
    NO_TEMPLATE,
    OpenAIServer,
    Reply,
    as_json,
    continued,
    delta,
    end,
    event,
    hold,
    serving,
    silence,
    stream,
)
from halfbyte.cli.conversation import Conversation
from halfbyte.cli.openai_client import Client
from halfbyte.cli.openai_protocol import Chunk, EndpointError, NoChatTemplateError, event_data

QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with serving() as server:
        yield server


def ask(server: OpenAIServer, *replies: Reply, timeout_s: float = 20.0) -> list[Chunk]:
    server.replies = list(replies)
    return list(Client(server.url, timeout_s=timeout_s).chat("tiny", QUESTION))


def refusal(server: OpenAIServer, *replies: Reply, timeout_s: float = 20.0) -> str:
    with pytest.raises(EndpointError) as caught:
        ask(server, *replies, timeout_s=timeout_s)
    message = str(caught.value)
    assert message.startswith(f"{server.url}/chat/completions: ")
    return message.removeprefix(f"{server.url}/chat/completions: ")


STREAM = (
    ': ping\r\nid: 7\r\ndata: {"a":\r\ndata:  "é🙂"}\r\n\r\ndata:[DONE]\n\n\ndata: cut'.encode()
)
EVENTS = ['{"a":\n "é🙂"}'.encode(), b"[DONE]"]


@pytest.mark.parametrize("line_end", ["mixed", "\n", "\r\n"])
def test_events_split_anywhere(line_end: str) -> None:
    content = STREAM
    if line_end != "mixed":
        content = STREAM.replace(b"\r\n", b"\n").replace(b"\n", line_end.encode())
    assert list(event_data([content])) == EVENTS
    for position in range(len(content) + 1):
        assert list(event_data([content[:position], content[position:]])) == EVENTS
    assert list(event_data(content[i : i + 1] for i in range(len(content)))) == EVENTS


def test_carriage_returns_end_lines_too() -> None:
    assert list(event_data([b"data: a\rdata: b\r\rdata: c\r\r\n"])) == [b"a\nb", b"c"]


def test_chat_streams_text_tokens_and_reason(server: OpenAIServer) -> None:
    chunks = ask(server, stream(delta("Hel"), delta("lo"), end(2)))
    assert chunks == [
        Chunk("Hel"),
        Chunk("lo"),
        Chunk(finish_reason="stop"),
        Chunk(completion_tokens=2),
    ]
    assert [path for path, _, _ in server.requests] == ["/v1/chat/completions"]
    assert server.bodies == [
        {
            "model": "tiny",
            "messages": QUESTION,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_bytes_one_by_one(server: OpenAIServer) -> None:
    content = delta("é🙂") + delta("\t語\n") + end(3)
    chunks = ask(server, stream(*(content[i : i + 1] for i in range(len(content)))))
    assert "".join(chunk.text for chunk in chunks) == "é🙂\t語\n"


def test_complete_sends_sampling_and_key(server: OpenAIServer) -> None:
    server.replies = [stream(continued("x"), end())]
    client = Client(f"{server.url}/", "secret\n")
    chunks = list(client.complete("tiny", "import ", temperature=0.0, max_tokens=None))
    assert chunks == [Chunk("x"), Chunk(finish_reason="stop")]
    [(path, headers, body)] = server.requests
    assert path == "/v1/completions"
    assert headers["authorization"] == "Bearer secret"
    assert (body["prompt"], body["temperature"]) == ("import ", 0.0)
    assert "max_tokens" not in body


def test_models(server: OpenAIServer) -> None:
    assert Client(server.url).models() == ["tiny", "other"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_apart(server: OpenAIServer, name: str) -> None:
    chunks = ask(server, stream(delta("", **{name: "Hm"}), delta("4"), end()))
    assert chunks[:2] == [Chunk(reasoning="Hm"), Chunk("4")]


def test_server_that_does_not_stream(server: OpenAIServer) -> None:
    message = {"message": {"content": "Hi"}, "finish_reason": "stop"}
    reply = as_json({"choices": [message], "usage": {"completion_tokens": 1}})
    assert ask(server, reply) == [Chunk("Hi", "", 1, "stop")]


def test_odd_events_bring_nothing(server: OpenAIServer) -> None:
    odd = [[], 7, {"choices": None}, {"choices": [None]}, {"choices": [{"delta": {"content": 5}}]}]
    assert ask(server, stream(*map(event, odd), end()))[:5] == [Chunk()] * 5


def test_lone_surrogates_become_replacement_characters(server: OpenAIServer) -> None:
    reply = stream(rb'data: {"choices": [{"delta": {"content": "a\ud83d b"}}]}' + b"\n\n", end())
    assert ask(server, reply)[0] == Chunk("a\ufffd b")


def test_stream_without_done_is_whole_once_it_says_why_it_ends(server: OpenAIServer) -> None:
    finish = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    assert ask(server, stream(delta("Hi"), finish)) == [Chunk("Hi"), Chunk(finish_reason="stop")]


def test_no_chat_template(server: OpenAIServer) -> None:
    with pytest.raises(NoChatTemplateError, match=r"status 400 Bad Request, As of transformers"):
        ask(server, NO_TEMPLATE)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            as_json({"error": "Unauthorized"}, 401),
            "status 401 Unauthorized, Unauthorized; give the server's key with --api-key or in "
            "OPENAI_API_KEY",
        ),
        (
            as_json({"detail": "Not Found"}, 404),
            "status 404 Not Found, Not Found; check --url: the API's base often ends in /v1",
        ),
        (
            as_json({"error": {"message": "The model `x` does not exist."}}, 404),
            "status 404 Not Found, The model `x` does not exist; without --model, the first model "
            "served is taken",
        ),
        (
            as_json({"object": "error", "message": "at most\n64 \x1b[2Jtokens"}, 400),
            "status 400 Bad Request, at most 64 [2Jtokens; change the request: the text, /reset, "
            "or the options",
        ),
        (
            as_json({}, 503),
            "status 503 Service Unavailable; the server is busy or still loading: try again later",
        ),
        (as_json([], 500), "status 500 Internal Server Error; look at the server's log"),
        (
            as_json({}, 307, Location="http://127.0.0.1:9/v1"),
            "redirects to http://127.0.0.1:9/v1; give that server's URL with --url",
        ),
        (
            stream(delta("Hi"), event({"error": {"message": "out of\npages"}})),
            "the server reports: out of pages; look at its log",
        ),
        (
            stream(b"data: <html>\n\n"),
            "expected JSON, got '<html>'; check that an OpenAI-compatible server is there",
        ),
        (
            stream(b"data: " + b"[" * 100_000 + b"\n\n"),
            f"expected JSON, got '{'[' * 40}'; check that an OpenAI-compatible server is there",
        ),
        (
            stream(delta("Hi")),
            "the answer broke off; look at the server's log, and try again",
        ),
        (
            stream(delta("Hi"), complete=False),
            "the answer broke off; look at the server's log, and try again",
        ),
    ],
    ids=[
        "401",
        "404",
        "404-model",
        "400",
        "503",
        "500",
        "redirect",
        "error-in-stream",
        "no-json",
        "nested",
        "ends-early",
        "lost",
    ],
)
def test_errors_say_what_to_do(server: OpenAIServer, reply: Reply, message: str) -> None:
    assert refusal(server, reply) == message
    assert len(server.requests) == 1


@pytest.mark.parametrize("before", [[], [delta("Hi")]], ids=["first", "later"])
def test_silence(server: OpenAIServer, before: list[bytes]) -> None:
    message = "the server sent nothing for 0.3 s; look at its log, or raise --timeout"
    assert refusal(server, silence(1.0, *before), timeout_s=0.3) == message


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EndpointError) as caught:
        Client(url).models()
    assert str(caught.value) == (
        f"{url}/models: no server listens there; start a server (halfbyte serve MODEL), or "
        "name another with --url"
    )


def test_server_without_tls(server: OpenAIServer) -> None:
    with pytest.raises(EndpointError, match=r"/v1/models: no TLS connection .*; try http://"):
        Client(server.url.replace("http:", "https:"), timeout_s=5).models()


def test_server_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        client = Client(f"http://127.0.0.1:{other.getsockname()[1]}/v1", timeout_s=5)
        connection = client._connection()
        connection.connect()
        accepted, _ = other.accept()
        with accepted, closing(connection):
            accepted.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.request("GET", "/")
            with pytest.raises(Exception, match="SSH") as caught:
                connection.getresponse()
    assert "no HTTP answer (BadStatusLine(" in str(client._failure("u", caught.value))


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000/v1",
        "ftp://host/v1",
        "http:///v1",
        "http://host:0/v1",
        "http://host:port/v1",
        "http://[::1/v1",
        "http://host/v1?key=1",
        "http://host/v1\r\nX: y",
        "http://höst/v1",
        f"http://{'a' * 64}.org/v1",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url: expected one like http://127\.0\.0\.1:8000/v1"):
        Client(url)


def test_secrets_are_not_quoted() -> None:
    with pytest.raises(ValueError, match=r"^url: expected no user") as caught:
        Client("http://me:secret@host/v1")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^api_key: expected printable") as caught:
        Client("http://host/v1", "secret\r\nX: y")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_that_are_none(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout: expected more than 0"):
        Client("http://host/v1", timeout_s=timeout_s)


def test_proxies_are_not_used(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert Client(server.url).models() == ["tiny", "other"]


def test_closing_the_stream_closes_the_connection(server: OpenAIServer) -> None:
    server.replies = [hold(delta("Hi"))]
    with closing(Conversation(Client(server.url), "tiny").ask("Q")) as chunks:
        assert next(chunks) == Chunk("Hi")
        assert not server.given_up.is_set()
    assert server.given_up.wait(10)


def roles(body: dict[str, list[dict[str, str]]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_conversation_remembers_answers_that_came(server: OpenAIServer) -> None:
    answer, late = stream(delta("A"), delta("1"), end()), as_json({}, 500)
    server.replies = [answer, late, stream(delta("A2"), complete=False), answer]
    conversation = Conversation(Client(server.url), "tiny", system="S")
    assert "".join(chunk.text for chunk in conversation.ask("Q1")) == "A1"
    for question in ("refused", "Q2"):
        with pytest.raises(EndpointError):
            list(conversation.ask(question))
    list(conversation.ask("Q3"))
    expected = [
        ("system", "S"),
        ("user", "Q1"),
        ("assistant", "A1"),
        ("user", "Q2"),
        ("assistant", "A2"),
        ("user", "Q3"),
    ]
    assert roles(server.bodies[-1]) == expected
    for earlier, later in pairwise(roles(server.bodies[-1])[1:]):
        assert earlier[0] != later[0]


def test_conversation_without_a_template_continues_text(server: OpenAIServer) -> None:
    server.replies = [NO_TEMPLATE, stream(continued(" os"), end()), stream(continued("2"), end())]
    notes: list[None] = []
    conversation = Conversation(
        Client(server.url), "tiny", system="# S", on_no_template=lambda: notes.append(None)
    )
    for question, answer in (("import", " os"), ("x = ", "2")):
        assert "".join(chunk.text for chunk in conversation.ask(question)) == answer
    paths = [path for path, _, _ in server.requests]
    assert paths == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert [body["prompt"] for body in server.bodies[1:]] == [
        "# S\nimport",
        "# S\nimport os\nx = ",
    ]
    assert [body["max_tokens"] for body in server.bodies[1:]] == [256, 256]
    assert len(notes) == 1
