"""vLLM and halfbyte's engine on the same prompts."""

import gc
import os
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import halfbyte
from halfbyte.assets import bundled_model_path
from halfbyte.engine.prompts import encode
from halfbyte.plugins.vllm.attention import HalfbyteAttentionImpl
from halfbyte.plugins.vllm.moe_method import HalfbyteMoeMethod
from halfbyte.plugins.vllm.registry import has_page_specs

needs_page_specs = pytest.mark.skipif(
    not has_page_specs(), reason="this vLLM does not let a backend say what a page is"
)
BUNDLED = str(bundled_model_path())
NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
"""Drafts from the prompt."""
CACHE_BYTES = 2**27
"""Of an engine's cache, which is filled with zeros at start: vLLM takes much more by default."""

# Prompts that the bundled model continues without repeating itself.
TEXTS = (
    "    def __init__(self, msg=''):\n        self.message = msg\n        Exception.__init__(",
    "    def is_active(self):\n        # True if more progress can be made and False otherwise",
    "t in the current tournament (because the value wins over\nthe last output value), it ",
    "    def __init__(self, *, skipkeys=False, ensure_ascii=True,\n            check_circular=",
    "    def punctuation_chars(self):\n        return self._punctuation_chars\n\n    def push",
    "    def sourcehook(self, newfile):\n        # Hook called on a filename to be sourced.",
)
ROTATED = ["".join(TEXTS[n:] + TEXTS[:n]) * 2 for n in range(len(TEXTS))]
"""Prompts of some 280 tokens with different beginnings."""


@contextmanager
def vllm_engine(
    model: str | Path = BUNDLED, *, kv_recipe: str | None = "plain", **options: Any
) -> Iterator[Any]:
    """A `vllm.LLM` in this process, eager, float32 and with our backend unless told otherwise.

    Args:
        kv_recipe: unless the additional config has one; None for the plug-in's default.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers import rotary_embedding

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_dtype": "nvfp4",
        "attention_backend": "CUSTOM",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": CACHE_BYTES,
    }
    options = {**defaults, **options}
    options = {name: value for name, value in options.items() if value is not None}
    section = (options.get("additional_config") or {}).get("halfbyte", {})
    if kv_recipe is not None and options.get("attention_backend") == "CUSTOM":
        options["additional_config"] = {"halfbyte": {"kv_recipe": kv_recipe, **section}}
    llm = None
    try:
        llm = LLM(str(model), **options)
        yield llm
    finally:
        # Shut down now, not with the last reference: the parallel groups are global to the process.
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        else:
            # Of an engine that did not start: the next one would use its layers, as compiled ones.
            rotary_embedding._ROPE_DICT.clear()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def without(folder: Path, tensor: str) -> Path:
    """The folder, after removing the only tensor of its file whose name ends with `tensor`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (missing,) = [name for name in tensors if name.endswith(tensor)]
    del tensors[missing]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def allow_float32(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's 4-bit layers run in float32 (vLLM allows only 16 bits), which equality needs."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    for config in (ModelOptNvFp4Config, CompressedTensorsConfig, GptOssMxfp4Config):
        patch.setattr(config, "get_supported_act_dtypes", lambda *_: dtypes)


def layers_of(llm: Any) -> dict[str, Any]:
    """vLLM's attention layers by name."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    context: dict[str, Any] = runner.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "kv_cache_dtype")}


def assert_ours(llm: Any, kv_cache_dtype: str | None = None) -> list[HalfbyteAttentionImpl]:
    """Assert that every layer runs on halfbyte's backend and stores the expected format.

    Returns:
        The layers' attention implementations, in order.
    """
    layers = layers_of(llm)
    assert layers
    for name, layer in layers.items():
        assert isinstance(layer.impl, HalfbyteAttentionImpl), f"{name}: {type(layer.impl)}"
        if kv_cache_dtype is not None:
            assert layer.impl.format.k == layer.impl.format.v == kv_cache_dtype, name
    return [layer.impl for layer in layers.values()]


def assert_our_experts(llm: Any, backend: str, weight_format: str) -> None:
    """Assert that the experts of every layer run on halfbyte's kernels."""
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.model
    modules = [m for m in model.modules() if type(m).__name__.endswith("RoutedExperts")]
    assert len(modules) == model.config.num_hidden_layers
    for method in (module.quant_method for module in modules):
        assert isinstance(method, HalfbyteMoeMethod)
        assert method.kernel is not None
        found = method.kernel.name, method.kernel.config.weight_format
        assert found == (backend, weight_format)


def generate(
    llm: Any, prompts: Sequence[Any], max_tokens: int = 64, temperature: float = 0.0
) -> list[list[int]]:
    """Tokens of texts or lists of token ids, greedy or sampled by a fixed seed."""
    return tokens_of(outputs_of(llm, prompts, max_tokens, temperature))


def outputs_of(
    llm: Any, prompts: Sequence[Any], max_tokens: int = 64, temperature: float = 0.0
) -> list[Any]:
    """vLLM's outputs for `generate`."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=1 if temperature else None,
        ignore_eos=True,
        detokenize=False,
    )
    asked = [p if isinstance(p, str) else {"prompt_token_ids": list(p)} for p in prompts]
    outputs: list[Any] = llm.generate(asked, params, use_tqdm=False)
    return outputs


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    """Tokens of vLLM's outputs."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def example_connector(folder: Path) -> dict[str, Any]:
    """The configuration of vLLM's KV connector that keeps pages in a folder."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def metrics(llm: Any) -> dict[str, float]:
    """vLLM's counters by name."""
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}


def run_apart(
    prompts: Sequence[Any],
    *,
    in_process: bool = True,
    max_tokens: int = 64,
    experts: bool = False,
    **options: Any,
) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens and counters of an engine in a separate process.

    For engines that prevent vLLM from starting another one in the process, and engines of several
    processes.

    Args:
        in_process: whether the engine runs in that process, so that its layers can be inspected.
        max_tokens: of each output.
        experts: whether the model has 4-bit experts, which halfbyte's kernels must run.
        options: of `vllm_engine`.
    """
    arguments = list(prompts), in_process, max_tokens, experts, options
    context: Any = get_context("spawn")
    if in_process and not torch.cuda.is_available():
        # Forks of a process that has imported vLLM, which takes ten seconds.
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, "vllm.v1.engine.llm_engine"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_run_apart, dict(os.environ), *arguments).result()


def _run_apart(
    environment: dict[str, str],
    prompts: list[Any],
    in_process: bool,
    max_tokens: int,
    experts: bool,
    options: dict[str, Any],
) -> tuple[list[list[int]], dict[str, float]]:
    os.environ.update(environment)
    # Allows pickled functions for the workers, which are local.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    allow_float32(pytest.MonkeyPatch())
    expected = {HalfbyteAttentionImpl.__name__} | ({_EXPERTS} if experts else set())
    with vllm_engine(**options, disable_log_stats=False) as llm:
        if in_process:
            assert_ours(llm)
        else:
            kinds = llm.collective_rpc(_kinds_of_layers)
            assert {kind for rank in kinds for kind in rank} == expected
        return generate(llm, prompts, max_tokens), metrics(llm)


_EXPERTS = HalfbyteMoeMethod.__name__


def _kinds_of_layers(worker: Any) -> list[str]:
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    kinds = [type(layer.impl).__name__ for layer in layers if hasattr(layer, "kv_cache_dtype")]
    methods = [x.routed_experts.quant_method for x in layers if hasattr(x, "routed_experts")]
    return kinds + [
        _EXPERTS if isinstance(method, HalfbyteMoeMethod) else type(method).__name__
        for method in methods
    ]


def halfbyte_engine(folder: str | Path, **options: Any) -> halfbyte.LLM:
    """`halfbyte.LLM` in float32, recipe `plain` unless told otherwise, without a tokenizer where
    the folder has none."""
    options = {"kv_cache_dtype": "nvfp4", "kv_recipe": "plain", **options}
    if (Path(folder) / "tokenizer.json").is_file():
        return halfbyte.LLM(folder, dtype="float32", **options)
    return halfbyte.LLM(halfbyte.load_model(folder, dtype="float32"), **options)


def halfbyte_tokens(
    model: str | Path, prompts: Sequence[Any], max_tokens: int = 64, **options: Any
) -> list[list[int]]:
    """As `generate`, by `halfbyte.LLM`."""
    llm = halfbyte_engine(model, **options)
    params = halfbyte.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [output.token_ids for output in llm.generate(list(prompts), params)]


def assert_same_tokens(
    found: list[list[int]],
    expected: list[list[int]],
    prompts: Sequence[Any],
    model: str | Path,
    **options: Any,
) -> None:
    """Assert equal tokens, except for at most one sequence that diverges at a near-tie of logits.

    K of the two engines differs by rounding, so it may get other codes. If two tokens are about as
    likely for `halfbyte.LLM`, each engine may choose another one, depending on the CPU. With a
    wrong cache most sequences would diverge, and not at ties.
    """
    assert varied(expected), "an output that could not tell right from wrong"
    differ = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    assert len(differ) <= 1, f"sequences {differ} differ"
    for i in differ:
        at = next(j for j, (a, b) in enumerate(zip(found[i], expected[i], strict=True)) if a != b)
        logits = halfbyte_logits(model, prompts[i], expected[i][:at], **options)
        gap = float(logits[expected[i][at]] - logits[found[i][at]])
        assert gap < 0.1, f"sequence {i} differs from token {at} on, where logits are {gap} apart"


def assert_same_but_one(found: list[list[int]], expected: list[list[int]]) -> None:
    """Assert equal tokens but for one sequence: steps of other numbers of tokens round differently,
    so that a near-tie may go the other way."""
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1


def halfbyte_logits(
    model: str | Path, prompt: Any, output: list[int], **options: Any
) -> torch.Tensor:
    """Logits of `halfbyte.LLM` after a prompt and some tokens."""
    llm = halfbyte_engine(model, **options)
    ids = encode(llm.tokenizer, prompt) + output
    llm.core.tables.add("check")
    llm.core.tables.append("check", len(ids))
    return llm.core.runner.run([("check", ids)])[0].float()


def tokens_after_hits(
    model: str | Path, prompts: Sequence[str], hits: Sequence[int], max_tokens: int, **options: Any
) -> list[list[int]]:
    """Greedy tokens of `halfbyte.LLM`; a prompt's first `hits` tokens are in pages only."""
    llm = halfbyte_engine(model, **options)
    tables, run = llm.core.tables, llm.core.runner.run
    results = []
    for prompt, hit in zip(prompts, hits, strict=True):
        ids, tokens = encode(llm.tokenizer, prompt), []
        tables.add("it")
        if hit:
            tables.append("it", hit)
            run([("it", ids[:hit])])
            pages = tables.move_out("it")
            tables.move_in("it", replace(pages, recent=([], 0)))
        chunk = ids[hit:]
        for _ in range(max_tokens):
            tables.append("it", len(chunk))
            chunk = [int(run([("it", chunk)])[0].argmax())]
            tokens += chunk
        tables.free("it")
        results.append(tokens)
    return results


def varied(tokens: Sequence[Sequence[Hashable]]) -> bool:
    """Whether outputs are varied enough for a comparison: all different, at most one in a loop.

    Args:
        tokens: by prompt and step; also with their log-probabilities.
    """
    loops = [t for t in tokens if len(set(t)) <= 6]
    return len({tuple(t) for t in tokens}) == len(tokens) and len(loops) <= 1
