"""`halfbyte chat`, as a user meets it: in pipes, and in a terminal."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from cli.openai_server import (
    NO_TEMPLATE,
    OpenAIServer,
    as_json,
    continued,
    delta,
    end,
    hold,
    serving,
    stream,
)
from halfbyte.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with serving() as server:
        yield server


@pytest.fixture
def chat(
    server: OpenAIServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Exit status, stdout and stderr of `halfbyte chat`, run in this process, in pipes."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["halfbyte", "chat", "--url", server.url, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        return code if isinstance(code, int) else 0, captured.out, captured.err

    return run


def test_prompt_answers_once(server: OpenAIServer, chat: Command) -> None:
    server.replies = [stream(delta("Hel"), delta("lo"), end(2))]
    options = ("--system", "S", "--temperature", "0", "--max-tokens", "9", "--api-key", "k")
    assert chat("--prompt", "Hi\n", *options) == (0, "Hello\n", "")
    [(path, headers, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer k"
    assert body["model"] == "tiny"
    assert (body["temperature"], body["max_tokens"]) == (0, 9)
    assert body["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi\n"},
    ]


def test_defaults_are_the_servers(server: OpenAIServer, chat: Command) -> None:
    server.replies = [stream(delta("ok\n"), end())]
    assert chat("--model", "other", "--prompt", "Hi") == (0, "ok\n", "")
    assert server.other_paths == []
    assert set(server.bodies[0]) == {"model", "messages", "stream", "stream_options"}
    assert server.bodies[0]["model"] == "other"
    assert "authorization" not in server.requests[0][1]


def test_key_from_the_environment(
    server: OpenAIServer, chat: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    server.replies = [stream(delta("ok"), end())]
    assert chat("--prompt", "Hi")[0] == 0
    assert server.requests[0][1]["authorization"] == "Bearer from-env"


def test_standard_input_answers_once(server: OpenAIServer, chat: Command) -> None:
    server.replies = [stream(delta("ok"), end())]
    assert chat(stdin="two\nlines /quit\n") == (0, "ok\n", "")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "two\nlines /quit"}]


def test_output_is_plain_text(server: OpenAIServer, chat: Command) -> None:
    text = "[bold]a[/bold] :smile: \x1b[2J\x1b]0;t\x07\x9b1m\ttab\r\nb\x00\x7f é🙂"
    server.replies = [stream(delta("", reasoning="thinking"), delta(text), end(8))]
    expected = "[bold]a[/bold] :smile: [2J]0;t1m\ttab\nb é🙂\n"
    assert chat("--prompt", "Hi") == (0, expected, "")


def test_completions_where_there_is_no_template(server: OpenAIServer, chat: Command) -> None:
    server.models = ["a\x1b[31m[b]"]
    server.replies = [NO_TEMPLATE, stream(continued(" os"), end())]
    code, out, err = chat("--prompt", "import")
    assert (code, out) == (0, " os\n")
    assert err == (
        "a[31m[b] has no chat template: it continues your text instead (/completions, at most "
        "256 tokens: see --max-tokens)\n"
    )
    assert server.bodies[1]["model"] == "a\x1b[31m[b]"
    assert server.bodies[1]["prompt"] == "import"


def test_an_empty_answer_is_reported(server: OpenAIServer, chat: Command) -> None:
    server.replies = [stream(delta("", reasoning="Hm"), end(4, "length"))]
    expected = (0, "", "the answer is empty (finish reason: length)\n")
    assert chat("--prompt", "Hi") == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", " "], "prompt: is empty"),
        ([], "prompt: is empty"),
        (["--prompt", "x", "--temperature", "nan"], "temperature: expected a number, 0 or more"),
        (["--prompt", "x", "--temperature", "-1"], "temperature: expected a number, 0 or more"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens: expected 1 or more, got 0"),
        (["--prompt", "x", "--url", "localhost"], "url: expected one like http://127.0.0.1:8000"),
        (["--prompt", "x", "--timeout", "0"], "timeout: expected more than 0"),
    ],
)
def test_bad_input_is_one_line(
    server: OpenAIServer, chat: Command, arguments: list[str], message: str
) -> None:
    code, out, err = chat(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert server.requests == []


def test_a_server_without_models(server: OpenAIServer, chat: Command) -> None:
    server.models = []
    expected = f"error: {server.url}/models: lists no model; name one with --model\n"
    assert chat("--prompt", "x") == (1, "", expected)


def test_a_failure_in_the_stream_is_one_line(server: OpenAIServer, chat: Command) -> None:
    server.replies = [stream(delta("Hal"), complete=False)]
    code, out, err = chat("--prompt", "x")
    assert (code, out) == (1, "Hal\n")
    assert err == (
        f"error: {server.url}/chat/completions: the answer broke off; look at the server's log, "
        "and try again\n"
    )


def test_a_reader_that_has_enough(server: OpenAIServer) -> None:
    server.replies = [hold(*[delta("line\n")] * 1000)]
    command = [sys.executable, "-m", "halfbyte", "chat", "--url", server.url, "--prompt", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        server.replies = [stream(delta("line\n" * 9), end())]
        assert process.stderr.read() == b""
        assert process.wait(20) == 141
    assert server.given_up.wait(10)


def test_an_encoding_that_lacks_characters(server: OpenAIServer) -> None:
    server.replies = [stream(delta("é🙂"), end())]
    command = [sys.executable, "-m", "halfbyte", "chat", "--url", server.url, "--prompt", "x"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == (b"??\n", b"")


class Terminal:
    """`halfbyte chat` on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._screen = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm", "NO_COLOR": "", "INPUTRC": "/dev/null"}
            os.execv(sys.executable, [sys.executable, "-m", "halfbyte", "chat", *arguments])
        self._text = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def read_to(self, mark: str) -> str:
        """The output from the last mark up to and including this one."""
        deadline = time.monotonic() + 30
        while mark not in self._text:
            ready, _, _ = select.select([self._screen], [], [], deadline - time.monotonic())
            assert ready, f"expected {mark!r}, got {self._text!r}"
            try:
                self._text += os.read(self._screen, 65536).decode()
            except OSError:  # the process has ended
                pytest.fail(f"expected {mark!r}, got {self._text!r}")
        shown, _, self._text = self._text.partition(mark)
        return shown + mark

    def status(self, pressing: str = "") -> int:
        """The exit status, once the process has ended.

        Args:
            pressing: a key pressed again every second: one Ctrl-C is lost where it comes between
                the prompt and readline's wait for a key.
        """
        deadline, pressed = time.monotonic() + 30, 0.0
        while time.monotonic() < deadline:
            if pressing and time.monotonic() > pressed + 1:
                pressed = time.monotonic()
                with suppress(OSError):
                    self.type(pressing)
            with suppress(OSError):  # of a terminal that is gone
                if select.select([self._screen], [], [], 0.01)[0]:
                    self._text += os.read(self._screen, 65536).decode()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        pytest.fail(f"still running: {self._text!r}")

    def close(self) -> None:
        os.close(self._screen)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture
def terminal(server: OpenAIServer) -> Iterator[Terminal]:
    terminal = Terminal("--url", server.url)
    terminal.read_to("Ctrl-D leaves")
    terminal.read_to("> ")
    yield terminal
    terminal.close()


def test_conversation_in_a_terminal(server: OpenAIServer, terminal: Terminal) -> None:
    answer = stream(delta("", reasoning="Hm\x1b[5m"), delta("[b]A\x1b[2J\t"), delta("1"), end(5))
    server.replies = [answer]
    terminal.type("one\\\ntwo\n")
    shown = terminal.read_to("first after")
    assert "one\\\r\n. two\r\n" in shown
    assert "\x1b[2mHm[5m\x1b[0m\r\n[b]A[2J\t1\r\n" in shown
    assert "5 tokens, " in shown
    assert " tokens/s, " in shown
    terminal.read_to("> ")
    # What is typed before the prompt is there, the terminal would read, not readline.
    terminal.type("/nonsense\n")
    terminal.read_to("/nonsense: no such command; /help lists them")
    terminal.read_to("> ")
    terminal.type("/help\n")
    terminal.read_to("stops the answer")
    terminal.read_to("> ")
    terminal.type("next\n")
    terminal.read_to("first after")
    terminal.read_to("> ")
    terminal.type("/reset\n")
    terminal.read_to("forgotten")
    terminal.read_to("> ")
    terminal.type("/a b\n")
    terminal.read_to("first after")
    terminal.read_to("> ")
    terminal.type("  \n")
    terminal.read_to("> ")
    terminal.type("\x04")
    assert terminal.status() == 0
    assert [[message["content"] for message in body["messages"]] for body in server.bodies] == [
        ["one\ntwo"],
        ["one\ntwo", "[b]A\x1b[2J\t1", "next"],
        ["/a b"],
    ]


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_ctrl_c_stops_an_answer_then_leaves(
    server: OpenAIServer, terminal: Terminal, ends_by_itself: bool
) -> None:
    server.replies = [hold(delta("Hal")), hold(), stream(delta("ok"), end())]
    terminal.type("one\n")
    terminal.read_to("Hal")
    terminal.type("\x03")
    terminal.read_to("stopped")
    assert server.given_up.wait(10)
    terminal.read_to("> ")
    terminal.type("two\n")  # before anything came
    while len(server.requests) < 2:
        time.sleep(0.01)
    terminal.type("\x03")
    terminal.read_to("stopped")
    terminal.read_to("> ")
    terminal.type("three\n")
    terminal.read_to("first after")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == [
        "one",
        "Hal",
        "three",
    ]
    terminal.read_to("> ")
    if ends_by_itself:
        terminal.type("/quit\n")
    assert terminal.status("" if ends_by_itself else "\x03") == (0 if ends_by_itself else 130)


def test_an_error_keeps_the_conversation(server: OpenAIServer, terminal: Terminal) -> None:
    server.replies = [
        as_json({"error": {"message": "too [b]long\x1b[2J"}}, 400),
        stream(delta("ok")),
    ]
    terminal.type("one\n")
    shown = terminal.read_to("or the options")
    terminal.read_to("> ")
    assert "/chat/completions: status 400 Bad Request, too [b]long[2J; change" in shown
    server.replies = [stream(delta("ok"), end(1, "length"))]
    terminal.type("two\n")
    assert "ok\r\n" in terminal.read_to("1 token, first after")
    terminal.read_to("cut at the token limit")
    terminal.read_to("> ")
    terminal.type("/quit\n")
    assert terminal.status() == 0


def test_ctrl_c_ends_a_single_answer(server: OpenAIServer) -> None:
    server.replies = [hold(delta("Hal"))]
    command = [sys.executable, "-m", "halfbyte", "chat", "--url", server.url, "--prompt", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.read(3) == b"Hal"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == (b"\n", b"")
        assert process.returncode == 130
