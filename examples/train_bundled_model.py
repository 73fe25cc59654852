"""Train halfbyte's bundled model: a small Qwen3 that knows Python's standard library.

The model exists so that everything in halfbyte can be tried, tested and measured offline on real
attention rather than on random weights: an ordinary pre-norm transformer with grouped-query
attention, QK norm and RoPE, small enough to ship in the package.  Run it as::

    python examples/train_bundled_model.py --stdlib /usr/lib/python3.11 --out bundled

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
import lzma
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from bundled_corpus import Corpus, load_corpus
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"
PROMPTS = ("def read(self, n):", "import os", "class Stack:\n    def __init__(self):")
CONTEXT = 2048
IGNORED = -100  # the label that cross_entropy skips

# How text is cut before the merges are learned: a word may take one leading character along
# (" self", ".append", "_name"), numbers come in groups of three, and a newline keeps the
# indentation that follows it, which in Python says more about the newline than about the word.
PRE_TOKENS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[\r\n]+[ \t]*"
    r"|[^\S\r\n]+(?=[^\S\r\n])"
    r"|\s+"
)


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


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary that reproduces any text exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Every text begins as it did in training; without it the model continues far worse.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT}:1 $B:1",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[Tensor]:
    """Token ids of each text, without special tokens."""
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [torch.tensor(row, dtype=torch.long) for row in ids]


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


def shift_right(windows: Tensor, end_of_text: int) -> Tensor:
    """The inputs that predict ``windows``: every window is read as if a text began there."""
    return F.pad(windows[:, :-1], (1, 0), value=end_of_text)


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
