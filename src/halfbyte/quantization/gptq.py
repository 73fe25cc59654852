"""Step 2, with `method="gptq"`: weights rounded by what an error does to a layer's output.

A layer computes W x. Rounding W to Q costs E|(W - Q) x|^2 = tr((W - Q) H (W - Q)^T) with
H = E[x x^T], its input's second moment on a text. GPTQ (Frantar et al., 2022) rounds the columns of
W one after the other, and takes what each is off out of the columns to come, in the directions that
H says are alike: the feedback of `numerics.weighted_rounding`, with rows of W in place of vectors
of K. A block's scale is chosen when its turn comes.

The decoder layers are read one by one. Each runs twice over the text: as it is, for H, and rounded,
so that the next layer sees the inputs that it will have. In memory are one layer with H of each of
its inputs, the hidden states of the text, and the codes of all layers before.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from halfbyte.checkpoints.dialects.base import OutputFormat
from halfbyte.models.amax import AmaxRecorder
from halfbyte.models.layerwise import StreamedModel
from halfbyte.models.loader import device_or_default
from halfbyte.numerics import nvfp4, weighted_rounding
from halfbyte.quantization.output_tensors import global_scale
from halfbyte.quantization.select_layers import LayerSelection, experts_projection
from halfbyte.quantization.write_layers import RoundedLayer, RoundedWeight, max_magnitude

logger = logging.getLogger("halfbyte")

_TOKENS_PER_INPUT = 16
"""Tokens per input of a layer below which its E[x x^T] is mostly noise."""


def round_layers(
    folder: Path,
    config: Any,
    token_ids: torch.Tensor,
    selection: LayerSelection,
    output: OutputFormat,
    device: torch.device | str | None = None,
    on_layer: Callable[[int, int], Any] = lambda done, total: None,
) -> dict[str, RoundedLayer]:
    """Round the selected layers of a checkpoint.

    Args:
        folder: of the unquantized checkpoint.
        config: of `read_model_config`.
        token_ids: int64 `[rows, tokens]` to run.
        selection: what to round.
        output: dialect and recipe, which decide the global scales.
        device: to run on; by default a GPU if there is one.
        on_layer: called with the decoder layers done and in all.

    Returns:
        By name of the layer.

    Raises:
        CheckpointError: as `StreamedModel`, or a weight that is not finite.
        ValueError: as `check_linear`.
    """
    check_linear(selection)
    model = StreamedModel(folder, config, device_or_default(device), "auto")
    wanted = set(selection.modules)
    # Each is dropped after its layer: what this holds, the model cannot free.
    modules = {name: x for name, x in model.model.named_modules() if name in wanted}
    _warn_of_few_tokens(token_ids.numel(), max(_weight(x).shape[1] for x in modules.values()))
    rounded: dict[str, RoundedLayer] = {}

    def run_layer(layer: nn.Module, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        inside = {id(module) for module in layer.modules()}
        names = [name for name, module in modules.items() if id(module) in inside]
        groups = [
            {name: _weight(modules.pop(name)) for name in group}
            for group in selection.groups
            if group[0] in names
        ]
        with InputMoments([weight for group in groups for weight in group.values()]) as moments:
            run()
        while groups:
            rounded.update(_round_group(groups.pop(), moments, output))
        moments.clear()
        return run()

    model.run(token_ids, AmaxRecorder(), on_layer, run_layer)
    return rounded


def _warn_of_few_tokens(tokens: int, max_inputs: int) -> None:
    if tokens < _TOKENS_PER_INPUT * max_inputs:
        logger.warning(
            "gptq: %d tokens say little of layers of %d inputs, and rounding to nearest (rtn) may "
            "be closer; give a text of %d tokens or more",
            tokens,
            max_inputs,
            _TOKENS_PER_INPUT * max_inputs,
        )


def check_linear(selection: LayerSelection) -> None:
    """Raise ValueError for experts, which models fuse and run without `nn.Linear`."""
    for name in selection.modules:
        if experts_projection(name) is not None:
            raise ValueError(
                f"method: gptq rounds linear layers alone, and {name} is an expert; expected "
                "rtn, or such layers in ignore"
            )


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _round_group(
    weights: Mapping[str, torch.Tensor], moments: "InputMoments", output: OutputFormat
) -> Iterator[tuple[str, RoundedLayer]]:
    """Round weights that share a global scale, in place, and give their codes by name."""
    amax = max(max_magnitude(f"{name}.weight", weight) for name, weight in weights.items())
    scale = global_scale(amax, output.dialect, output.recipe)
    for name, weight in weights.items():
        decode = scale.decode.to(weight.device)
        data, scales = round_with_feedback(weight, decode, moments.factor(weight), output.recipe)
        weight.copy_(nvfp4.dequantize(data, scales, decode, weight.dtype))
        yield name, RoundedLayer(RoundedWeight(data.cpu(), scales.cpu()), scale)


def round_with_feedback(
    weight: torch.Tensor, decode: torch.Tensor, factor: torch.Tensor, recipe: nvfp4.Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix column by column with error feedback.

    Args:
        weight: float `[N, K]`, K % 16 == 0.
        decode: float32 `[]`, the global scale.
        factor: float32 `[K, K]`, F of `weighted_rounding.feedback_factor` for E[x x^T].
        recipe: of block scales.

    Returns:
        `(data, scales)` as of `nvfp4.quantize`. Within a block of 16 columns they are those of
        `weighted_rounding.quantize`; later columns take over a block's errors in one matrix
        product, whose order of sums is the library's.
    """
    y = weight.float().clone()
    size = nvfp4.BLOCK_SIZE
    eye = torch.eye(size, device=y.device)
    parts = []
    for begin in range(0, y.shape[1], size):
        block, later = slice(begin, begin + size), slice(begin + size, None)
        before, inner = y[:, block].clone(), factor[block, block]
        data, scales = weighted_rounding.quantize(before, decode, None, inner, recipe)
        parts.append((data, scales))
        # before - rounded = e (I + F): each column was moved by the errors of those before it.
        moved = before - nvfp4.dequantize(data, scales, decode)
        errors = torch.linalg.solve_triangular(eye + inner, moved, upper=True, left=False)
        y[:, later].addmm_(errors, factor[block, later], alpha=-1)
    codes, block_scales = zip(*parts, strict=True)
    return torch.cat(codes, -1), torch.cat([x.view(torch.uint8) for x in block_scales], -1).view(
        torch.float8_e4m3fn
    )


class InputMoments(TorchFunctionMode):
    """Sums x x^T over the inputs of linear layers while a model runs.

    Args:
        weights: of the layers; those called one after the other with the same input share a moment.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {weight.data_ptr() for weight in weights}
        self._moment_of: dict[int, _Moment] = {}
        self._last: tuple[torch.Tensor, _Moment] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            if weight.data_ptr() in self._known and x.numel():
                self._add(weight, x)
        return func(*args, **(kwargs or {}))

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """float64 `[K, K]`, E[x x^T]; zeros for a layer that was never reached."""
        moment = self._moment_of.get(weight.data_ptr())
        if moment is None:
            size = weight.shape[1]
            return torch.zeros(size, size, dtype=torch.float64, device=weight.device)
        return moment.mean()

    def factor(self, weight: torch.Tensor) -> torch.Tensor:
        """F of the moment, float32 `[K, K]`, made once for layers that share it."""
        moment = self._moment_of.get(weight.data_ptr())
        if moment is None:
            return weighted_rounding.feedback_factor(self.of(weight))[0]
        if moment.factor is None:
            moment.factor = weighted_rounding.feedback_factor(moment.mean())[0]
        return moment.factor

    def clear(self) -> None:
        """Forget all of them."""
        self._moment_of.clear()
        self._last = None

    def _add(self, weight: torch.Tensor, x: torch.Tensor) -> None:
        place = weight.data_ptr()
        if self._last is not None and self._last[0] is x:
            last = self._last[1]
            if self._moment_of.setdefault(place, last) is last:
                return
        moment = self._moment_of.setdefault(place, _Moment())
        moment.add(x)
        self._last = x, moment


class _Moment:
    """E[x x^T], summed in float64; inputs with a NaN or infinity do not count."""

    def __init__(self) -> None:
        self.factor: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._count: torch.Tensor | float = 0.0

    def add(self, x: torch.Tensor) -> None:
        rows = x.detach().flatten(0, -2).double()
        known = rows.isfinite().all(-1)
        rows = torch.where(known[:, None], rows, 0.0)
        if self._sum is None:
            self._sum = rows.T @ rows
        else:
            self._sum.addmm_(rows.T, rows)
        self._count = self._count + known.sum()

    def mean(self) -> torch.Tensor:
        assert isinstance(self._sum, torch.Tensor)
        assert isinstance(self._count, torch.Tensor)
        return self._sum / self._count.clamp(min=1)
