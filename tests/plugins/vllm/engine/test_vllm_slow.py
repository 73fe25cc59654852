"""What takes longer: two ranks, compilation, and EAGLE. `make test-vllm`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.kvcache import KVScales
from plugins.vllm.engine.engines import (
    BUNDLED,
    TEXTS,
    assert_ours,
    generate,
    run_apart,
    vllm_engine,
)

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
    """Its drafts are nearly all rejected, and leave no trace."""
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
