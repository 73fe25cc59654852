"""What a model's own rotary embedding does to a constant: averages over segments of positions.

Every rotary embedding turns channels in pairs. Which ones, and how far, is read off by turning two
probes with the function that the model itself calls, so that partial rotations, scaled frequencies
and factors on cosine and sine need nothing of their own here.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfbyte.kvcache.calibration import RopeAverages

_POSITIONS_AT_ONCE = 2**14


class RotaryProbe:
    """The rotation of one kind of layer.

    Args:
        model: a transformers model, its buffers on some device.
        layer_type: of `config.layer_types`, or None where there is one kind.

    Raises:
        ValueError: a model without a rotary embedding that could be asked.
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

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Vectors `[n, D]`, each turned to its position `[n]`: float32 `[n, D]`."""
        x = x.to(self._device, torch.float32)[None, None]
        arguments = () if self._layer_type is None else (self._layer_type,)
        cos, sin = self._embedding(x, positions[None].to(self._device), *arguments)
        return self._rotate(x, x, cos, sin)[1][0, 0]

    def factors(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(cos, sin)`, float32 `[n, D]`: x turned is `cos x[c] + sin x[partner(c)]`."""
        n, size = positions.shape[0], self._head_size
        channels = torch.arange(size, device="cpu")
        first = channels <= self.partner  # of each pair; channels that do not turn, too
        probes = torch.stack([first, ~first]).float()
        one, other = (self.turn(probe.expand(n, size), positions).cpu() for probe in probes)
        cos = torch.where(first, one, other)
        sin = torch.where(first, other, one)
        return cos, torch.where(self.partner == channels, 0.0, sin)

    def averages(self, num_positions: int, segment: int) -> RopeAverages:
        """Factors averaged over segments, for positions below a number (rounded up)."""
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
            raise ValueError("the rotary embedding does more than to turn pairs of channels")
        return averages

    def turned_back(self, key: torch.Tensor) -> torch.Tensor:
        """K before RoPE, of K after it: float32 `[n, heads, D]`, positions 0 up to n.

        The rotation of a pair is orthogonal but for a factor that is the same for both channels.
        """
        positions = torch.arange(key.shape[0], device="cpu")
        cos, sin = (x[:, None].to(key.device) for x in self.factors(positions))
        x = key.float()
        partner = self.partner.to(key.device)
        # The transposed matrix: what channel c gave to its partner comes back.
        back = cos * x + sin[..., partner] * x[..., partner]
        return back / (cos**2 + sin**2)

    def _partners(self) -> torch.Tensor:
        size = self._head_size
        units = torch.eye(size, dtype=torch.float32, device="cpu")
        turned = self.turn(units, torch.ones(size, dtype=torch.int64, device="cpu")).cpu()
        others = turned != 0
        others.fill_diagonal_(False)
        if (others.sum(1) > 1).any():
            raise ValueError("the rotary embedding turns more than two channels together")
        alone = ~others.any(1)
        return torch.where(alone, torch.arange(size, device="cpu"), others.int().argmax(1))
