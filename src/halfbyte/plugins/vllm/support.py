"""Supported features per vLLM version, and how each was verified: the table of docs/vllm.md.

python -m halfbyte.plugins.vllm.support      prints it
"""

from typing import NamedTuple

from halfbyte.plugins.vllm.checks import WHOLE_BLOCK_CONNECTORS
from halfbyte.plugins.vllm.options import CACHE_DTYPES, NEWER_CACHE_DTYPES

TESTED, SEEN, PARTLY = "tested", "seen", "in part"
UNTRIED, REFUSED, ABSENT = "not run", "refused", "-"
LEGEND = {
    TESTED: "by `make test` or `make test-vllm`",
    SEEN: "run by hand, by `make test-vllm-0.24` or with the GPU tests",
    PARTLY: "some of it run by hand",
    UNTRIED: "no problem is known",
    REFUSED: "an error at start that says so",
    ABSENT: "vLLM has it on GPUs only",
}
COLUMNS = ("0.24, CPU", "0.24, GPU", "0.32, CPU", "0.32 and 0.33, GPU")


class Feature(NamedTuple):
    """A row: how the feature was verified in each of `COLUMNS`, and its test."""

    name: str
    known: tuple[str, str, str, str]
    test: str | None = None


FEATURES = (
    Feature(
        f"cache dtypes {', '.join(f'`{name}`' for name in CACHE_DTYPES)}",
        (PARTLY, PARTLY, TESTED, UNTRIED),
        "test_vllm_equality.py::test_other_formats_equal_halfbyte_s_engine",
    ),
    Feature(
        f"{', '.join(f'`{name}`' for name in NEWER_CACHE_DTYPES)}",
        (REFUSED, REFUSED, TESTED, UNTRIED),
        "test_vllm_equality.py::test_other_formats_equal_halfbyte_s_engine",
    ),
    Feature(
        "K and V of different formats, `mxfp4`, `fp4_block16` (`k_dtype`, `v_dtype`)",
        (REFUSED, REFUSED, TESTED, UNTRIED),
        "test_vllm_models.py::test_k_and_v_of_different_formats",
    ),
    Feature(
        "recipe `balanced` (`kv_recipe`)",
        (SEEN, PARTLY, TESTED, UNTRIED),
        "test_vllm_recipes.py::test_balanced_equals_halfbyte_s_engine",
    ),
    Feature(
        "its last tokens in 16 bits, where supported ([below](#the-last-tokens))",
        (SEEN, SEEN, TESTED, UNTRIED),
        "test_vllm_recipes.py::test_balanced_equals_halfbyte_s_engine",
    ),
    Feature(
        "sliding windows, hybrid models, soft-cap",
        (SEEN, PARTLY, TESTED, UNTRIED),
        "test_vllm_models.py::test_nvfp4_equals_halfbyte_s_engine",
    ),
    Feature(
        "attention sinks (GPT-OSS)",
        (UNTRIED, SEEN, TESTED, UNTRIED),
        "test_vllm_models.py::test_nvfp4_equals_halfbyte_s_engine",
    ),
    Feature(
        "layers left unquantized (`kv_cache_dtype_skip_layers`)",
        (REFUSED, REFUSED, TESTED, UNTRIED),
        "test_vllm_models.py::test_sliding_layers_may_stay_unquantized",
    ),
    Feature(
        "chunked prefill, prefix caching, preemption",
        (SEEN, PARTLY, TESTED, UNTRIED),
        "test_vllm_equality.py::test_preemption_changes_no_token",
    ),
    Feature(
        "speculative decoding: ngram",
        (UNTRIED, SEEN, TESTED, UNTRIED),
        "test_vllm_equality.py::test_drafts_from_the_prompt_change_no_token",
    ),
    Feature(
        "speculative decoding: draft models",
        (UNTRIED, UNTRIED, TESTED, UNTRIED),
        "test_vllm_equality.py::test_a_draft_model_has_scales_of_its_own",
    ),
    Feature(
        "speculative decoding: EAGLE",
        (UNTRIED, UNTRIED, TESTED, UNTRIED),
        "test_vllm_slow.py::test_eagle_changes_no_token",
    ),
    Feature(
        "speculative decoding: MTP",
        (UNTRIED, UNTRIED, TESTED, UNTRIED),
        "test_vllm_slow.py::test_mtp_changes_no_token",
    ),
    Feature(
        "batch invariance (`VLLM_BATCH_INVARIANT=1`)",
        (UNTRIED, SEEN, UNTRIED, UNTRIED),
        "test_vllm_gpu.py::test_batch_invariance",
    ),
    Feature(
        "full and piecewise CUDA graphs, model runners V1 and V2",
        (ABSENT, SEEN, ABSENT, UNTRIED),
        "test_vllm_gpu.py::test_graphs_equal_eager_in_float32",
    ),
    Feature(
        "`torch.compile`",
        (UNTRIED, SEEN, TESTED, UNTRIED),
        "test_vllm_slow.py::test_compiled_gives_the_same_tokens",
    ),
    Feature(
        "tensor parallel",
        (UNTRIED, SEEN, TESTED, UNTRIED),
        "test_vllm_slow.py::test_tensor_parallel_gives_the_same_tokens",
    ),
    Feature(
        "pipeline parallel",
        (UNTRIED, SEEN, UNTRIED, UNTRIED),
        "test_vllm_gpu.py::test_two_gpus_give_the_same_tokens",
    ),
    Feature(
        "data parallel",
        (UNTRIED, UNTRIED, TESTED, UNTRIED),
        "test_vllm_slow.py::test_data_parallel_gives_the_same_tokens",
    ),
    Feature("several nodes", (UNTRIED,) * 4),
    Feature(
        "NVFP4 weights: ModelOpt, compressed-tensors; parts with scales of their own",
        (SEEN, PARTLY, TESTED, UNTRIED),
        "test_vllm_weights.py::test_quantized_checkpoints_equal_halfbyte_s_engine",
    ),
    Feature(
        "4-bit experts: NVFP4 of ModelOpt and compressed-tensors, GPT-OSS's MXFP4 (`moe`)",
        (SEEN, SEEN, TESTED, UNTRIED),
        "test_vllm_moe.py::test_experts_equal_halfbyte_s_engine",
    ),
    Feature(
        "tensor and expert parallel with 4-bit experts",
        (SEEN, SEEN, TESTED, UNTRIED),
        "test_vllm_moe.py::test_two_ranks_give_the_same_tokens",
    ),
    Feature(
        "KV connectors that keep whole blocks in files (`ExampleConnector`)",
        (REFUSED, REFUSED, TESTED, UNTRIED),
        "test_vllm_equality.py::test_a_connector_brings_back_whole_blocks",
    ),
    Feature(
        "whole blocks offloaded to the host by vLLM (`OffloadingConnector`)",
        (ABSENT, SEEN, ABSENT, UNTRIED),
    ),
    Feature(
        "K and V of different head sizes (MiMo-V2)",
        (REFUSED, REFUSED, TESTED, UNTRIED),
        "test_vllm_head_sizes.py::test_v_is_smaller_than_k",
    ),
    Feature(
        "pages in an LMCache server (`LMCacheMPConnector`)",
        (REFUSED, REFUSED, TESTED, UNTRIED),
        "test_vllm_lmcache.py::test_pages_come_back_from_lmcache",
    ),
    Feature("other connectors that move whole blocks", (UNTRIED,) * 4),
    Feature(
        "other KV connectors",
        (REFUSED,) * 4,
        "test_vllm_limits.py::test_wrong_use_is_one_clear_error_at_start",
    ),
    Feature("MLA, encoders, decode and prefill context parallel, ALiBi", (REFUSED,) * 4),
)


def table() -> str:
    """The table in Markdown."""
    rows = [
        "| | " + " | ".join(f"vLLM {column}" for column in COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    rows += [f"| {feature.name} | " + " | ".join(feature.known) + " |" for feature in FEATURES]
    legend = "; ".join(f"*{word}*: {meaning}" for word, meaning in LEGEND.items())
    connectors = ", ".join(f"`{name}`" for name in WHOLE_BLOCK_CONNECTORS)
    hardware = "GPUs were H100 and H200, CPUs x86"
    return "\n".join([*rows, "", f"{legend}. {hardware}. Whole blocks are moved by {connectors}."])


if __name__ == "__main__":
    print(table())
