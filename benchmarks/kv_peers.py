"""Other projects' KV cache schemes on the same tensors: loss on a real model, JSON and a table.

    python -m benchmarks.kv_peers FOLDER [--model SmolLM2-135M-Instruct] [--tokens 1024]

Each scheme of `peers/kv_schemes.py` rounds K and V of every layer in the model's own attention, in
float32; loss and KL divergence are relative to the unrounded model. A window is one forward pass.
A scheme rounds a token by earlier tokens only, or together with its group of tokens, which in
decoding it would keep unquantized until the group is full. halfbyte's own recipes, measured with
packed pages, are in `kv_recipes.json`.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from benchmarks.pages import put_table
from benchmarks.peers.kv_schemes import SCHEMES, Calibration, Scheme
from benchmarks.provenance import provenance
from benchmarks.real_models import MODELS, model_folder, windows_of_texts
from halfbyte import load_model
from halfbyte.assets import calibration_text
from halfbyte.models import load_tokenizer
from halfbyte.numerics.hadamard import hadamard

RESULT = Path(__file__).parent / "results" / "kv_peers.json"
PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
TABLE = "kv-peers"
WINDOW, CALIBRATION_TOKENS = 1024, 2048
_NAME = "kv_peers"


@dataclass
class _Layer:
    """Calibrations of a layer: of K unchanged, rotated, centred; of V unchanged, centred."""

    k: dict[str, Calibration]
    v: dict[str, Calibration]


class Rounded:
    """A model whose attention reads K and V rounded by a scheme.

    Args:
        model: float32, of an architecture with full attention in every layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.scheme: Scheme | None = None
        self._layers: dict[int, _Layer] = {}
        self._calibrates = False
        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
        model.set_attn_implementation(_NAME)

    def calibrate(self, ids: torch.Tensor) -> None:
        """Measure amax and means on a text, `[1, tokens]`."""
        self._calibrates, self.scheme = True, None
        self.model(ids, use_cache=False, logits_to_keep=1)
        self._calibrates = False

    def log_probabilities(self, ids: torch.Tensor, scheme: Scheme | None) -> torch.Tensor:
        """float32 `[tokens, vocabulary]` of a window `[1, tokens]`; None rounds nothing."""
        self.scheme = scheme
        logits: torch.Tensor = self.model(ids, use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """`[1, tokens, heads, D]` of `[1, heads, tokens, D]`, causal."""
        k, v = key[0].float(), value[0].float()
        if self._calibrates:
            self._layers[module.layer_idx] = _Layer(_calibrations(k), _calibrations(v))
        if self.scheme is None:
            return _attention(query[0], (k, k), (v, v), scaling, sliding_window, 0), None
        layer, scheme = self._layers[module.layer_idx], self.scheme
        way = "affine" if "affine" in scheme.name else "plain"
        read_k = scheme.k(k, layer.k["rotated" if scheme.rotates_k else way])
        read_v = scheme.v(v, layer.v[way])
        out = _attention(
            query[0], (read_k, k), (read_v, v), scaling, sliding_window, scheme.residual
        )
        return out, None


def _calibrations(x: torch.Tensor) -> dict[str, Calibration]:
    """Calibrations with amax doubled, the same headroom as halfbyte's."""
    mean = x.mean(1, keepdim=True)
    ways = {"plain": x, "rotated": hadamard(x), "affine": x - mean}
    return {name: Calibration(2 * float(y.abs().max()), mean) for name, y in ways.items()}


def _attention(
    query: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
    window: int | None,
    residual: int,
) -> torch.Tensor:
    """`[1, tokens, heads, D]`.

    Args:
        keys, values: rounded and exact `[kv_heads, tokens, D]`; the exact ones are used for the
            `residual` tokens nearest to a query.
    """
    group, tokens = query.shape[0] // keys[0].shape[0], query.shape[1]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    near = distance < residual
    (k, exact_k), (v, exact_v) = (
        [x.repeat_interleave(group, 0) for x in pair] for pair in (keys, values)
    )
    scores = query.float() @ k.transpose(1, 2) * scaling
    if residual:
        scores = torch.where(near, query.float() @ exact_k.transpose(1, 2) * scaling, scores)
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    if residual:
        out = weights.masked_fill(near, 0) @ v + weights.masked_fill(~near, 0) @ exact_v
    else:
        out = weights @ v
    return out.transpose(0, 1)[None].to(query.dtype)


def measure(folder: Path, name: str, tokens: int) -> list[dict[str, Any]]:
    """Every scheme on a model, window by window."""
    path = model_folder(folder, name)
    tokenizer = load_tokenizer(path)
    model = Rounded(load_model(path, dtype="float32", device="cpu"))
    ids = tokenizer(calibration_text(), return_tensors="pt").input_ids[:, :CALIBRATION_TOKENS]
    model.calibrate(ids)
    windows = windows_of_texts(folder, tokenizer, WINDOW, tokens)
    sums = {scheme.name: [0.0, 0.0, 0.0] for scheme in SCHEMES}
    nll, count = 0.0, 0
    for window in windows:
        row = torch.tensor([list(window)])
        expected, targets = model.log_probabilities(row, None)[:-1], row[0, 1:, None]
        nll -= float(expected.gather(1, targets).double().sum())
        count += len(targets)
        for scheme in SCHEMES:
            found = model.log_probabilities(row, scheme)[:-1]
            total = sums[scheme.name]
            total[0] -= float(found.gather(1, targets).double().sum())
            total[1] += float((expected.exp() * (expected - found)).double().sum())
            total[2] += int((found.argmax(-1) == expected.argmax(-1)).sum())
    return [
        {
            "scheme": scheme.name,
            "bits": scheme.bits,
            "source": scheme.source,
            "residual_tokens": scheme.residual,
            "nll_increase_relative": sums[scheme.name][0] / nll - 1,
            "kl_divergence": sums[scheme.name][1] / count,
            "top1": sums[scheme.name][2] / count,
            "tokens": count,
        }
        for scheme in SCHEMES
    ]


def table(report: dict[str, Any]) -> str:
    """Markdown, sorted by distance from the unrounded model."""
    lines = ["| | bits | change in NLL | KL | top-1 agreement |", "|---|---:|---:|---:|---:|"]
    for rows in report["models"].values():
        for row in sorted(rows, key=lambda row: row["kl_divergence"]):
            lines.append(
                f"| {row['scheme']} | {row['bits']:g} | {row['nll_increase_relative']:+.2%} "
                f"| {row['kl_divergence']:.4f} | {row['top1']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, write JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the model and the texts")
    parser.add_argument("--model", choices=list(MODELS), default="SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    with torch.inference_mode():
        rows = measure(arguments.folder, arguments.model, arguments.tokens)
    report = {
        **provenance(torch.device("cpu")),
        "window": WINDOW,
        "models": {arguments.model: rows},
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    put_table(PAGE, TABLE, table(report))
    print(table(report))


if __name__ == "__main__":
    main()
