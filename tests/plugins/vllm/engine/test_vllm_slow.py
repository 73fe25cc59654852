"""Slow tests (`make test-vllm`): several ranks, compilation, EAGLE and MTP."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.vllm_step import run_prompts
from halfbyte.kvcache import KVScales
from models.zoo import make_model, token_ids
from plugins.vllm.engine.engines import (
    BUNDLED,
    TEXTS,
    assert_ours,
    assert_same_tokens,
    generate,
    halfbyte_tokens,
    run_apart,
    varied,
    vllm_engine,
)
from plugins.vllm.engine.server import Server

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


def test_a_step_of_the_benchmark_is_without_the_prompts() -> None:
    """Steps are timed from the first token, with prompts that the cache holds and with new ones."""
    known, new = (token_ids(6, 192, seed=seed).tolist() for seed in (1, 2))
    with vllm_engine(disable_log_stats=False, enable_prefix_caching=True) as llm:
        assert_ours(llm, "nvfp4")
        run_prompts(llm, known, 2)
        for prompts in (known, new):
            seconds, step = run_prompts(llm, prompts, 65)
            assert 0.5 * seconds < 64 * step < seconds
        seconds, step = run_prompts(llm, token_ids(6, 192, seed=3).tolist(), 2)
        assert 0 < 2 * step < seconds


def test_data_parallel_gives_the_same_tokens(tmp_path: Path) -> None:
    """Two engines behind one server."""
    environment: dict[str, str | None] = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    ranks = "--data-parallel-size", "2"
    server = Server(BUNDLED, *ranks, log=tmp_path / "log", environment=environment)
    try:
        server.wait_until_up()
        with ThreadPoolExecutor(len(TEXTS)) as pool:
            found = list(pool.map(lambda text: server.complete(text, 64), TEXTS))
        generated = [
            float(line.split()[-1])
            for line in server.get("/metrics")[1].splitlines()
            if line.startswith("vllm:generation_tokens_total")
        ]
    finally:
        server.kill()
    expected = halfbyte_tokens(BUNDLED, TEXTS, kv_recipe="balanced")
    assert_same_tokens(found, expected, TEXTS, BUNDLED, kv_recipe="balanced")
    assert len(generated) == 2
    assert min(generated) > 0


def test_compiled_gives_the_same_tokens(tokens: list[list[int]]) -> None:
    with vllm_engine(enforce_eager=False) as llm:
        assert_ours(llm, "nvfp4")
        assert generate(llm, TEXTS) == tokens


def make_eagle(folder: Path) -> KVScales:
    """A random EAGLE head for the bundled model, and scales of its only layer."""
    target = json.loads((Path(BUNDLED) / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    others = ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings")
    config = {name: target[name] for name in (*sizes, *others)}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"num_hidden_layers": 1, "hidden_act": "silu", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED) / name, folder)
    width, kv_width = (n * config["head_dim"] for n in (heads, config["num_key_value_heads"]))
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (width, hidden),
        "layers.0.self_attn.k_proj": (kv_width, hidden),
        "layers.0.self_attn.v_proj": (kv_width, hidden),
        "layers.0.self_attn.o_proj": (hidden, width),
        "layers.0.mlp.gate_proj": (config["intermediate_size"], hidden),
        "layers.0.mlp.up_proj": (config["intermediate_size"], hidden),
        "layers.0.mlp.down_proj": (hidden, config["intermediate_size"]),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors")
    return KVScales((30.0,), (30.0,), "test")


def test_eagle_changes_no_token(tokens: list[list[int]], tmp_path: Path) -> None:
    """Nearly all of its drafts are rejected, and must have no effect."""
    (tmp_path / "head").mkdir()
    scales = make_eagle(tmp_path / "head").save(tmp_path)
    draft = {
        "method": "eagle",
        "model": str(tmp_path / "head"),
        "num_speculative_tokens": 3,
        "attention_backend": "CUSTOM",
    }
    options = {"kv_recipe": "plain", "draft_kv_scales": str(scales)}
    found, counted = run_apart(
        TEXTS, speculative_config=draft, additional_config={"halfbyte": options}
    )
    assert found == tokens
    assert counted["vllm:spec_decode_num_draft_tokens"] > 100


def make_mimo(folder: Path) -> tuple[Path, Path]:
    """A random MiMo (Qwen2 with one layer that predicts a second token), and KV scales of each."""
    model = make_model("qwen2")
    model.config.architectures = ["MiMoForCausalLM"]
    model.config.num_nextn_predict_layers = 1
    model.config.save_pretrained(folder)
    weights = {name: x.contiguous() for name, x in model.state_dict().items()}
    hidden, first = model.config.hidden_size, "model.layers.0."
    for name in [name for name in weights if name.startswith(first)]:
        weights["model.mtp_layers.0." + name.removeprefix(first)] = weights[name].clone()
    added = "model.mtp_layers.0."
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{added}{name}.weight"] = torch.ones(hidden)
    generator = torch.Generator().manual_seed(1)
    projection = torch.randn((hidden, 2 * hidden), generator=generator)
    weights[f"{added}input_proj.weight"] = projection * hidden**-0.5
    save_file(weights, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED) / name, folder)
    layers = model.config.num_hidden_layers
    target = KVScales((30.0,) * layers, (30.0,) * layers, "test").save(folder)
    (folder / "draft").mkdir()
    return target, KVScales((20.0,), (20.0,), "test").save(folder / "draft")


def test_mtp_changes_no_token(tmp_path: Path) -> None:
    """A layer inside the target's checkpoint, with scales of its own."""
    target, draft = make_mimo(tmp_path)
    prompts = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60, 81)]
    given: dict[str, Any] = {
        "kv_recipe": "plain",
        "kv_scales": str(target),
        "draft_kv_scales": str(draft),
    }
    options: dict[str, Any] = {"model": str(tmp_path), "max_model_len": 200}
    with vllm_engine(**options, additional_config={"halfbyte": given}) as llm:
        assert_ours(llm, "nvfp4")
        expected = generate(llm, prompts)
    assert varied(expected)
    drafts = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CUSTOM"}
    options |= {"speculative_config": drafts}
    found, counted = run_apart(prompts, **options, additional_config={"halfbyte": given})
    assert found == expected
    assert counted["vllm:spec_decode_num_draft_tokens"] > 100
    del given["draft_kv_scales"]
    with (
        pytest.raises(ValueError, match=r"draft layer 0 of .* has no KV cache scales"),
        vllm_engine(**options, additional_config={"halfbyte": given}),
    ):
        pass
