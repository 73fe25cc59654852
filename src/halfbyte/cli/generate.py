"""`halfbyte generate`"""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from halfbyte.cli.console import out, quiet_libraries, stdin
from halfbyte.cli.options import (
    AttentionBackend,
    DType,
    LinearBackend,
    Model,
    MoeBackend,
    QuantizeActivations,
    Verbose,
    given_path,
)
from halfbyte.files import read_text

if TYPE_CHECKING:
    from halfbyte.engine import LLM, RequestOutput


def generate(
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue; - reads it from standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="PATH",
            help="File with the text to continue, instead of --prompt.",
        ),
    ] = None,
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(help="Max tokens to generate.")] = 64,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Format of the KV cache; `halfbyte info` lists them.")
    ] = "nvfp4",
    v_cache_dtype: Annotated[
        str | None, typer.Option(help="Format of V, if it differs from that of K.")
    ] = None,
    kv_recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe for K and V in NVFP4: plain, balanced or accurate; by default balanced."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the most likely tokens up to this probability.")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Sample among tokens with at least this share of the max probability."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens of the text so far become less likely.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop at; repeatable.")] = None,
    dtype: DType = "auto",
    attention_backend: AttentionBackend = None,
    linear_backend: LinearBackend = None,
    moe_backend: MoeBackend = None,
    quantize_activations: QuantizeActivations = None,
    max_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-batched-tokens",
            "--max-num-batched-tokens",
            help="Max tokens per step; longer prompts run in chunks.",
        ),
    ] = None,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of the KV cache; by default what fits.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Max share of the GPU's memory in use, instead of --num-pages."),
    ] = None,
    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="Run without CUDA graphs and torch.compile."),
    ] = False,
    torch_compile: Annotated[
        bool,
        typer.Option(
            "--torch-compile",
            help="Compile the layers of CUDA graphs with torch.compile; saves time in long runs.",
        ),
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context length in tokens; by default the model's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: Verbose = False,
) -> None:
    """Continue a prompt on a packed KV cache, then print the cache's size and the timings."""
    from halfbyte.assets import bundled_model_path
    from halfbyte.engine import LLM, SamplingParams
    from halfbyte.layouts import KVCacheDType

    quiet_libraries(verbose=verbose)
    for name in (kv_cache_dtype, v_cache_dtype or kv_cache_dtype):
        KVCacheDType.parse(name)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    text = _read_prompt(prompt, prompt_file)
    started = time.perf_counter()
    llm = LLM(
        model or bundled_model_path(),
        kv_cache_dtype=kv_cache_dtype,
        v_cache_dtype=v_cache_dtype,
        kv_recipe=kv_recipe,
        dtype=dtype,
        num_pages=num_pages,
        max_model_len=max_model_len,
        max_batched_tokens=max_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager,
        torch_compile=torch_compile,
        attention_backend=attention_backend,
        linear_backend=linear_backend,
        moe_backend=moe_backend,
        quantize_activations=quantize_activations,
    )
    timings: dict[str, float | None] = {"load_s": time.perf_counter() - started}
    output = _run(llm, text, params, timings, show=not as_json)
    formats = _formats(llm, kv_cache_dtype, v_cache_dtype)
    if output.error:
        raise RuntimeError(output.error)
    if as_json:
        print(json.dumps(_report(llm, output, formats, timings)))
    else:
        _print_table(llm, output, formats, timings)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from one of the two options, unchanged, with trailing line ends.

    Raises:
        typer.BadParameter: both options, or none.
        ValueError: an empty text, or a file that cannot be read or is not text; one line.
    """
    if (prompt is None) == (file is None):
        raise typer.BadParameter("expected one of --prompt and --prompt-file")
    name = "--prompt" if file is None else "--prompt-file"
    try:
        if file is not None:
            prompt = read_text(file)
        elif prompt == "-":
            prompt = stdin().buffer.read().decode()
    except UnicodeDecodeError:
        raise ValueError(f"{name}: expected text in UTF-8 on standard input") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not prompt:
        raise ValueError(f"{name}: is empty")
    return prompt


def _run(
    llm: "LLM", prompt: str, params: Any, timings: dict[str, float | None], *, show: bool
) -> "RequestOutput":
    """Generate; if `show`, stream prompt and text to stdout. Records times in `timings`."""
    stream = llm.stream(prompt, params)
    # With the first token: what is logged before would stand in the same line. Not with rich, which
    # would replace tabs, control characters and emoji codes.
    pending = f"\x1b[1m{prompt}\x1b[0m" if out.is_terminal else prompt
    started = last = time.perf_counter()
    first: float | None = None
    count = 0
    try:
        while True:
            try:
                token = next(stream)
            except StopIteration as end:
                output: RequestOutput = end.value[0]
                if show:
                    sys.stdout.write(pending)
                pending = ""
                break
            last = time.perf_counter()
            first = first or last
            count += 1
            if show:
                sys.stdout.write(pending + token.text)
                sys.stdout.flush()
            pending = ""
    finally:
        if show and not pending:
            out.print()
    first = first or last
    timings["prefill_s"] = first - started
    timings["decode_s"] = last - first
    timings["decode_tokens_per_s"] = (count - 1) / (last - first) if count > 1 else None
    return output


def _report(
    llm: "LLM", output: "RequestOutput", formats: str, timings: dict[str, float | None]
) -> dict[str, Any]:
    plan = llm.pool.plan
    return {
        "text": output.text,
        "tokens": output.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason.value,
        "kv_cache": {
            "dtype": formats,
            "recipe": llm.recipe.name,
            "bytes_per_token": plan.bytes_per_token,
            "bytes_used": llm.core.tables.allocator.max_used * plan.page_bytes,
            "scales": llm.kv_scales.source if llm.kv_scales else None,
        },
        "timings": timings,
    }


def _formats(llm: "LLM", k_chosen: str, v_chosen: str | None) -> str:
    """The cache formats of all layers, K and V, in order of first use.

    Args:
        llm: that ran.
        k_chosen, v_chosen: formats of the command line. `nvfp4` is named so, even if the recipe
            chooses its block scales as `nvfp4_4over6` does.
    """
    from halfbyte.layouts import KVCacheDType

    four_over_six = KVCacheDType.NVFP4_4OVER6
    names = []
    for layer in range(llm.pool.plan.num_layers):
        layout = llm.pool.layout(layer)
        for dtype, chosen in ((layout.k_dtype, k_chosen), (layout.v_dtype, v_chosen or k_chosen)):
            is_recipe_s = dtype == four_over_six != chosen
            names.append(KVCacheDType.NVFP4.value if is_recipe_s else dtype.value)
    return "+".join(dict.fromkeys(names))


def _print_table(
    llm: "LLM", output: "RequestOutput", formats: str, timings: dict[str, float | None]
) -> None:
    from halfbyte.kvcache import plan_kv_cache
    from halfbyte.models import layer_specs

    ours = llm.pool.plan.bytes_per_token
    specs = layer_specs(llm.model.config, llm.model.dtype, "bfloat16")
    bf16 = plan_kv_cache(specs).bytes_per_token
    rate = timings["decode_tokens_per_s"]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("KV cache", formats)
    if llm.recipe.name != "plain":
        table.add_row("  recipe", llm.recipe.name)
    table.add_row("  per token", f"{ours:,.0f} bytes (bfloat16: {bf16:,.0f}, {bf16 / ours:.2f}x)")
    table.add_row("  scales", llm.kv_scales.source if llm.kv_scales else "none needed")
    table.add_row(
        "tokens", f"{len(output.prompt_token_ids)} read, {len(output.token_ids)} generated"
    )
    table.add_row("speed", f"{rate:,.1f} tokens/s" if rate else "one token only")
    out.print()
    out.print(table)
