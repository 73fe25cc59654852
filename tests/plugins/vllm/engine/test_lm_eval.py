"""lm-eval on vLLM with halfbyte's cache: scores show quantized K and V, and are close."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plugins.vllm.engine.server import ENVIRONMENT

pytest.importorskip("lm_eval", reason="lm-eval is not installed in this environment")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
TASKS = Path(__file__).parent / "lm_eval_task"
TASK = "halfbyte_continuations"


def lm_eval(folder: Path, kv_cache_dtype: str, kv_recipe: str) -> tuple[float, list[list[float]]]:
    """Accuracy, and the loglikelihoods of every sample's choices."""
    from halfbyte.assets import bundled_model_path

    model_args = {
        "pretrained": str(bundled_model_path()),
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "attention_backend": "CUSTOM",
        "kv_cache_dtype": kv_cache_dtype,
        "additional_config": {"halfbyte": {"kv_recipe": kv_recipe}},
    }
    out = folder / f"{kv_cache_dtype}_{kv_recipe}"
    command = [sys.executable, "-P", "-m", "halfbyte.plugins.vllm.run", "lm_eval"]
    options = {
        "model": "vllm",
        "model_args": model_args,
        "include_path": str(TASKS),
        "tasks": [TASK],
        "batch_size": "auto",
        "output_path": str(out),
        "log_samples": True,
    }
    file = folder / f"{out.name}.yaml"
    file.write_text(json.dumps(options))
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
    }
    result = subprocess.run(
        [*command, "run", "--config", str(file)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    [results], [samples] = (list(out.rglob(f"{kind}_*")) for kind in ("results", "samples"))
    accuracy: Any = json.loads(results.read_text())["results"][TASK]["acc,none"]
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows.sort(key=lambda row: int(row["doc_id"]))
    return accuracy, [[float(answer[0]) for answer in row["filtered_resps"]] for row in rows]


def test_quantized_scores_differ_and_are_close(tmp_path: Path) -> None:
    exact_accuracy, exact = lm_eval(tmp_path, "auto", "plain")
    accuracy, quantized = lm_eval(tmp_path, "nvfp4", "plain")
    _, balanced = lm_eval(tmp_path, "nvfp4", "balanced")
    assert len(exact) == len(quantized) == 44
    pairs = pairs_of(exact, quantized)
    # They come from different logits,
    assert sum(abs(a - b) > 0.01 for a, b in pairs) > 0.9 * len(pairs)
    # all are nearly as likely,
    differences = [abs(a - b) / abs(a) for a, b in pairs]
    assert sum(differences) / len(differences) < 0.03
    assert max(differences) < 0.2
    # and likely choices stay likely.
    sums = [sum(side) for side in zip(*pairs, strict=True)]
    assert sums[1] / sums[0] == pytest.approx(1, abs=0.02)
    assert abs(accuracy - exact_accuracy) <= 3 / 44
    # The recipe comes closer.
    closer = [abs(a - b) / abs(a) for a, b in pairs_of(exact, balanced)]
    assert 0 < sum(closer) < 0.5 * sum(differences)


def pairs_of(exact: list[list[float]], other: list[list[float]]) -> list[tuple[float, float]]:
    """The loglikelihoods of the same choices in two runs."""
    return [
        pair for choices in zip(exact, other, strict=True) for pair in zip(*choices, strict=True)
    ]
