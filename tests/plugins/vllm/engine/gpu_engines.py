"""vLLM's engines on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from halfbyte.kvcache import KVRecipe
from plugins.vllm.engine.engines import vllm_engine

# Little memory, given in bytes, so that several tests can run at the same time.
GPU: dict[str, Any] = {
    "kv_cache_memory_bytes": 2**28,
    "gpu_memory_utilization": 0.05,
    "enforce_eager": False,
    "max_num_seqs": 16,
}


def graphs_alone(*sizes: int) -> dict[str, Any]:
    """Options for full CUDA graphs of decode steps, without compilation.

    Args:
        sizes: sequences of a step that has a graph of its own, without padding.
    """
    return {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(sizes),
        }
    }


@contextmanager
def gpu_engine(*arguments: Any, **options: Any) -> Iterator[Any]:
    """`vllm_engine`, which must have captured CUDA graphs unless it is eager."""
    from vllm.compilation.counter import compilation_counter
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.platforms import current_platform

    set_cudagraph_capturing_enabled(True)  # V1 forbids it to the process's later engines
    # vLLM's engines share a pool, which PyTorch cannot enter again while a tensor of an earlier
    # engine's graphs is alive.
    type(current_platform)._global_graph_pool = None
    before = compilation_counter.num_cudagraph_captured
    with vllm_engine(*arguments, **options) as llm:
        captured = compilation_counter.num_cudagraph_captured - before
        assert (captured > 0) != options.get("enforce_eager", True)
        yield llm


def scored(llm: Any, prompts: Sequence[Any], max_tokens: int = 48) -> list[list[dict[int, float]]]:
    """Per prompt and step, log-probabilities of the likeliest tokens, the greedy one first."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=5)
    asked = [p if isinstance(p, str) else {"prompt_token_ids": list(p)} for p in prompts]
    return [
        [{token: entry.logprob for token, entry in step.items()} for step in o.outputs[0].logprobs]
        for o in llm.generate(asked, params, use_tqdm=False)
    ]


def assert_alike(found: Any, expected: Any, mean: float) -> None:
    """Log-probabilities after the same prefixes differ by less than `mean` on average, and nowhere
    by much.

    Compiled layers round bfloat16 at other places than eager ones, so that K and V may get other
    codes. Differences were 0.021 on average and up to 0.19 with an unquantized cache, 0.13 and up
    to 1.44 with an nvfp4 cache.
    """
    differences = []
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            shared = a.keys() & b.keys()
            assert shared
            differences += [abs(a[token] - b[token]) for token in shared]
            best, other_best = max(a, key=a.__getitem__), max(b, key=b.__getitem__)
            if best != other_best:  # prefixes differ from here on
                assert abs(b[other_best] - b.get(best, -1e9)) < 1.5
                break
    assert len(differences) > 60 * len(found)
    assert sum(differences) / len(differences) < mean
    assert max(differences) < 2.0


def assert_rings(impls: Sequence[Any], recipe: str) -> None:
    """Assert that layers keep their last tokens in 16 bits if the recipe does."""
    tokens = KVRecipe.parse(recipe).recent_tokens
    assert {impl.recent_tokens for impl in impls} <= {0, tokens}
    assert any(impl.rings is not None for impl in impls) == any(
        impl.format.k.is_nvfp4 and tokens for impl in impls
    )
