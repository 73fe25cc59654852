"""Step 1: selects the layers to quantize: linear layers inside the decoder layers.

The model's structure, on the meta device, decides: a two-dimensional weight is quantized if its
module is an `nn.Linear` of a decoder layer, or one expert of a module that fuses its experts in
memory (Qwen3-MoE's files hold one matrix per expert and projection). Embeddings, the head and
routers are not quantized, as is usual.

The files are compared with the model first, with the checks of loading a quantized checkpoint, so
that the result can be loaded.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.models.architectures import check_supported
from halfbyte.models.meta_model import empty_model, resolve_dtype
from halfbyte.models.nvfp4.experts import PROJECTIONS
from halfbyte.models.nvfp4.layer_plan import LayerPlan
from halfbyte.models.nvfp4.weight_stream import check_plain_tensors
from halfbyte.numerics import nvfp4

logger = logging.getLogger("halfbyte")

_IN_DECODER_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_EXPERT = re.compile(
    rf"(?P<experts>.*\.experts)\.(?P<number>-?\d+)\.(?P<projection>{'|'.join(PROJECTIONS)})$"
)
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}
"""Projections that engines fuse into one matrix product."""
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class LayerSelection:
    """The selected layers.

    Args:
        groups: names of the layers to quantize; those of one group share a global scale.
        ignore: names of the linear layers that are not quantized.
        attentions: name of the attention module of each decoder layer, in order.
    """

    groups: tuple[tuple[str, ...], ...]
    ignore: tuple[str, ...]
    attentions: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all layers to quantize."""
        return tuple(module for group in self.groups for module in group)


def select_layers(
    config: Any, index: CheckpointIndex, ignore: Sequence[str] = ()
) -> LayerSelection:
    """Select the layers to quantize.

    Args:
        config: transformers config of the model.
        index: of the checkpoint's files.
        ignore: further layers not to quantize: names, shell wildcards, names of modules that
            contain them, or `re:` and a regular expression matched from the start. Modules that
            are never quantized may be listed too.

    Raises:
        UnsupportedModelError: an architecture that halfbyte is not tested with.
        CheckpointError: no model can be built from the config, a weight of the model is absent or
            does not fit, a tensor could not be loaded beside quantized ones, or there is nothing
            to quantize.
        ValueError: a pattern without a match, or an invalid regular expression.
    """
    check_supported(config)
    model = empty_model(index.folder, config, resolve_dtype("auto", config, index))
    check_plain_tensors(model, LayerPlan(), index, model.dtype)
    modules = dict(model.named_modules())
    linear = list(_decoder_linears(modules, index))
    _check_patterns(ignore, linear, modules)
    wanted = [m for m in linear if not any(_matches(pattern, m) for pattern in ignore)]
    unfit = {
        m: k for m in wanted if (k := index.tensors[f"{m}.weight"].shape[1]) % nvfp4.BLOCK_SIZE
    }
    quantized = _whole_experts(linear, wanted, unfit)
    _warn_unfit(unfit)
    if not quantized:
        raise CheckpointError("the checkpoint has no linear layer that can be quantized")
    _check_surplus(quantized, modules, index)
    fused = [name for name, entry in index.tensors.items() if len(entry.shape) == 3]
    if fused:
        logger.warning(
            "%s … (%d tensors): not quantized, because the file fuses experts in one tensor",
            fused[0],
            len(fused),
        )
    kept = set(quantized)
    return LayerSelection(
        groups=_groups(quantized, linear),
        ignore=tuple(dict.fromkeys(m for m in _unquantized(modules, index) if m not in kept)),
        attentions=attention_modules(modules),
    )


def attention_modules(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Names of the attention modules among a model's, one per decoder layer, in order."""
    return tuple(name for name, _ in sorted(_attentions(modules), key=lambda x: x[1]))


class ParameterName(NamedTuple):
    """A parameter of a model."""

    module: str
    parameter: str
    """Its name in the module."""


def experts_projection(module: str) -> ParameterName | None:
    """The fused parameter that has an expert's projection; None for other layers."""
    match = _EXPERT.match(module)
    if match is None:
        return None
    fused = "gate_up_proj" if match["projection"] in ("gate_proj", "up_proj") else "down_proj"
    return ParameterName(match["experts"], fused)


def _decoder_linears(modules: Mapping[str, nn.Module], index: CheckpointIndex) -> Iterator[str]:
    """Names of the linear layers of the decoder layers, in the order of the files."""
    for name, entry in index.tensors.items():
        module = name.removesuffix(".weight")
        if module == name or len(entry.shape) != 2 or not _IN_DECODER_LAYER.search(module):
            continue
        if module.rpartition(".")[2] in _ROUTERS:
            continue
        owner = modules.get(module)
        if isinstance(owner, nn.Linear):
            yield module
        elif owner is None and (match := _EXPERT.match(module)):
            count = _number_of_experts(modules, module)
            if count and not 0 <= int(match["number"]) < count:
                raise CheckpointError(
                    f"{index.folder}: {name}: expected {count} experts, found {entry} of number "
                    f"{match['number']}"
                )
            if count:
                yield module


def _check_patterns(ignore: Sequence[str], linear: Sequence[str], modules: Iterable[str]) -> None:
    """Raise ValueError for a pattern that has no effect.

    Matching a module that is never quantized is allowed: `lm_head` is in common lists. Matching
    only a module that contains layers to quantize is not: `*.mlp` would not exclude them.
    """
    split = [module.split(".") for module in linear]
    containers = {".".join(names[:i]) for names in split for i in range(len(names))}
    known = {*linear, *modules} - containers
    for pattern in ignore:
        if not any(_matches(pattern, module) for module in known):
            raise ValueError(
                f"ignore: {pattern!r} matches no linear layer of the decoder layers, and no module "
                "that is never quantized"
            )


def _check_surplus(
    quantized: Sequence[str], modules: Mapping[str, nn.Module], index: CheckpointIndex
) -> None:
    """Raise CheckpointError for a tensor, in a layer to quantize, that the model does not have.

    Loading ignores such tensors elsewhere; beside a quantized weight it may change the meaning of
    the weight.
    """
    for module in quantized:
        has_bias = getattr(modules.get(module), "bias", None) is not None
        known = {"weight", "bias"} if has_bias else {"weight"}
        for name in sorted(index.names_of(module) - known):
            if not name.endswith("_scale"):  # a KV cache scale (`k_proj.k_scale`)
                raise CheckpointError(
                    f"{index.folder}: {module}.{name}: expected no such tensor beside a weight to "
                    f"quantize, found {index.tensors[f'{module}.{name}']}"
                )


def _whole_experts(
    linear: Sequence[str], wanted: Sequence[str], unfit: Collection[str]
) -> list[str]:
    """`wanted` without `unfit`, and without experts of a layer that has an unfit one.

    Experts of a layer run together, so loading expects them to be stored alike.

    Raises:
        ValueError: `ignore` matches some experts of a layer only.
    """
    broken = {_experts_of(m) for m in unfit} - {None}
    kept = [m for m in wanted if m not in unfit and _experts_of(m) not in broken]
    chosen = {experts for m in kept if (experts := _experts_of(m)) is not None}
    ignored = set(linear) - set(wanted)
    for module in linear:
        if module in ignored and _experts_of(module) in chosen:
            raise ValueError(
                f"ignore: {module} would stay unquantized beside quantized experts of its layer; "
                "expected all experts of a layer or none"
            )
    return kept


def _warn_unfit(unfit: Mapping[str, int]) -> None:
    """Log one line per decoder layer with all that stays unquantized because of its size.

    Args:
        unfit: number of input features of the layers that do not fit, by name. Experts beside them
            stay as well.
    """
    found = defaultdict[str, dict[str, str]](dict)
    for module, features in unfit.items():
        match = _IN_DECODER_LAYER.search(module)
        assert match is not None
        experts = _experts_of(module)
        cause = f"{features}"
        if experts is not None:
            cause = f"all experts, because {module.rpartition('.')[2]} has {features}"
        name = (experts or module)[match.end() :]
        found[module[: match.end() - 1]].setdefault(name, cause)
    for layer, causes in found.items():
        logger.warning(
            "%s: left unquantized, because input features are not a multiple of %d: %s",
            layer,
            nvfp4.BLOCK_SIZE,
            ", ".join(f"{name} ({cause})" for name, cause in causes.items()),
        )


def _experts_of(module: str) -> str | None:
    projection = experts_projection(module)
    return None if projection is None else projection.module


def _number_of_experts(modules: Mapping[str, nn.Module], module: str) -> int:
    """Number of experts in the fused module of an expert's projection; 0 if it is not fused."""
    projection = experts_projection(module)
    if projection is None:
        return 0
    parameter = getattr(modules.get(projection.module), projection.parameter, None)
    return len(parameter) if isinstance(parameter, torch.Tensor) and parameter.dim() == 3 else 0


def _unquantized(modules: Mapping[str, nn.Module], index: CheckpointIndex) -> Iterator[str]:
    """Names of all modules that a reader could treat as linear layers, in the model's order."""
    for module, owner in modules.items():
        # A tied head has no tensor in the files, but readers create a layer for it.
        if isinstance(owner, nn.Linear) or _stores_matrices(owner, module, index):
            yield module
    yield from (module for module in _decoder_linears(modules, index) if module not in modules)


def _stores_matrices(owner: nn.Module, module: str, index: CheckpointIndex) -> bool:
    """Whether a module is a router or fused experts, with its matrices stored as parameters."""
    return not isinstance(owner, nn.Embedding) and any(
        parameter.dim() in (2, 3) and f"{module}.{name}" in index
        for name, parameter in owner.named_parameters(recurse=False)
    )


def _groups(quantized: Sequence[str], linear: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    groups: dict[_FusedLayer, list[str]] = defaultdict(list)
    whole: dict[_FusedLayer, int] = defaultdict(int)
    for module in linear:
        whole[_FusedLayer.of(module)] += 1
    for module in quantized:
        groups[_FusedLayer.of(module)].append(module)
    for key, members in groups.items():
        if len(members) < whole[key]:
            logger.warning(
                "%s: only part of the layers that engines fuse with it is quantized; "
                "vLLM and others refuse such a checkpoint",
                members[0],
            )
    return tuple(tuple(members) for members in groups.values())


class _FusedLayer(NamedTuple):
    """The layer into which engines fuse a linear layer with its neighbours."""

    parent: str
    name: str

    @classmethod
    def of(cls, module: str) -> "_FusedLayer":
        parent, _, leaf = module.rpartition(".")
        return cls(parent, _FUSED.get(leaf, leaf))


def _attentions(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, int]]:
    """Names and layer indices of the attention modules."""
    for name, module in modules.items():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and (hasattr(module, "k_proj") or hasattr(module, "qkv_proj")):
            yield name, index


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), module) is not None
        except re.error as error:
            raise ValueError(f"ignore: {pattern!r} is no regular expression: {error}") from None
    return fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")
