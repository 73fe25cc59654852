"""Averages a model's rotary embedding over segments of positions.

Every rotary embedding rotates pairs of channels. The pairs and angles are measured by rotating two
probe vectors with the model's own function, so that partial rotations, scaled frequencies and
factors on cosine and sine need no special cases.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.kvcache.calibration import RopeAverages

_POSITIONS_AT_ONCE = 2**14


@dataclass(frozen=True, eq=False)
class MomentAverage:
    """Averages a second moment over the positions that a rotary embedding rotates vectors to.

    Args:
        cos_cos, cos_sin, sin_sin: float64 `[D, D]`, outer products of `RotaryProbe.factors`,
            averaged over positions.
        partner: int64 `[D]`, the channel that each is rotated with.
    """

    cos_cos: torch.Tensor
    cos_sin: torch.Tensor
    sin_sin: torch.Tensor
    partner: torch.Tensor

    def of(self, moment: torch.Tensor) -> torch.Tensor:
        """Mean over positions p of `R_p M R_p^T`, with R_p the rotation to p.

        As `(R_p x)[c] = cos_p[c] x[c] + sin_p[c] x[partner(c)]`, an entry of `R_p M R_p^T` is a
        sum of four entries of M, each times a product of two factors.

        Args:
            moment: M = E[x x^T] of vectors before the rotation, float64 `[..., D, D]`.
        """
        columns = moment[..., self.partner]
        return (
            self.cos_cos * moment
            + self.cos_sin * columns
            + self.cos_sin.T * moment[..., self.partner, :]
            + self.sin_sin * columns[..., self.partner, :]
        )


class RotaryProbe:
    """Rotary embedding of one layer type.

    Args:
        model: a transformers model, its buffers on some device.
        layer_type: of `config.layer_types`, or None if all layers have the same type.

    Raises:
        ValueError: the model has no rotary embedding that can be called.
    """

    def __init__(self, model: nn.Module, layer_type: str | None) -> None:
        base: Any = getattr(model, "base_model", model)
        embedding = getattr(base, "rotary_emb", None)
        rotate = getattr(sys.modules[type(base).__module__], "apply_rotary_pos_emb", None)
        if embedding is None or rotate is None:
            raise ValueError(
                f"{type(model).__name__}: has no rotary embedding whose angles could be read"
            )
        self._embedding: Callable[..., tuple[torch.Tensor, torch.Tensor]] = embedding
        self._rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rotate
        self._layer_type = layer_type
        self._device = next(iter(embedding.buffers())).device
        config: Any = model.config
        self._head_size: int = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.partner = self._partners()

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate vectors `[n, D]` to positions `[n]`: float32 `[n, D]`."""
        x = x.to(self._device, torch.float32)[None, None]
        arguments = () if self._layer_type is None else (self._layer_type,)
        cos, sin = self._embedding(x, positions[None].to(self._device), *arguments)
        return self._rotate(x, x, cos, sin)[1][0, 0]

    def factors(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(cos, sin)`, float32 `[n, D]`: rotated x is `cos x[c] + sin x[partner(c)]`."""
        n, size = positions.shape[0], self._head_size
        channels = torch.arange(size, device="cpu")
        first = channels <= self.partner  # of each pair; also unrotated channels
        probes = torch.stack([first, ~first]).float()
        one, other = (self.rotate(probe.expand(n, size), positions).cpu() for probe in probes)
        cos = torch.where(first, one, other)
        sin = torch.where(first, other, one)
        return cos, torch.where(self.partner == channels, 0.0, sin)

    def moment_average(self, num_positions: int) -> MomentAverage:
        """The average of second moments over all positions below `num_positions`."""
        size = self._head_size
        products = torch.zeros(3, size, size, dtype=torch.float64, device="cpu")
        for begin in range(0, num_positions, _POSITIONS_AT_ONCE):
            end = min(begin + _POSITIONS_AT_ONCE, num_positions)
            factors = self.factors(torch.arange(begin, end, device="cpu"))
            cos, sin = (x.double() for x in factors)
            products += torch.stack([cos.T @ cos, cos.T @ sin, sin.T @ sin])
        cos_cos, cos_sin, sin_sin = products / num_positions
        return MomentAverage(cos_cos, cos_sin, sin_sin, self.partner)

    def averages(self, num_positions: int, segment: int) -> RopeAverages:
        """Factors averaged over segments, for positions below `num_positions` (rounded up)."""
        segments = -(-num_positions // segment)
        step = max(1, _POSITIONS_AT_ONCE // segment)
        parts = []
        for begin in range(0, segments, step):
            end = min(begin + step, segments)
            factors = self.factors(torch.arange(begin * segment, end * segment, device="cpu"))
            parts.append([x.double().unflatten(0, (-1, segment)).mean(1) for x in factors])
        cos, sin = (torch.cat(part).float() for part in zip(*parts, strict=True))
        averages = RopeAverages(cos, sin, self.partner)
        if not averages.turns_pairs():
            raise ValueError("the rotary embedding does more than rotate pairs of channels")
        return averages

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        """Undo RoPE: K or Q before it, float32 `[n, heads, D]`, from those after it.

        Args:
            x: `[n, heads, D]`, at positions 0 .. n - 1.

        The rotation of a pair is orthogonal up to a factor that both channels share.
        """
        positions = torch.arange(x.shape[0], device="cpu")
        cos, sin = (factor[:, None].to(x.device) for factor in self.factors(positions))
        x, partner = x.float(), self.partner.to(x.device)
        # Multiply by the transpose, then divide by the squared factor.
        back = cos * x + sin[..., partner] * x[..., partner]
        return back / (cos**2 + sin**2)

    def _partners(self) -> torch.Tensor:
        size = self._head_size
        units = torch.eye(size, dtype=torch.float32, device="cpu")
        rotated = self.rotate(units, torch.ones(size, dtype=torch.int64, device="cpu")).cpu()
        partners = rotated != 0
        partners.fill_diagonal_(False)
        if (partners.sum(1) > 1).any():
            raise ValueError("the rotary embedding mixes more than two channels")
        alone = ~partners.any(1)
        return torch.where(alone, torch.arange(size, device="cpu"), partners.int().argmax(1))
