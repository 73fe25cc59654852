"""Step 2, with `method="gptq"`: rounds weights so that the error of a layer's output is small.

A layer computes W x. Rounding W to Q costs E|(W - Q) x|^2 = tr((W - Q) H (W - Q)^T) with
H = E[x x^T], the second moment of its inputs on a text. GPTQ (Frantar et al., 2022) rounds the
columns of W one after the other, and compensates the error of each in the remaining columns that
are correlated according to H: the feedback of `numerics.weighted_rounding`, with rows of W in place
of vectors of K. A block's scale is chosen right before its first column is rounded.

The decoder layers are loaded one by one. Each runs twice over the text: unquantized, for H, and
rounded, so that the next layer is calibrated on the inputs that it will get. Memory holds one layer
with H of each of its inputs, the hidden states of the text, and the codes of all earlier layers.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.checkpoints.dialects.base import OutputFormat
from halfbyte.models.amax import AmaxRecorder
from halfbyte.models.layerwise import StreamedModel
from halfbyte.models.loader import device_or_default
from halfbyte.models.second_moment import SecondMoment
from halfbyte.numerics import nvfp4, weighted_rounding
from halfbyte.quantization.linear_inputs import LinearInputs
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
    # Each is removed once rounded: a reference here would keep its weight in memory.
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
            "gptq: %d calibration tokens are few for layers of %d inputs, and rounding to nearest "
            "(rtn) may be more accurate; use a text of at least %d tokens",
            tokens,
            max_inputs,
            _TOKENS_PER_INPUT * max_inputs,
        )


def check_linear(selection: LayerSelection) -> None:
    """Raise ValueError for experts, which models fuse and run without `nn.Linear`."""
    for name in selection.modules:
        if experts_projection(name) is not None:
            raise ValueError(
                f"method: gptq cannot round experts, such as {name}; use rtn, or leave experts "
                "unquantized with ignore"
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
        codes = round_with_feedback(weight, decode, moments.factor(weight), output.recipe)
        weight.copy_(nvfp4.dequantize(*codes, decode, weight.dtype))
        yield name, RoundedLayer(RoundedWeight(*(x.cpu() for x in codes)), scale)


def round_with_feedback(
    weight: torch.Tensor, decode: torch.Tensor, factor: torch.Tensor, recipe: nvfp4.Recipe
) -> RoundedWeight:
    """Round a matrix column by column with error feedback.

    Args:
        weight: float `[N, K]`, K % 16 == 0.
        decode: float32 `[]`, the global scale.
        factor: float32 `[K, K]`, F of `weighted_rounding.feedback_factor` for E[x x^T].
        recipe: of block scales.

    Returns:
        On the weight's device. Within a block of 16 columns codes and scales are those of
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
        # A column was rounded with feedback of those before it, so before - rounded = e (I + F).
        moved = before - nvfp4.dequantize(data, scales, decode)
        errors = torch.linalg.solve_triangular(eye + inner, moved, upper=True, left=False)
        y[:, later].addmm_(errors, factor[block, later], alpha=-1)
    return RoundedWeight(*(torch.cat(tensors, -1) for tensors in zip(*parts, strict=True)))


class InputMoments(LinearInputs[int]):
    """Sums x x^T over the inputs of linear layers while a model runs.

    Args:
        weights: of the layers; those called one after the other with the same input share a moment.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for weight in weights:
            self.watch(weight, weight.data_ptr())
        self._moments: dict[int, SecondMoment] = {}
        self._factors: dict[SecondMoment, torch.Tensor] = {}
        self._last: tuple[torch.Tensor, SecondMoment] | None = None

    def record(self, key: int, x: torch.Tensor) -> None:
        """See `LinearInputs`."""
        if self._last is not None and self._last[0] is x:
            last = self._last[1]
            if self._moments.setdefault(key, last) is last:
                return
        moment = self._moments.setdefault(key, SecondMoment())
        moment.add(x.flatten(0, -2))
        self._last = x, moment

    def factor(self, weight: torch.Tensor) -> torch.Tensor:
        """F of a weight's inputs, float32 `[K, K]`, computed once for weights that share a moment;
        zeros for a layer that was never reached."""
        moment = self._moments.get(weight.data_ptr())
        if moment is None:
            size = weight.shape[1]
            return torch.zeros(size, size, device=weight.device)
        if moment not in self._factors:
            self._factors[moment] = weighted_rounding.feedback_factor(moment.mean())[0]
        return self._factors[moment]

    def clear(self) -> None:
        """Forget all moments."""
        self._moments.clear()
        self._factors.clear()
        self._last = None
