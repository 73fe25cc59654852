"""A small streaming client for OpenAI-compatible servers, such as `vllm serve`.

Server-sent events over `http.client`, one connection per request. It is closed when the caller
stops reading, so that the server aborts the request. Requests go only to the given URL: redirects
are not followed, and proxy settings and `.netrc` are not read.
"""

import http.client
import json
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit

from halfbyte.cli.openai_protocol import (
    Chunk,
    EndpointError,
    NoChatTemplateError,
    at,
    error_message,
    event_data,
    parse_chunk,
    parse_json,
)

_CONNECT_TIMEOUT_S = 10.0
_MAX_TIMEOUT_S = 1e6
_READ_BYTES = 1 << 16
_MAX_ERROR_BYTES = 1 << 16


class Client:
    """Requests to one server.

    Args:
        url: base of the API, such as `http://127.0.0.1:8000/v1`.
        api_key: sent as a bearer token.
        timeout_s: max time without data from the server, in seconds.

    Raises:
        ValueError: an argument is not usable.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        self._parts = _split(url)
        self.url = url.rstrip("/")
        if not 0 < timeout_s <= _MAX_TIMEOUT_S:
            limit = f"more than 0 and at most {_MAX_TIMEOUT_S:,.0f} seconds"
            raise ValueError(f"timeout: expected {limit}, got {timeout_s:g}")
        self._timeout_s = timeout_s
        self._headers = {"Connection": "close", "User-Agent": "halfbyte"}
        api_key = (api_key or "").strip()
        # Check it here: http.client's error would contain the key.
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key: expected printable ASCII characters (OPENAI_API_KEY)")
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Names of the models served, in the server's order."""
        with self._response("GET", "models") as response:
            rows = at(parse_json(f"{self.url}/models", response.read()), "data")
        names = [at(row, "id") for row in rows] if isinstance(rows, list) else []
        return [name for name in names if isinstance(name, str)]

    def chat(
        self, model: str, messages: Sequence[Mapping[str, str]], **sampling: float | None
    ) -> Iterator[Chunk]:
        """Stream the answer to a conversation; None leaves a parameter to the server.

        Raises:
            NoChatTemplateError: the model can complete text only.
            EndpointError: anything else that the server or the network does.
        """
        return self._stream("chat/completions", {"model": model, "messages": messages}, sampling)

    def complete(self, model: str, prompt: str, **sampling: float | None) -> Iterator[Chunk]:
        """Stream a continuation of the prompt; None leaves a parameter to the server."""
        return self._stream("completions", {"model": model, "prompt": prompt}, sampling)

    def _stream(
        self, path: str, body: dict[str, object], sampling: Mapping[str, float | None]
    ) -> Iterator[Chunk]:
        url = f"{self.url}/{path}"
        body |= {name: value for name, value in sampling.items() if value is not None}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._response("POST", path, body) as response:
            if response.headers.get_content_type() != "text/event-stream":
                yield parse_chunk(url, response.read())
                return
            finished = False
            for data in event_data(iter(lambda: response.read1(_READ_BYTES), b"")):
                if data.strip() == b"[DONE]":
                    return
                chunk = parse_chunk(url, data)
                finished = finished or chunk.finish_reason is not None
                yield chunk
            if not finished:
                raise _broken(url)

    @contextmanager
    def _response(
        self, method: str, path: str, body: object = None
    ) -> Iterator[http.client.HTTPResponse]:
        """A successful response; all failures before it is read raise EndpointError."""
        url = f"{self.url}/{path}"
        connection = self._connection()
        try:
            try:
                connection.connect()
            except TimeoutError:
                raise EndpointError(
                    url, "the host does not answer", "check --url, and firewalls on the way"
                ) from None
            connection.sock.settimeout(self._timeout_s)
            headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
            content = None if body is None else json.dumps(body)
            connection.request(method, f"{self._parts.path.rstrip('/')}/{path}", content, headers)
            response = connection.getresponse()
            with response:
                if response.status != 200:
                    raise _refusal(url, response)
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(url, error) from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        timeout = min(_CONNECT_TIMEOUT_S, self._timeout_s)
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=timeout)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)

    def _failure(self, url: str, error: Exception) -> EndpointError:
        match error:
            case TimeoutError():
                problem = f"the server sent nothing for {self._timeout_s:g} s"
                return EndpointError(url, problem, "look at its log, or raise --timeout")
            case ConnectionRefusedError():
                advice = "start a server (halfbyte serve MODEL), or name another with --url"
                return EndpointError(url, "no server listens there", advice)
            case socket.gaierror():
                return EndpointError(url, "no such host", "check --url")
            case ssl.SSLCertVerificationError():
                problem = f"the certificate is not trusted ({error.verify_message})"
                return EndpointError(url, problem, "name the authority's file in SSL_CERT_FILE")
            case ssl.SSLError():
                return EndpointError(url, f"no TLS connection ({error})", "try http:// in --url")
            case ConnectionError() | http.client.IncompleteRead():
                return _broken(url)
            case http.client.HTTPException():
                advice = "check --url: another port, or https://"
                return EndpointError(url, f"no HTTP answer ({error!r})", advice)
        return EndpointError(url, f"cannot be reached ({error})", "check --url and the network")


def _split(url: str) -> SplitResult:
    wrong = ValueError(f"url: expected one like http://127.0.0.1:8000/v1, got {url!r}")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise wrong
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # brackets, a port that is not a number, a label too long
        raise wrong from None
    if "@" in parts.netloc:  # the message omits the URL, which holds a password
        raise ValueError("url: expected no user or password in it; a key goes into --api-key")
    if not usable or parts.query or parts.fragment:
        raise wrong
    return parts


def _broken(url: str) -> EndpointError:
    return EndpointError(url, "the answer broke off", "look at the server's log, and try again")


def _refusal(url: str, response: http.client.HTTPResponse) -> EndpointError:
    """The error for a status other than 200."""
    status = response.status
    if 300 <= status < 400:
        target = response.headers.get("Location", "another place")
        return EndpointError(url, f"redirects to {target}", "give that server's URL with --url")
    content = response.read(_MAX_ERROR_BYTES)
    try:
        message = error_message(json.loads(content))
    except (ValueError, RecursionError):
        message = ""
    problem = f"status {status} {response.reason}" + (f", {message}" if message else "")
    if re.search("chat.?template", message, re.IGNORECASE):
        return NoChatTemplateError(url, problem, "serve the model with --chat-template")
    if status in (401, 403):
        advice = "give the server's key with --api-key or in OPENAI_API_KEY"
    elif status == 404 and "model" in message.lower():
        advice = "without --model, the first model served is taken"
    elif status in (404, 405):
        advice = "check --url: the API's base often ends in /v1"
    elif status in (429, 503):
        advice = "the server is busy or still loading: try again later"
    elif status >= 500:
        advice = "look at the server's log"
    else:
        advice = "change the request: the text, /reset, or the options"
    return EndpointError(url, problem, advice)
