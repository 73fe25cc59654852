"""Train halfbyte's bundled model: a small Qwen3 that knows Python's standard library.

The model exists so that everything in halfbyte can be tried, tested and measured offline on real
attention rather than on random weights: an ordinary pre-norm transformer with grouped-query
attention, QK norm and RoPE, small enough to ship in the package.  Run it as::

    python dev/bundled_model/train.py --stdlib /usr/lib/python3.11 --out bundled

and ``--out`` receives a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load, with
``training.json`` (the recipe and everything measured) beside the weights.  The shipped weights
took a few minutes on one H200; ``--steps 20 --hidden-size 64 --layers 2 --batch-size 2`` is a
smoke test for a laptop.

Three things in here are worth knowing before changing them:

* There is far less text than a model of this size would like (about 8 M tokens), so the run makes
  many passes over it and the enemy is overfitting: every pass re-orders the files and cuts them
  at other offsets, and dropout acts on the residual branches.
* A share of the windows has one stretch of text copied to a later place.  Source code repeats
  itself, but rarely verbatim over hundreds of tokens; the copies teach the model to look far back
  in its cache, which is the ability a KV cache format must not damage.
* Weights are measured after rounding to bfloat16, the precision they ship in.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import load_corpus
from measurements import CONTEXT, measure, nats_per_token, shift_right
from tokenizer import encode, train_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

IGNORED = -100  # the label that cross_entropy skips


@dataclass(frozen=True)
class Recipe:
    """Every choice that shapes the trained weights; the defaults made the shipped ones."""

    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 10
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp_size: int = 704
    steps: int = 3200
    batch_size: int = 32
    warmup: int = 200
    lr: float = 6e-3
    weight_decay: float = 0.5
    dropout: float = 0.2
    copy_share: float = 0.2
    seed: int = 0


def build_model(recipe: Recipe, end_of_text: int) -> Qwen3ForCausalLM:
    """An untrained model; GPT-2's initialisation, with the residual branches scaled down."""
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.mlp_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    # No pad_token_id: the embedding would give that token, which opens every window, no gradient.
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(1 / math.sqrt(2 * recipe.layers))
    return model


def add_dropout(model: Qwen3ForCausalLM, probability: float) -> None:
    """Drop out the embedding and what every attention and MLP block adds to the residual stream.

    Qwen3 has no such dropout of its own.  Hooks leave the parameter names, and hence the
    checkpoint, as they are, and do nothing once the model is in eval mode.
    """

    def drop(module: nn.Module, _: object, output: Tensor) -> Tensor:
        return F.dropout(output, probability, training=module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def build_optimizers(model: nn.Module, recipe: Recipe, fused: bool) -> list[torch.optim.Optimizer]:
    """Muon for the weight matrices of the layers, AdamW for the embedding and the norms."""
    matrices, embeddings, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif "embed" in name:
            embeddings.append(parameter)
        else:
            matrices.append(parameter)
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": embeddings, "weight_decay": recipe.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=recipe.lr,
            betas=(0.9, 0.95),
            fused=fused,
        ),
    ]


def batches(
    files: list[Tensor], end_of_text: int, recipe: Recipe, rng: torch.Generator
) -> Iterator[Tensor]:
    """Endless batches of windows, shape (batch_size, CONTEXT).

    Each pass over the files shuffles them, joins them with the end-of-text token, cuts the result
    into windows from a random offset on and shuffles the windows.
    """
    device = files[0].device
    separator = torch.tensor([end_of_text], device=device)
    while True:
        order = torch.randperm(len(files), generator=rng, device=device).tolist()
        stream = torch.cat([part for i in order for part in (files[i], separator)])
        phase = int(torch.randint(CONTEXT, (1,), generator=rng, device=device))
        count = (len(stream) - phase) // CONTEXT
        windows = stream[phase : phase + count * CONTEXT].view(count, CONTEXT)
        shuffled = windows[torch.randperm(count, generator=rng, device=device)]
        for start in range(0, count - recipe.batch_size + 1, recipe.batch_size):
            yield shuffled[start : start + recipe.batch_size]


def with_copies(
    windows: Tensor, share: float, vocab_size: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Repeat a stretch of 64 to 1,000 tokens later in its window, in ``share`` of the windows.

    Half the copies follow their original at once, the others after a random gap; in one of eight
    the stretch is first replaced by random tokens, so that copying does not lean on the text
    being likely.  Returns the windows and their labels; random originals are nothing to learn,
    so they carry no label.
    """
    count, width = windows.shape

    def uniform() -> Tensor:
        return torch.rand(count, 1, generator=rng, device=windows.device)

    length = (64 + uniform() * (min(1000, width // 2) - 63)).long()
    # A quarter of the copies start with the window: the whole context is then "A, and A again".
    source = (uniform() * (width - 2 * length + 1)).long() * (uniform() > 0.25)
    room = width - 2 * length - source
    gap = (uniform() * (room + 1)).long() * (uniform() > 0.5)
    target = source + length + gap
    copied = uniform() < share
    random = copied & (uniform() < 0.125)

    position = torch.arange(width, device=windows.device).expand(count, width)
    in_source = random & (position >= source) & (position < source + length)
    in_target = copied & (position >= target) & (position < target + length)
    noise = torch.randint(
        vocab_size, windows.shape, generator=rng, device=windows.device, dtype=windows.dtype
    )
    windows = torch.where(in_source, noise, windows)
    windows = windows.gather(1, torch.where(in_target, position - target + source, position))
    return windows, windows.masked_fill(in_source, IGNORED)


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train(
    model: Qwen3ForCausalLM,
    files: list[Tensor],
    validation: list[Tensor],
    validation_bytes: int,
    recipe: Recipe,
    end_of_text: int,
) -> list[dict[str, float]]:
    """Train in place; returns the log, one entry per fortieth of the run."""
    device = files[0].device
    rng = torch.Generator(device).manual_seed(recipe.seed)
    add_dropout(model, recipe.dropout)
    optimizers = build_optimizers(model, recipe, fused=device.type == "cuda")
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: learning_rate_factor(step, recipe))
        for o in optimizers
    ]

    @torch.compile(disable=device.type != "cuda")
    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    log: list[dict[str, float]] = []
    every = max(1, recipe.steps // 40)
    running = torch.zeros((), device=device)
    started = time.monotonic()
    source = batches(files, end_of_text, recipe, rng)
    model.train()
    for step in range(recipe.steps):
        windows, labels = with_copies(next(source), recipe.copy_share, recipe.vocab_size, rng)
        loss = loss_of(shift_right(windows, end_of_text), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        if (step + 1) % every == 0:
            bits = sum(nats_per_token(model, ids, end_of_text).sum().item() for ids in validation)
            entry = {
                "step": step + 1,
                "train_loss": round(running.item() / every, 4),
                "validation_bpb": round(bits / math.log(2) / validation_bytes, 4),
                "seconds": round(time.monotonic() - started, 1),
            }
            running.zero_()
            log.append(entry)
            print(json.dumps(entry), flush=True)
    return log


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder that ``from_pretrained`` reads."""
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def parse_arguments() -> tuple[Path, Path, Recipe]:
    """``--stdlib``, ``--out`` and one option per field of :class:`Recipe`."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--stdlib", type=Path, required=True, help="the standard library's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    return options.pop("stdlib"), options.pop("out"), Recipe(**options)


def main() -> None:
    stdlib, out, recipe = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")

    corpus = load_corpus(stdlib)
    texts = list(corpus.train.values())
    tokenizer = train_tokenizer(texts, recipe.vocab_size)
    end_of_text: int = tokenizer.eos_token_id
    files = [ids.to(device) for ids in encode(tokenizer, texts)]
    validation = [ids.to(device) for ids in encode(tokenizer, list(corpus.validation.values()))]
    tokens = sum(map(len, files))
    print(f"{len(files)} files, {sum(map(len, texts)):,} characters, {tokens:,} tokens", flush=True)

    with device:
        model = build_model(recipe, end_of_text)
    print(f"{model.num_parameters():,} parameters on {device}", flush=True)
    started = time.monotonic()
    validation_bytes = sum(len(text.encode()) for text in corpus.validation.values())
    log = train(model, files, validation, validation_bytes, recipe, end_of_text)
    seconds = time.monotonic() - started

    # Round once, then measure in float32 arithmetic exactly what was saved.
    save(model.bfloat16(), tokenizer, out)
    torch.set_float32_matmul_precision("highest")
    report = {
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "train_files": len(files),
        "train_bytes": sum(len(text.encode()) for text in texts),
        "train_tokens": tokens,
        "passes": round(recipe.steps * recipe.batch_size * CONTEXT / tokens, 2),
        "train_seconds": round(seconds, 1),
        "torch": torch.__version__,
        "log": log,
        **measure(model.float().eval(), tokenizer, corpus),
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in report.items() if k != "log"}, indent=2))


if __name__ == "__main__":
    main()
