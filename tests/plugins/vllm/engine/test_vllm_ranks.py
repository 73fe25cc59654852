"""What takes longer: two ranks, and compilation. `make test-vllm`."""

import pytest

from plugins.vllm.engine.engines import TEXTS, assert_ours, generate, run_apart, vllm_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    with vllm_engine() as llm:
        assert_ours(llm, "nvfp4")
        return generate(llm, TEXTS)


def test_tensor_parallel_gives_the_same_tokens(
    tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    found, _ = run_apart(TEXTS, in_process=False, tensor_parallel_size=2)
    assert found == tokens


def test_compiled_gives_the_same_tokens(tokens: list[list[int]]) -> None:
    with vllm_engine(enforce_eager=False) as llm:
        assert_ours(llm, "nvfp4")
        assert generate(llm, TEXTS) == tokens
