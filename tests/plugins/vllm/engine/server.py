"""`halfbyte serve` as a process, and requests to it; imports neither vLLM nor torch."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512")


class Server:
    """`halfbyte serve` on a free port of 127.0.0.1, in a session of its own.

    Args:
        model: folder.
        options: more options, after `OPTIONS`.
        log: file that its output is added to.
        environment: more variables; None removes one.
        before: called in the new process before the command is started.
    """

    def __init__(
        self,
        model: str | Path,
        *options: str,
        log: Path,
        environment: dict[str, str | None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.port = free_port()
        self.model = str(model)
        self.log = log
        variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
            variables.pop(name, None)  # of the tests that run vLLM in their own process
        command = [sys.executable, "-m", "halfbyte", "serve", self.model, *OPTIONS]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port), *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={name: value for name, value in variables.items() if value is not None},
                start_new_session=True,
                preexec_fn=before,
            )

    @property
    def url(self) -> str:
        """Base of the OpenAI-compatible API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def wait_until_up(self, timeout_s: float = 400) -> float:
        """Seconds until /health answers, with halfbyte's attention, as its log says.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of its log.
        """
        start = time.monotonic()
        while time.monotonic() - start < timeout_s:
            with suppress(OSError, http.client.HTTPException):
                if self.get("/health")[0] == 200:
                    assert b"halfbyte: K and V " in self.log.read_bytes()
                    return time.monotonic() - start
            if self.process.poll() is not None:
                break
            time.sleep(0.25)
        self.kill()
        raise RuntimeError(f"the server is not up:\n{self.log.read_text()[-4000:]}")

    def connection(self, timeout_s: float = 120) -> http.client.HTTPConnection:
        """A connection to the server, not yet open."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page."""
        with closing(self.connection(10)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def metrics(self, *names: str) -> dict[str, float]:
        """vLLM's numbers, each summed over its labels."""
        found = dict.fromkeys(names, 0.0)
        for line in self.get("/metrics")[1].splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in found:
                found[name] += float(line.rsplit(" ", 1)[1])
        return found

    def complete(self, prompt: str | Sequence[int], max_tokens: int) -> list[int]:
        """Greedy tokens of a completion."""
        return [token for chunk in self.stream(prompt, max_tokens) for token in chunk]

    def stream(self, prompt: str | Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """The same as they come; closing the iterator closes the connection.

        Raises:
            OSError, http.client.HTTPException: the connection broke, or the answer did.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with closing(self.connection()) as connection:
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise http.client.HTTPException(f"{response.status}: {response.read()!r}")
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return
                    event: Any = json.loads(data)
                    if "choices" not in event:
                        raise http.client.HTTPException(f"{event}")
                    for choice in event["choices"]:
                        yield choice["token_ids"] or []
                raise http.client.IncompleteRead(b"")

    def processes(self) -> list[int]:
        """Those of the server's session that live; zombies do not."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, IndexError, ValueError):
                if not entry.name.isdigit():
                    continue
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def memory_mib(self) -> float:
        """Memory of all its processes; shared memory counts once (PSS)."""
        total = 0
        for pid in self.processes():
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1])
        return total / 1024

    def terminate(self, timeout_s: float = 60) -> int:
        """Send SIGTERM to the first process; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """End every process of the session at once (SIGKILL)."""
        for pid in [self.process.pid, *self.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait_until_gone(self, timeout_s: float = 20) -> list[int]:
        """Wait for the session's processes to end, with a time limit; returns those left."""
        end = time.monotonic() + timeout_s
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)
        return self.processes()


def free_port() -> int:
    """A port that no process listened at a moment ago."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
