"""`halfbyte eval`"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table

from halfbyte.cli.console import out, progress_bar, quiet_libraries
from halfbyte.cli.options import (
    AttentionBackend,
    LinearBackend,
    Model,
    MoeBackend,
    QuantizeActivations,
    Verbose,
    given_path,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halfbyte.evaluation import GreedyResult, LayerResult, PerplexityResult, RetrievalResult
    from halfbyte.layouts import KVCacheDType


def evaluate(
    model: Model = None,
    text: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="PATH",
            help="UTF-8 file to predict; by default the held-out text.",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Formats to measure, separated by commas.")
    ] = "bfloat16,fp8_e4m3,nvfp4",
    kv_recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipes to measure for NVFP4 formats, separated by commas; by default balanced."
        ),
    ] = None,
    chunk_size: Annotated[int, typer.Option(help="Tokens per step; 1 is true decoding.")] = 512,
    window: Annotated[int, typer.Option(help="Max tokens of context.")] = 1024,
    max_tokens: Annotated[
        int | None, typer.Option(help="Stop after about this many tokens of text.")
    ] = 16384,
    retrieval: Annotated[
        int | None,
        typer.Option(
            help="Measure retrieval instead: facts and a repeated segment in a context of this "
            "many tokens of the text; needs a model that answers questions."
        ),
    ] = None,
    greedy: Annotated[
        int | None,
        typer.Option(
            help="Measure generation instead: continue every window of text by this many tokens, "
            "and count those before the first that differs from a bfloat16 cache's."
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="Measure layers instead: SQNR of K and V and the error of attention logits.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of weights and computation: auto, float32, bfloat16 or float16; by default "
            "float32 on a CPU, so that rounding does not depend on the chunk size, else auto."
        ),
    ] = None,
    attention_backend: AttentionBackend = None,
    linear_backend: LinearBackend = None,
    moe_backend: MoeBackend = None,
    quantize_activations: QuantizeActivations = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    verbose: Verbose = False,
) -> None:
    """Measure perplexity with a packed KV cache, and the KL divergence from a bfloat16 cache."""
    import torch

    from halfbyte.assets import bundled_model_path, heldout_texts
    from halfbyte.evaluation import text_windows
    from halfbyte.files import read_text
    from halfbyte.layouts import KVCacheDType
    from halfbyte.models import load_model, load_tokenizer

    quiet_libraries(verbose=verbose)
    names = [KVCacheDType.parse(name.strip()) for name in kv_cache_dtype.split(",")]
    if window < 2:
        raise ValueError(f"window: expected at least 2 tokens, got {window}")
    if (retrieval is not None) + (greedy is not None) + layers > 1:
        raise ValueError("greedy, layers, retrieval: are measured one at a time")
    if layers and attention_backend is not None:
        raise ValueError("attention_backend: --layers reads K and V back without one")
    texts = [read_text(text)] if text else list(heldout_texts().values())
    path = model or bundled_model_path()
    tokenizer = load_tokenizer(path)
    loaded = load_model(
        path,
        dtype=dtype or ("auto" if torch.cuda.is_available() else "float32"),
        linear_backend=linear_backend,
        moe_backend=moe_backend,
        quantize_activations=quantize_activations,
    )
    options = {
        "kv_recipes": kv_recipe and [name.strip() for name in kv_recipe.split(",")],
        "tokenizer": tokenizer,
        "attention_backend": attention_backend,
    }
    work = _Work(loaded, names, chunk_size, as_json, options)
    if retrieval is not None:
        _look_for_facts(work, "\n".join(texts), retrieval)
        return
    window = _fitting_window(loaded.config, window, greedy)
    windows, num_bytes = text_windows(tokenizer, texts, window, max_tokens)
    if greedy is not None:
        _continue_greedily(work, windows, greedy)
    elif layers:
        _by_layer(work, windows)
    else:
        _predict(work, windows, window, num_bytes)


class _Work(NamedTuple):
    """What every measurement takes."""

    model: "PreTrainedModel"
    names: "list[KVCacheDType]"
    chunk_size: int
    as_json: bool
    options: dict[str, Any]
    """Options that the functions of `halfbyte.evaluation` share."""


def _fitting_window(config: Any, window: int, new_tokens: int | None) -> int:
    """Tokens of a window that, with so many new ones, fits the model's context."""
    new_tokens = new_tokens or 0
    context = getattr(config, "max_position_embeddings", window + new_tokens)
    if new_tokens > context - 2:
        raise ValueError(f"greedy: {new_tokens} tokens leave no room in a context of {context}")
    return min(window, context - new_tokens)


def _predict(work: _Work, windows: "Sequence[Sequence[int]]", window: int, num_bytes: int) -> None:
    from halfbyte.evaluation import evaluate_perplexity

    with progress_bar("eval", "tokens") as on_progress:
        results = evaluate_perplexity(
            work.model,
            windows,
            work.names,
            work.chunk_size,
            num_bytes=num_bytes,
            on_progress=on_progress,
            **work.options,
        )
    if work.as_json:
        print(json.dumps([asdict(result) for result in results]))
        return
    _print_perplexity(results)
    out.print(
        f"{results[0].tokens:,} tokens predicted, read back from the cache in chunks of "
        f"{work.chunk_size}, {window} tokens of context"
    )


def _print_perplexity(results: Sequence["PerplexityResult"]) -> None:
    rows = []
    for result in results:
        baseline = result.nll - result.nll_increase
        change = f"{result.nll_increase / baseline:+.2%}"
        if result.nll_increase_stderr:
            change += f" ± {result.nll_increase_stderr / baseline:.2%}"
        rows.append(
            (
                _name(result),
                f"{result.perplexity:.4f}",
                change,
                f"{result.kl_divergence:.5f}",
                f"{result.top1:.1%}",
                f"{result.bytes_per_token:,.0f}",
            )
        )
    headings = ("KV cache", "perplexity", "change in NLL", "KL to bf16", "top-1", "bytes/token")
    _print_table(headings, rows)


def _continue_greedily(work: _Work, windows: "Sequence[Sequence[int]]", new_tokens: int) -> None:
    from halfbyte.evaluation import evaluate_greedy

    results = evaluate_greedy(
        work.model, windows, new_tokens, work.names, work.chunk_size, **work.options
    )
    if work.as_json:
        print(json.dumps([asdict(result) for result in results]))
        return
    rows = [
        (
            _name(result),
            f"{result.agreed:.1f}"
            + ("" if result.agreed_stderr is None else f" ± {result.agreed_stderr:.1f}"),
            f"{result.whole} of {result.prompts}",
        )
        for result in results
    ]
    _print_table(("KV cache", "tokens that agree", "prompts without a difference"), rows)
    out.print(f"{len(windows)} prompts, continued by {new_tokens} tokens each, greedily")


def _by_layer(work: _Work, windows: "Sequence[Sequence[int]]") -> None:
    from halfbyte.evaluation import evaluate_layers

    kept = {name: work.options[name] for name in ("kv_recipes", "tokenizer")}
    with progress_bar("eval", "windows") as on_progress:
        results = evaluate_layers(work.model, windows, work.names, on_progress=on_progress, **kept)
    if work.as_json:
        print(json.dumps([_finite(asdict(result)) for result in results]))
        return
    rows = [
        (
            f"layer {result.layer}, {_name(result)}",
            *("exact" if x == math.inf else f"{x:.1f} dB" for x in _sqnr(result)),
            f"{result.logit_error:.4f}",
        )
        for result in sorted(results, key=lambda result: result.layer)
    ]
    _print_table(("KV cache", "SQNR of K", "SQNR of V", "logit error"), rows)
    tokens = sum(len(window) for window in windows)
    out.print(
        f"{tokens:,} tokens, {len(windows[0])} of context; errors of logits in nats, weighted by "
        "attention"
    )


def _sqnr(result: "LayerResult") -> tuple[float, float]:
    return result.k_sqnr_db, result.v_sqnr_db


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Replace infinity, which JSON does not have, by None."""
    return {name: None if value == math.inf else value for name, value in row.items()}


def _look_for_facts(work: _Work, text: str, tokens: int) -> None:
    from halfbyte.evaluation import evaluate_retrieval, make_context

    facts = max(1, min(32, tokens // 100))
    try:
        context = make_context(work.options["tokenizer"], text, tokens, facts, seed=1)
    except ValueError as error:
        raise ValueError(f"retrieval: {error}") from None
    results = evaluate_retrieval(work.model, [context], work.names, work.chunk_size, **work.options)
    if work.as_json:
        print(json.dumps([asdict(result) for result in results]))
        return
    rows = [
        (
            _name(result),
            f"{result.codes} of {result.asked}",
            f"{result.digits:.1%}",
            f"{result.repeated_nll:.3f}",
            f"{result.repeated_top1:.1%}",
        )
        for result in results
    ]
    _print_table(("KV cache", "codes", "their tokens", "NLL of the repetition", "top-1"), rows)
    out.print(
        f"{facts} facts and a random segment, twice, in {len(context.ids):,} tokens, read back "
        f"from the cache in chunks of {work.chunk_size}"
    )


def _name(result: "GreedyResult | LayerResult | PerplexityResult | RetrievalResult") -> str:
    return result.kv_cache_dtype + ("" if result.kv_recipe == "plain" else f" {result.kv_recipe}")


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    for row in rows:
        table.add_row(*row)
    out.print(table)
