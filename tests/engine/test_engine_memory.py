"""Memory budget, and out-of-memory errors that name the options."""

from typing import Any

import pytest
import torch

from halfbyte.engine import LLM, SamplingParams, memory
from halfbyte.engine.options import check_memory_share
from halfbyte.kvcache import FullAttentionSpec, plan_kv_cache
from models.zoo import make_model


@pytest.mark.parametrize("num_pages", [10**10, 2**62, 2**70])
def test_a_pool_that_does_not_fit_names_its_options(num_pages: int) -> None:
    expected = rf"{num_pages:,} pages of .* GiB; give a smaller num_pages, gpu_memory_utilization"
    with pytest.raises(torch.OutOfMemoryError, match=expected) as caught:
        LLM(make_model("llama"), num_pages=num_pages)
    assert "\n" not in str(caught.value)


def test_too_many_sequences_name_their_option() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="the last tokens of max_num_seqs 1000000000"):
        LLM(make_model("llama"), max_num_seqs=10**9)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has\nmore"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_step_that_does_not_fit_names_its_options(error: Exception) -> None:
    llm = LLM(make_model("llama"), max_batched_tokens=48)
    function, fail = llm.core.runner.run, True

    def run(*args: Any, **options: Any) -> Any:
        if fail:
            raise error
        return function(*args, **options)

    llm.core.runner.run = run  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError, match="max_batched_tokens 48 and max_num") as caught:
        llm.generate([[1, 2, 3]])
    assert "gpu_memory_utilization" in str(caught.value)
    assert "\n" not in str(caught.value)
    fail = False
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids) == 4


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory.name_memory_options("x"):
        raise RuntimeError("shapes")


def test_requests_that_do_not_fit_name_the_options() -> None:
    llm = LLM(make_model("llama"), num_pages=3)
    output = llm.generate([list(range(1, 60))])[0]
    assert output.error is not None
    assert output.error.startswith("out of KV cache pages: 4 needed, 2 of 2 free, for 59 tokens")
    assert "num_pages (a larger gpu_memory_utilization)" in output.error
    assert "max_model_len" in output.error


@pytest.mark.parametrize(("spare", "warns"), [(0, False), (-1, True)])
def test_room_for_one_sequence_is_enough(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spare: int, warns: bool
) -> None:
    plan = plan_kv_cache([FullAttentionSpec(16, 1, 32, kv_cache_dtype="nvfp4")] * 2)
    pages = -(-100 // plan.groups[0].block_size)
    monkeypatch.setattr(memory, "_CPU_POOL_BYTES", pages * plan.page_bytes + spare)
    cpu = torch.device("cpu")
    assert memory.default_num_pages(plan, 100, 5, cpu) == 1 + pages + spare
    assert ("has room for" in caplog.text) == warns
    monkeypatch.setattr(memory, "_CPU_POOL_BYTES", 2**30)
    assert memory.default_num_pages(plan, 100, 5, cpu) == 1 + 5 * pages


@pytest.mark.parametrize(
    "option", [{"linear_backend": "cpu"}, {"moe_backend": "cpu"}, {"quantize_activations": False}]
)
def test_options_of_loading_are_refused_for_a_loaded_model(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="have no effect on a loaded model"):
        LLM(make_model("llama"), **option)


@pytest.mark.parametrize(
    ("free", "total", "share", "expected"),
    [(100, 160, None, 80), (100, 160, 0.9, 144 - 60), (160, 160, 1.0, 160)],
)
def test_gpu_budget(free: int, total: int, share: float | None, expected: int) -> None:
    """`gpu_memory_utilization` counts memory in use, as in vLLM; the default only free memory."""
    assert memory.gpu_budget(free, total, share) == expected


def test_shares_of_a_gpu_to_their_ends() -> None:
    gpu = torch.device("cuda")
    for share in (1e-6, 1, 1.0, None):
        check_memory_share(share, None, gpu)
    for share in (0, -0.5, 1 + 1e-6, float("nan")):
        with pytest.raises(ValueError, match=r"gpu_memory_utilization: expected a number in \(0"):
            check_memory_share(share, None, gpu)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization, num_pages: .*got both"):
        check_memory_share(0.5, 9, gpu)


def test_gpu_budget_that_leaves_nothing() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="leaves no room for the KV cache"):
        memory.gpu_budget(80, 160, 0.5)
    assert memory.gpu_budget(82, 160, 0.5) == 2
    with pytest.raises(torch.OutOfMemoryError, match=r"gpu_memory_utilization: 0\.3 of 0\.2 GiB"):
        memory.gpu_budget(1 * 2**27, 2**28, 0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization: expected a number in \(0, 1\]"),
        ({"gpu_memory_utilization": "1"}, "gpu_memory_utilization: expected a number"),
        ({"gpu_memory_utilization": 0.5}, "is for GPUs, and the device is cpu; give num_pages"),
        ({"gpu_memory_utilization": 0.5, "num_pages": 9}, "expected one of them, got both"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: expected at least 1, got 0"),
        (
            {"max_num_batched_tokens": 5, "max_batched_tokens": 6},
            "max_batched_tokens, max_num_batched_tokens: are one option, got 6 and 5",
        ),
    ],
    ids=str,
)
def test_options_of_memory_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(make_model("llama"), **options)


def test_vllm_s_names_are_ours() -> None:
    llm = LLM(make_model("llama"), max_num_batched_tokens=33, enforce_eager=True)
    assert llm.core.scheduler.max_batched_tokens == 33
    assert llm.core.runner.graphs is None
