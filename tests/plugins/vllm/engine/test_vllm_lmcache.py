"""Pages in an LMCache server, from which engines with the same formats and scales load them."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import halfbyte
from plugins.vllm.engine.engines import (
    BUNDLED,
    ROTATED,
    assert_ours,
    assert_same_but_one,
    generate,
    needs_page_specs,
    outputs_of,
    tokens_after_hits,
    tokens_of,
    varied,
    vllm_engine,
)
from plugins.vllm.engine.server import free_port

HAS_LMCACHE = find_spec("lmcache") is not None  # not imported here, see `_run`
pytestmark = [
    pytest.mark.slow,
    needs_page_specs,
    pytest.mark.skipif(not HAS_LMCACHE, reason="LMCache is not installed in this environment"),
]

CHUNK = 64
"""Tokens that LMCache stores together: four blocks."""


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Of an LMCache server. On a CPU the engines' workers copy the pages."""
    port = free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    options = {
        "port": port,
        "http-port": free_port(),
        "chunk-size": CHUNK,
        "l1-size-gb": 1,
        "l1-init-size-gb": 1,
        "eviction-policy": "LRU",
        "shm-name": f"halfbyte-{port}",
        "supported-transfer-mode": "engine_driven",
    }
    command += ["--no-l1-use-lazy", *(f"--{name}={value}" for name, value in options.items())]
    log = tmp_path / "lmcache.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 60
        while "cache server is running on" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def test_pages_come_back_from_lmcache(port: int, tmp_path: Path) -> None:
    scales = halfbyte.kvcache.KVScales.load(BUNDLED)
    assert scales is not None
    amax = [tuple(40 * x for x in side) for side in (scales.k_amax, scales.v_amax)]
    other = halfbyte.kvcache.KVScales(amax[0], amax[1], "test").save(tmp_path)
    runs: dict[str, dict[str, Any]] = {
        "plain": {"kv_recipe": "plain"},
        "other scales": {"kv_recipe": "plain", "kv_scales": str(other)},
        "plain again": {"kv_recipe": "plain"},
        "balanced": {"kv_recipe": "balanced"},
        "K in fp8": {"kv_recipe": "plain", "k_dtype": "fp8"},
    }
    cached = ["plain again"]  # the second time the engine has the blocks itself
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        results = pool.submit(_run, port, runs, cached).result()
    for name, (without, first, again) in results.items():
        assert varied(without), name
        # Pages of other scales and formats are not found. 281 tokens are four chunks.
        hits = [256] * len(ROTATED)
        assert first[0] == (hits if name == "plain again" else [0] * len(ROTATED)), name
        assert again[0] == ([272] * len(ROTATED) if name in cached else hits), name
        expected = without
        if name == "balanced":  # rings were filled from pages
            expected = tokens_after_hits(BUNDLED, ROTATED, hits, 24, kv_recipe="balanced")
        assert_same_but_one(first[1], without)
        assert_same_but_one(again[1], expected)
    assert results["plain"][0] != results["other scales"][0]


Answers = tuple[list[int], list[list[int]]]
"""Tokens of each prompt that were found, and of each answer."""


def _run(
    port: int, runs: dict[str, dict[str, Any]], cached: Sequence[str]
) -> dict[str, tuple[list[list[int]], Answers, Answers]]:
    """For each run the tokens without a connector, and two answers with LMCache's.

    In a process of its own: vLLM for CPUs looks for kernels in all modules when an engine starts,
    and fails at those that LMCache imports. The first engine has found them.
    """
    from vllm.triton_utils import dispatcher

    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
        },
    }
    results = {}
    for name, section in runs.items():
        options: dict[str, Any] = {
            "additional_config": {"halfbyte": section},
            "block_size": 16,
            "enable_prefix_caching": name in cached,
        }
        with vllm_engine(**options) as llm:
            without = generate(llm, ROTATED, 24)
        dispatcher._rebind_kernels = lambda overrides: None
        answers: list[Answers] = []
        with vllm_engine(kv_transfer_config=transfer, **options) as llm:
            assert_ours(llm)
            for _ in range(2):
                if answers:
                    time.sleep(4)  # stores end later than answers
                outputs = outputs_of(llm, ROTATED, 24)
                hits = [output.num_cached_tokens for output in outputs]
                answers.append((hits, tokens_of(outputs)))
        results[name] = without, answers[0], answers[1]
    return results
