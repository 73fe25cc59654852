"""Compares a checkpoint's experts with a layer before vLLM loads them.

vLLM cuts what is larger than a parameter, leaves a part of it unset where a tensor is smaller, and
ignores experts that the layer does not have, without a message.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.moe.experts import BLOCK_SIZES, WeightFormat
from halfbyte.plugins.vllm.scales import folder_of

_READ_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors")
"""Load formats that read safetensors of a local folder."""
_GATE_UP, _DOWN = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")
_EXPERT = re.compile(r"(.+)\.(-?\d+)\.([^.]+)\.([^.]+)")
"""A tensor of one expert: the layer's name, the expert's number, projection, tensor."""


class StoredExperts:
    """The experts in a checkpoint's headers.

    Args:
        index: of the checkpoint.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self.tensors = index.tensors
        self.numbers: Mapping[str, set[int]] = defaultdict(set)
        """Numbers of experts, by layer."""
        for name in index.tensors:
            found = _EXPERT.fullmatch(name)
            if found and found[3] in _GATE_UP + _DOWN:
                self.numbers[found[1]].add(int(found[2]))

    @classmethod
    def of(cls, vllm_config: Any) -> "StoredExperts | None":
        """Those that a run loads; None if it reads no safetensors of a folder.

        Args:
            vllm_config: vLLM's.
        """
        model, load = vllm_config.model_config, vllm_config.load_config
        if (
            model is None
            or str(getattr(load, "load_format", "")).split(".")[-1] not in _READ_FORMATS
        ):
            return None
        try:
            folder = folder_of(model, load)
        except (ValueError, OSError):
            return None
        files = sorted(folder.glob("*.safetensors*"))
        stats = tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
        return _read(folder, stats)

    def check(self, layer_name: str, moe: Any, weight_format: WeightFormat) -> None:
        """Compare a layer; tensors that are not found under its name are not checked.

        Args:
            layer_name: of the experts, as in the files.
            moe: vLLM's `FusedMoEConfig`.
            weight_format: of the weights.

        Raises:
            ValueError: a tensor has another shape, or there are more experts; names layer and
                expert.
        """
        surplus = [n for n in self.numbers.get(layer_name, ()) if not 0 <= n < moe.num_experts]
        if surplus:
            raise ValueError(
                f"{layer_name}: expected experts 0 to {moe.num_experts - 1}, found {min(surplus)}"
            )
        for what, name, shape in (*_by_expert(moe, weight_format), *_of_gpt_oss(moe)):
            entry = self.tensors.get(f"{layer_name}.{name}")
            if entry is not None and entry.shape != shape:
                raise ValueError(
                    f"{layer_name}: {what}: expected shape {list(shape)}, found {list(entry.shape)}"
                )


def check_top_k(layer_name: str, moe: Any) -> None:
    """Raise ValueError if a token has more experts than there are.

    Args:
        layer_name: of the experts.
        moe: vLLM's `FusedMoEConfig`.
    """
    top_k, experts = moe.experts_per_token, moe.num_experts
    if not 1 <= top_k <= experts:
        raise ValueError(f"{layer_name}: expected 1 to {experts} experts per token, found {top_k}")


@lru_cache(maxsize=2)
def _read(folder: Path, stats: tuple[tuple[str, int, int], ...]) -> StoredExperts | None:
    """Experts of a folder whose files have these names, times and sizes."""
    try:
        return StoredExperts(CheckpointIndex.read(folder))
    except CheckpointError:
        return None  # vLLM says what it expects


def _by_expert(moe: Any, weight_format: WeightFormat) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """What an error says, name and shape of ModelOpt's and compressed-tensors' tensors."""
    hidden, intermediate = moe.hidden_dim, moe.intermediate_size
    for expert in range(moe.num_experts):
        for projections, n, k in ((_GATE_UP, intermediate, hidden), (_DOWN, hidden, intermediate)):
            shapes = {
                "weight": (n, k // 2),
                "weight_packed": (n, k // 2),
                "weight_scale": (n, k // BLOCK_SIZES[weight_format]),
            }
            for projection in projections:
                for tensor, shape in shapes.items():
                    name = f"{projection}.{tensor}"
                    yield f"expert {expert}: {name}", f"{expert}.{name}", shape


def _of_gpt_oss(moe: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The same of GPT-OSS's own files, whose tensors are of all experts."""
    block, hidden, intermediate = BLOCK_SIZES["mxfp4"], moe.hidden_dim, moe.intermediate_size
    for projection, n, k in (
        ("gate_up_proj", 2 * intermediate, hidden),
        ("down_proj", hidden, intermediate),
    ):
        blocks = moe.num_experts, n, k // block
        for suffix, shape in (
            ("blocks", (*blocks, block // 2)),
            ("scales", blocks),
            ("bias", blocks[:2]),
        ):
            yield f"{projection}_{suffix}", f"{projection}_{suffix}", shape
