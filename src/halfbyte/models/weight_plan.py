"""Which tensors of a checkpoint are quantized: the linear layers inside the decoder layers.

The model's own structure decides, built on the meta device: a two-dimensional weight is quantized
if its module is an `nn.Linear` of a decoder layer, or one expert of a module that fuses its experts
in memory (Qwen3-MoE's files hold one matrix per expert and projection). Embeddings, the head and
routers stay as they are, as everywhere in the field.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from halfbyte.checkpoints.dialects import CheckpointError
from halfbyte.checkpoints.quantize import WeightPlan
from halfbyte.models.architectures import check_supported
from halfbyte.numerics import nvfp4

logger = logging.getLogger("halfbyte")

_IN_DECODER_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<projection>\w+)$")
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}
"""Projections that engines compute as one."""
_ROUTERS = ("gate", "router", "shared_expert_gate")


def plan_weights(
    config: Any, shapes: Mapping[str, tuple[int, ...]], ignore: Sequence[str] = ()
) -> WeightPlan:
    """Decide what to quantize.

    Args:
        config: transformers config of the model.
        shapes: of the checkpoint's tensors, by name.
        ignore: more layers to leave as they are: names, shell wildcards of names, names of modules
            that contain them, or `re:` and a regular expression matched from the start.

    Raises:
        UnsupportedModelError: an architecture that halfbyte is not tested with.
        CheckpointError: a weight whose shape is not the model's, or nothing to quantize.
        ValueError: a pattern that matches no linear layer, or is no regular expression.
    """
    check_supported(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = dict(model.named_modules())
    linear = list(_decoder_linears(modules, shapes))
    unused = [p for p in ignore if not any(_matches(p, module) for module in linear)]
    if unused:
        raise ValueError(f"ignore: {unused[0]!r} matches no linear layer of the decoder layers")
    wanted = [m for m in linear if not any(_matches(pattern, m) for pattern in ignore)]
    quantized = [m for m in wanted if _fits(m, shapes[f"{m}.weight"])]
    if not quantized:
        raise CheckpointError("the checkpoint has no linear layer that can be quantized")
    fused = [name for name, shape in shapes.items() if len(shape) == 3]
    if fused:
        logger.warning(
            "%s and its like (%d tensors): left unquantized, the file fuses experts in one tensor",
            fused[0],
            len(fused),
        )
    kept = set(quantized)
    return WeightPlan(
        groups=_groups(quantized, linear),
        ignore=tuple(dict.fromkeys(m for m in _unquantized(modules, shapes) if m not in kept)),
        attentions=tuple(name for name, _ in sorted(_attentions(modules), key=lambda x: x[1])),
    )


def experts_projection(module: str) -> tuple[str, str] | None:
    """`(experts module, its fused parameter)` of an expert's projection; None for other layers."""
    match = _EXPERT.match(module)
    if match is None:
        return None
    fused = "gate_up_proj" if match["projection"] in ("gate_proj", "up_proj") else "down_proj"
    return match["experts"], fused


def _decoder_linears(
    modules: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Names of the linear layers of the decoder layers, in the order of the files."""
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module == name or len(shape) != 2 or not _IN_DECODER_LAYER.search(module):
            continue
        if module.rpartition(".")[2] in _ROUTERS:
            continue
        owner = modules.get(module)
        if isinstance(owner, nn.Linear):
            if tuple(owner.weight.shape) != shape:
                raise CheckpointError(
                    f"{name}: expected {list(owner.weight.shape)}, found {list(shape)}"
                )
            yield module
        elif owner is None and _fused_parameter(modules, module) is not None:
            yield module


def _fits(module: str, shape: tuple[int, ...]) -> bool:
    if shape[1] % nvfp4.BLOCK_SIZE == 0:
        return True
    logger.warning(
        "%s: left unquantized, its %d input features are not a multiple of %d",
        module,
        shape[1],
        nvfp4.BLOCK_SIZE,
    )
    return False


def _fused_parameter(modules: Mapping[str, nn.Module], module: str) -> torch.Tensor | None:
    projection = experts_projection(module)
    if projection is None:
        return None
    parameter = getattr(modules.get(projection[0]), projection[1], None)
    return parameter if isinstance(parameter, torch.Tensor) and parameter.dim() == 3 else None


def _unquantized(
    modules: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Names of all that a reader could take for a linear layer, in the order of the model."""
    for module, owner in modules.items():
        # A tied head has no tensor in the files, and yet readers make a layer for it.
        if isinstance(owner, nn.Linear) or _stores_matrices(owner, module, shapes):
            yield module
    yield from (module for module in _decoder_linears(modules, shapes) if module not in modules)


def _stores_matrices(owner: nn.Module, module: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a module is a router or fused experts: bare matrices, stored as it holds them."""
    return not isinstance(owner, nn.Embedding) and any(
        parameter.dim() in (2, 3) and f"{module}.{name}" in shapes
        for name, parameter in owner.named_parameters(recurse=False)
    )


def _groups(quantized: Sequence[str], linear: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    whole: dict[tuple[str, str], int] = defaultdict(int)
    for module in linear:
        whole[_fused_key(module)] += 1
    for module in quantized:
        groups[_fused_key(module)].append(module)
    for key, members in groups.items():
        if len(members) < whole[key]:
            logger.warning(
                "%s: only part of the layers that engines fuse with it is quantized; "
                "vLLM and others refuse such a checkpoint",
                members[0],
            )
    return tuple(tuple(members) for members in groups.values())


def _fused_key(module: str) -> tuple[str, str]:
    parent, _, leaf = module.rpartition(".")
    return parent, _FUSED.get(leaf, leaf)


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
