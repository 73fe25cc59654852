"""What the bundled model's card reports: compression, copying and samples of its text."""

from __future__ import annotations

import lzma
import math

import torch
import torch.nn.functional as F
from corpus import Corpus
from tokenizer import encode
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PROMPTS = ("def read(self, n):", "import os", "class Stack:\n    def __init__(self):")
CONTEXT = 2048


def shift_right(windows: Tensor, end_of_text: int) -> Tensor:
    """The inputs that predict ``windows``: every window is read as if a text began there."""
    return F.pad(windows[:, :-1], (1, 0), value=end_of_text)


@torch.no_grad()
def nats_per_token(
    model: Qwen3ForCausalLM, ids: Tensor, end_of_text: int, overlap: int = 0
) -> Tensor:
    """What each token of a text costs, read in windows of CONTEXT tokens.

    A window is the end-of-text token and CONTEXT - 1 tokens of text.  With ``overlap``, each
    window but the first starts that many tokens early, and these are read but not counted again.
    """
    was_training = model.training
    model.eval()
    width = CONTEXT - 1
    costs = []
    done = 0
    while done < len(ids):
        start = max(0, done - overlap)
        window = ids[start : start + width].unsqueeze(0)
        logits = model(input_ids=shift_right(window, end_of_text), use_cache=False).logits
        cost = F.cross_entropy(logits[0].float(), window[0], reduction="none")
        costs.append(cost[done - start :])
        done = start + window.shape[1]
    model.train(was_training)
    return torch.cat(costs)


def measure_compression(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: dict[str, str]
) -> dict[str, object]:
    """Bits per byte of the model and of ``xz -9`` on whole files."""
    device = model.device
    end_of_text = tokenizer.eos_token_id
    files: dict[str, dict[str, float]] = {}
    totals = {"plain": 0.0, "sliding": 0.0, "xz": 0.0}
    size = 0
    for name, text in texts.items():
        raw = text.encode()
        ids = encode(tokenizer, [text])[0].to(device)
        bits = {
            "plain": nats_per_token(model, ids, end_of_text).sum().item() / math.log(2),
            "sliding": nats_per_token(model, ids, end_of_text, CONTEXT // 2).sum().item()
            / math.log(2),
            "xz": 8.0 * len(lzma.compress(raw, preset=9)),
        }
        size += len(raw)
        for key, value in bits.items():
            totals[key] += value
        files[name] = {"bytes": len(raw), "tokens": len(ids)} | {
            f"{key}_bpb": round(value / len(raw), 4) for key, value in bits.items()
        }
    joined = 8 * len(lzma.compress("".join(texts.values()).encode(), preset=9)) / size
    plain = totals["plain"] / size
    return {
        "bytes": size,
        "model_bpb": round(plain, 4),
        "model_sliding_bpb": round(totals["sliding"] / size, 4),
        "xz_per_file_bpb": round(totals["xz"] / size, 4),
        "xz_joined_bpb": round(joined, 4),
        "model_over_xz_joined": round(plain / joined, 4),
        "files": files,
    }


@torch.no_grad()
def copy_ratios(model: Qwen3ForCausalLM, texts: Tensor, length: int, end_of_text: int) -> Tensor:
    """What repeating the first ``length`` tokens of a text costs, over what they cost at first.

    Texts of ``length`` tokens are repeated at once, longer ones after a gap.
    """
    model.eval()
    ratios = []
    for text in texts.split(1):
        window = torch.cat([text, text[:, :length]], dim=1)
        logits = model(input_ids=shift_right(window, end_of_text), use_cache=False).logits
        cost = F.cross_entropy(logits[0].float(), window[0], reduction="none")
        ratios.append(cost[-length:].sum() / cost[:length].sum())
    return torch.stack(ratios)


def measure_copying(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Copy ratios over the whole held-out text, and over random tokens."""
    end_of_text = tokenizer.eos_token_id
    stream = torch.cat(encode(tokenizer, list(texts.values()))).to(model.device)
    rng = torch.Generator().manual_seed(0)
    result = {}
    for length, gap in ((250, 0), (750, 0), (1000, 0), (400, 600), (400, 1200)):
        width = length + gap
        text = stream[: len(stream) // width * width].view(-1, width)
        noise = torch.randint(1, len(tokenizer), (32, width), generator=rng).to(model.device)
        for kind, samples in (("text", text), ("random", noise)):
            ratios = copy_ratios(model, samples, length, end_of_text)
            result[f"{kind}, {length} tokens, gap {gap}"] = {
                "samples": len(ratios),
                "mean": round(ratios.mean().item(), 4),
                "worst": round(ratios.max().item(), 4),
                "share_below_0.25": round((ratios < 0.25).float().mean().item(), 4),
            }
    return result


@torch.no_grad()
def continuations(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, length: int = 96
) -> dict[str, str]:
    """Greedy samples, to look at."""
    samples = {}
    for prompt in PROMPTS:
        prompt_ids = [tokenizer.eos_token_id, *encode(tokenizer, [prompt])[0].tolist()]
        ids = torch.tensor([prompt_ids], device=model.device)
        for _ in range(length):
            logits = model(input_ids=ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        samples[prompt] = str(tokenizer.decode(ids[0, 1:]))
    return samples


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: Corpus
) -> dict[str, object]:
    """Everything the model card reports, on the weights as they ship."""
    return {
        "held_out": measure_compression(model, tokenizer, corpus.held_out),
        "validation": measure_compression(model, tokenizer, corpus.validation),
        "copying": measure_copying(model, tokenizer, corpus.held_out),
        "continuations": continuations(model, tokenizer),
    }
