"""Calibration data of recipes: statistics of a model's K and V, and their file.

The file is next to `kv_scales.json`, which has its SHA-256: any other file is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import safetensors.torch
import torch

from halfbyte.kvcache.recipe import KVRecipe
from halfbyte.kvcache.transform import KVTransform
from halfbyte.numerics.hadamard import hadamard
from halfbyte.numerics.weighted_rounding import channel_weights, feedback_factor

_BROKEN = (KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)
_FORMAT = "halfbyte-kv-calibration-1"


@dataclass(frozen=True, eq=False)
class RopeAverages:
    """Factors that a rotary embedding applies to a constant, averaged over segments of positions.

    Args:
        cos, sin: float32 `[segments, D]`, see `transform`.
        partner: int64 `[D]`, the channel that each is rotated with.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    partner: torch.Tensor

    def turns_pairs(self) -> bool:
        """Whether both channels of a pair have the same cosine, and sines of opposite sign.

        A channel that is its own partner then has a sine of 0.
        """
        partner = self.partner
        channels = torch.arange(len(partner), device=partner.device)
        return (
            torch.equal(partner[partner], channels)
            and torch.equal(self.cos[:, partner], self.cos)
            and torch.equal(self.sin[:, partner], -self.sin)
        )


@dataclass(frozen=True, eq=False)
class ErrorCosts:
    """Weights of errors in K and V of a layer, per KV head.

    Args:
        factors: float32 `[2, kv_heads, D (D - 1) / 2]`, the error-feedback factor above its
            diagonal, row by row, for unrotated and rotated K.
        k_weights: float32 `[2, kv_heads, D]`, likewise.
        v_weights: float32 `[kv_heads, Dv]`.
    """

    factors: torch.Tensor
    k_weights: torch.Tensor
    v_weights: torch.Tensor

    @classmethod
    def of(cls, moment: torch.Tensor, energy: torch.Tensor) -> ErrorCosts:
        """From statistics of the queries and of the output projection.

        Args:
            moment: float64 `[kv_heads, D, D]`, the queries' E[q q^T] after RoPE, averaged over
                positions.
            energy: float64 `[kv_heads, Dv]`, squares of the output projection's weights, summed.
        """
        rotated = hadamard(hadamard(moment).transpose(1, 2))
        factors, weights = feedback_factor(torch.stack([moment, rotated]))
        rows, columns = _above_diagonal(factors)
        return cls(factors[..., rows, columns], weights, channel_weights(energy))

    def feedback(self, rotate: bool, heads: slice) -> torch.Tensor:
        """Factors of some heads, float32 `[heads, D, D]`."""
        size = self.k_weights.shape[-1]
        above = self.factors[int(rotate), heads]
        result = above.new_zeros(above.shape[0], size, size)
        rows, columns = _above_diagonal(result)
        result[:, rows, columns] = above
        return result


def _above_diagonal(x: torch.Tensor) -> torch.Tensor:
    """Rows and columns, int64 `[2, D (D - 1) / 2]`, of the entries above the diagonal."""
    size = x.shape[-1]
    return torch.triu_indices(size, size, offset=1, device=x.device)


_ON_DEVICES: WeakKeyDictionary[RopeAverages, dict[torch.device, RopeAverages]] = WeakKeyDictionary()


def _rope_on(rope: RopeAverages, device: torch.device) -> RopeAverages:
    """A rotary embedding's tables on a device, the same for all layers."""
    found = _ON_DEVICES.setdefault(rope, {})
    if device not in found:
        found[device] = RopeAverages(*(x.to(device) for x in vars(rope).values()))
    return found[device]


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """One layer's measurements.

    Args:
        mean: float32 `[kv_heads, D]`, of K before RoPE, from position 4 on.
        k_amax: largest |K'| from position 1 on, headroom included, for the four combinations of
            `center` and `rotate`: of neither, rotation, centring, both.
        v_amax: the same of V.
        first_keys, first_values: `[tokens, kv_heads, D]` and `[tokens, kv_heads, Dv]` of the
            model's dtype, at position 0.
        rope: index among the calibration's rotary embeddings.
        costs: of errors; None in older files without them.
    """

    mean: torch.Tensor
    k_amax: tuple[float, ...]
    v_amax: float
    first_keys: torch.Tensor
    first_values: torch.Tensor
    rope: int
    costs: ErrorCosts | None = None


@dataclass(frozen=True, eq=False)
class KVCalibration:
    """A model's measurements.

    Args:
        segment: tokens that share a mean.
        first_tokens: ids of the tokens that `first_keys` are of, in their order.
        layers: of the model, in order.
        ropes: rotary embeddings; models with several kinds of layers may have several.
    """

    segment: int
    first_tokens: tuple[int, ...]
    layers: tuple[LayerCalibration, ...]
    ropes: tuple[RopeAverages, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCalibration) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    @property
    def max_position(self) -> int:
        """Positions below this have a mean in every layer."""
        return self.segment * min(len(rope.cos) for rope in self.ropes)

    def amax(self, layer: int, recipe: KVRecipe) -> tuple[float, float]:
        """`(k_amax, v_amax)` of a layer under a recipe that changes K."""
        measured = self.layers[layer]
        return measured.k_amax[2 * recipe.center + recipe.rotate], measured.v_amax

    def transform(
        self,
        layer: int,
        recipe: KVRecipe,
        device: torch.device | str = "cpu",
        heads: slice = slice(None),
    ) -> KVTransform:
        """The transform of a layer's heads under a recipe, with its tensors on a device."""
        measured = self.layers[layer]
        centring: dict[str, Any] = {}
        if recipe.center:
            rope = _rope_on(self.ropes[measured.rope], torch.device(device))
            centring = {"mean": measured.mean[heads].to(device), **vars(rope)}
        first: dict[str, Any] = {}
        if recipe.keep_first_token and self.first_tokens:
            first = {
                "first_keys": measured.first_keys[:, heads].to(device),
                "first_values": measured.first_values[:, heads].to(device),
            }
        rounding: dict[str, Any] = {}
        if recipe.weighs_errors:
            assert measured.costs is not None, "KVScales.calibration_for refuses it"
            costs = measured.costs
            if recipe.feedback:
                rounding["feedback"] = costs.feedback(recipe.rotate, heads).to(device)
            if recipe.weighted_scales:
                rounding["k_weights"] = costs.k_weights[int(recipe.rotate), heads].to(device)
                rounding["v_weights"] = costs.v_weights[heads].to(device)
        return KVTransform(recipe.rotate, self.segment, **centring, **first, **rounding)

    def has_heads(self, layer: int, num_kv_heads: int, head_size: int, ranks: int) -> bool:
        """Whether a layer has the KV heads of `ranks` ranks with `num_kv_heads` each; if there are
        fewer heads than ranks, each head is on as many ranks."""
        total, size = self.layers[layer].mean.shape
        is_shared = num_kv_heads == 1 and ranks % total == 0
        return size == head_size and (is_shared or total == num_kv_heads * ranks)

    @property
    def has_costs(self) -> bool:
        """Whether it has the data for recipes that weigh errors."""
        return all(layer.costs is not None for layer in self.layers)

    def sha256(self) -> str:
        """Hash of everything that affects the contents of pages, independent of the file."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """As a safetensors file; equal calibrations give equal bytes."""
        tensors: dict[str, torch.Tensor] = {}
        for i, rope in enumerate(self.ropes):
            tensors[f"rope.{i}.cos"], tensors[f"rope.{i}.sin"] = rope.cos, rope.sin
            tensors[f"rope.{i}.partner"] = rope.partner
        for i, layer in enumerate(self.layers):
            tensors[f"layers.{i}.mean"] = layer.mean
            tensors[f"layers.{i}.first_keys"] = layer.first_keys
            tensors[f"layers.{i}.first_values"] = layer.first_values
            numbers = [*layer.k_amax, layer.v_amax]
            amax = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            tensors[f"layers.{i}.amax"] = amax
            if layer.costs is not None:
                for name, tensor in vars(layer.costs).items():
                    tensors[f"layers.{i}.{name}"] = tensor
        fields = {
            "format": _FORMAT,
            "segment": self.segment,
            "first_tokens": list(self.first_tokens),
            "ropes": [layer.rope for layer in self.layers],
        }
        contiguous = {
            name: tensor.cpu().clone().contiguous() for name, tensor in sorted(tensors.items())
        }
        return safetensors.torch.save(contiguous, {"calibration": json.dumps(fields)})

    @classmethod
    def from_bytes(cls, data: bytes) -> KVCalibration:
        """The inverse of `to_bytes`.

        Raises:
            ValueError: another kind of file, or invalid numbers.
        """
        try:
            size = int.from_bytes(data[:8], "little")
            fields = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["calibration"])
            if fields["format"] != _FORMAT:
                raise ValueError(f"format is {fields['format']!r}, expected {_FORMAT!r}")
            tensors = safetensors.torch.load(data)
            ropes = [
                RopeAverages(*(tensors[f"rope.{i}.{part}"] for part in ("cos", "sin", "partner")))
                for i in range(1 + max(fields["ropes"]))
            ]
            layers = [
                _layer_of(tensors, i, rope, ropes[rope]) for i, rope in enumerate(fields["ropes"])
            ]
            first_tokens = tuple(int(token) for token in fields["first_tokens"])
            segment = int(fields["segment"])
        except _BROKEN as error:
            raise ValueError(f"no calibration: {type(error).__name__}: {error}") from None
        except (ValueError, safetensors.SafetensorError) as error:
            raise ValueError(f"no calibration: {error}") from None
        if segment < 1 or any(len(layer.first_keys) != len(first_tokens) for layer in layers):
            raise ValueError("no calibration: segment or number of first tokens is inconsistent")
        return cls(segment, first_tokens, tuple(layers), tuple(ropes))


def _layer_of(
    tensors: dict[str, torch.Tensor], index: int, rope: int, averages: RopeAverages
) -> LayerCalibration:
    mean, first_keys, first_values, amax = (
        tensors[f"layers.{index}.{part}"] for part in ("mean", "first_keys", "first_values", "amax")
    )
    heads, head_size = mean.shape
    fitting = (
        amax.shape == (5,)
        and first_keys.shape[1:] == (heads, head_size)
        and first_values.shape[:2] == first_keys.shape[:2]
        and averages.cos.shape[1:] == averages.sin.shape[1:] == averages.partner.shape
        and averages.partner.shape == (head_size,)
        and int(averages.partner.min()) >= 0
        and int(averages.partner.max()) < head_size
        and averages.turns_pairs()
    )
    if not fitting:
        raise ValueError(f"layer {index} has tensors of inconsistent shapes")
    numbers = amax.tolist()
    if not (amax.isfinite() & (amax > 0)).all() or not mean.isfinite().all():
        raise ValueError(f"layer {index} has {numbers}, expected numbers above 0")
    k0, k1, k2, k3, v = numbers
    costs = None
    if f"layers.{index}.factors" in tensors:
        costs = _costs_of(tensors, index, (heads, head_size), first_values.shape[2])
    return LayerCalibration(mean, (k0, k1, k2, k3), v, first_keys, first_values, rope, costs)


def _costs_of(
    tensors: dict[str, torch.Tensor], index: int, shape: tuple[int, int], head_size_v: int
) -> ErrorCosts:
    heads, size = shape
    factors, k_weights, v_weights = (
        tensors[f"layers.{index}.{part}"] for part in ("factors", "k_weights", "v_weights")
    )
    fitting = (
        factors.shape == (2, heads, size * (size - 1) // 2)
        and k_weights.shape == (2, heads, size)
        and v_weights.shape == (heads, head_size_v)
        and all(x.dtype == torch.float32 for x in (factors, k_weights, v_weights))
    )
    if not fitting:
        raise ValueError(f"layer {index} has weights of errors of inconsistent shapes")
    weights = torch.cat([k_weights.flatten(), v_weights.flatten()])
    if not factors.isfinite().all() or not (weights.isfinite() & (weights > 0)).all():
        raise ValueError(f"layer {index} has weights of errors that are not finite or not above 0")
    return ErrorCosts(factors, k_weights, v_weights)
