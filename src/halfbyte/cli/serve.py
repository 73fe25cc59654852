"""`halfbyte serve`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from halfbyte.cli.calibrate import destination, measure
from halfbyte.cli.console import err, print_error, quiet_libraries
from halfbyte.cli.environment import users_environment

if TYPE_CHECKING:
    from halfbyte.plugins.vllm.launch import ServePlan


class ServeCommand(TyperCommand):
    """A command that parses its own options at any position and keeps all others unchanged."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line's text after the command's name."""
        return ["MODEL", "[OPTIONS]", "[VLLM'S OPTIONS]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the arguments into halfbyte's and vLLM's, keeping their order."""
        options = (param for param in self.params if isinstance(param, TyperOption))
        own = {name for option in options for name in option.opts}
        ours: list[str] = []
        rest: list[str] = []
        args = list(args)
        while args and args[0] != "--":
            argument = args.pop(0)
            key, equals, value = argument.partition("=")
            name = key.replace("_", "-")  # as vLLM does
            if argument == "--help":
                ours.append(argument)
            elif name not in own:
                rest.append(argument)
            elif equals or args:
                ours.append(f"{name}={value if equals else args.pop(0)}")
            else:
                return super().parse_args(ctx, [name])  # reports the missing value
        return super().parse_args(ctx, [*ours, "--", *rest, *args])


def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help="Folder or hub id of a checkpoint; then options of vLLM."
        ),
    ] = None,
    kv_scales: Annotated[
        str | None,
        typer.Option(help="File of KV cache scales; by default the model's, else measured now."),
    ] = None,
    draft_kv_scales: Annotated[
        str | None, typer.Option(help="The same for a draft model (speculative decoding).")
    ] = None,
    k_dtype: Annotated[
        str | None, typer.Option(help="Format of K if --kv-cache-dtype is nvfp4.")
    ] = None,
    v_dtype: Annotated[
        str | None, typer.Option(help="Format of V if --kv-cache-dtype is nvfp4.")
    ] = None,
    kv_recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe for K and V in NVFP4: plain, balanced or accurate; by default balanced."
        ),
    ] = None,
    linear: Annotated[
        str | None,
        typer.Option(
            help="NVFP4 layers on halfbyte's kernels: auto (on CPUs and SM80 to SM90), on or off."
        ),
    ] = None,
    moe: Annotated[
        str | None,
        typer.Option(
            help="4-bit experts on halfbyte's kernels: auto (on CPUs and SM90), on or off."
        ),
    ] = None,
    elementwise: Annotated[
        str | None,
        typer.Option(
            help="Norms, activation and RoPE on halfbyte's kernels (on SM90): auto, on or off."
        ),
    ] = None,
) -> None:
    """Serve a model with vLLM on halfbyte's KV cache, with an OpenAI-compatible API.

    All other options are passed to `vllm serve` unchanged; `halfbyte serve --help=all` lists them.
    Unless they are given, halfbyte adds

        --attention-backend CUSTOM --kv-cache-dtype nvfp4

    and measures the scales of the KV cache, as `halfbyte calibrate` does, if the model has none.
    It prints the resulting command, and vLLM replaces this process.
    """
    from halfbyte.plugins.vllm import launch

    try:
        launch.check_vllm()
    except ImportError as error:
        print_error(error)
        raise typer.Exit(1) from None
    given = list(arguments or [])
    if launch.asks_for_help(given):
        command = launch.vllm_command(["serve", *given])
        launch.hand_over(command, users_environment())
    plan = launch.plan_serve(
        given,
        {
            "kv_scales": kv_scales,
            "draft_kv_scales": draft_kv_scales,
            "k_dtype": k_dtype,
            "v_dtype": v_dtype,
            "kv_recipe": kv_recipe,
            "linear": linear,
            "moe": moe,
            "elementwise": elementwise,
        },
    )
    if plan.is_ours:
        _provide_scales(plan)
    command = launch.vllm_command(["serve", *plan.arguments])
    err.out(launch.quoted(command), highlight=False)
    launch.hand_over(command, users_environment())


def _provide_scales(plan: "ServePlan") -> None:
    """Check the scales that the run will use; calibrate if there are none.

    Raises:
        ValueError: an unsupported cache dtype; scales that are absent, broken or of another model;
            a model that cannot be calibrated; one line.
    """
    import torch

    from halfbyte.checkpoints.dialects.registry import read_config
    from halfbyte.models.choose_kv_scales import declared_format, find_kv_scales
    from halfbyte.models.local_files import local_folder
    from halfbyte.plugins.vllm.formats import LayerFormat
    from halfbyte.plugins.vllm.launch import named_as_typed
    from halfbyte.plugins.vllm.scales import find_scales

    quiet_libraries(verbose=False)
    options = plan.options
    # Any unquantized dtype will do here: such formats have no scales.
    with named_as_typed(plan.typed):
        formats = LayerFormat.of(plan.cache_dtype, torch.bfloat16, options)
        for option in ("kv_scales", "draft_kv_scales"):
            if (given := getattr(options, option)) is not None:
                find_scales(Path(), {}, given, option)
    if options.kv_scales is not None or not plan.has_weights:
        return
    is_declared = plan.cache_dtype == "auto"  # the checkpoint may then declare a format
    if not (is_declared or formats.k.has_global_scale or formats.v.has_global_scale):
        return
    folder = local_folder(plan.model, revision=plan.revision, cache_dir=plan.download_dir)
    config = read_config(folder)
    if is_declared and not declared_format(folder, config).has_global_scale:
        return
    recipe = None if options.kv_recipe is None else options.recipe  # any scales decide the default
    if find_kv_scales(folder, config, recipe=recipe) is not None:
        return
    path, is_kept = destination(plan.model, folder)
    err.print(f"no KV cache scales for {plan.model}: measuring them", markup=False)
    measure(folder, path, is_kept=is_kept)
    err.print(f"{path}: written", markup=False)
