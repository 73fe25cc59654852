"""4-bit experts in CUDA graphs of decode steps: the tokens of eager steps."""

from pathlib import Path
from typing import Any

import pytest

from checkpoints.folders import make_folder
from checkpoints.mxfp4_folders import make_gpt_oss
from halfbyte import load_model
from halfbyte.engine import LLM, SamplingParams
from halfbyte.moe import MxFp4Experts, NvFp4Experts
from models.zoo import token_ids

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128, "head_dim": 64}
NUM_SEQS = 4
PROMPTS = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 21)]


def make_checkpoint(name: str, folder: Path) -> Path:
    """Sizes are multiples of 32, as `cuda` needs them."""
    if name == "gpt_oss":
        return make_gpt_oss(folder)
    return make_folder(folder, "qwen3_moe", moe_intermediate_size=96, **SIZES).quantized


def generate(folder: Path, dtype: str, cuda_graphs: bool, backend: str) -> list[list[list[int]]]:
    """Greedy tokens of 4, 2 and 1 prompts. A graph of each of these batch sizes is captured, so
    that eager steps multiply matrices of the same sizes."""
    model: Any = load_model(folder, dtype=dtype, device="cuda")
    llm = LLM(
        model,
        kv_cache_dtype=dtype,
        cuda_graphs=cuda_graphs,
        torch_compile=False,  # rounds differently
        max_num_seqs=NUM_SEQS,
        max_model_len=64,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = [
        [output.token_ids for output in llm.generate(PROMPTS[:count], params)]
        for count in (NUM_SEQS, 2, 1)
    ]
    kind = MxFp4Experts if folder.parts[-2].startswith("gpt_oss") else NvFp4Experts
    layers = [layer.mlp.experts for layer in model.model.layers]
    assert all(isinstance(experts, kind) for experts in layers)
    assert [experts.kernel.name for experts in layers] == [backend] * 2
    graphs = llm.core.runner.graphs
    assert (graphs is not None) == cuda_graphs
    assert graphs is None or set(graphs._graphs) == {1, 2, NUM_SEQS}
    return found


@pytest.mark.parametrize(
    ("dtype", "backend"), [("bfloat16", "cuda"), ("float32", "triton")], ids=["cuda", "triton"]
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_graphs_give_the_tokens_of_eager_steps(
    name: str, dtype: str, backend: str, tmp_path: Path
) -> None:
    """Tokens are routed to other experts than at capture."""
    folder = make_checkpoint(name, tmp_path / name)
    with_graphs = generate(folder, dtype, True, backend)
    assert with_graphs == generate(folder, dtype, False, backend)
    assert len({tuple(tokens) for tokens in with_graphs[0]}) == NUM_SEQS
    assert all(len(set(tokens)) > 3 for tokens in with_graphs[0])
