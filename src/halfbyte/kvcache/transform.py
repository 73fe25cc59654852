"""How a recipe changes K before it is packed: segment means, the rotation, token 0.

    packed    K' = hadamard(K - mean(segment))
    scores    q . K = hadamard(q) . K' + q . mean(segment)

The mean of a segment of positions is the channel's constant, rotated by RoPE and averaged there:

    mean(s)[c] = cos[s, c] * m[c] + sin[s, c] * m[partner(c)]

with `m` the mean of K before RoPE, and `cos[s]`, `sin[s]` the rotary embedding's own factors (signs
included), averaged over the positions of segment s: both channels of a pair have the same cosine,
and sines of opposite sign. Products are rounded to float32 before their
sum, and the difference `K - mean` before the rotation, so that kernels can be bit-equal.

Recipes that weigh errors quantize K' and V by `numerics.weighted_rounding`, with factors and
weights per KV head. Reading is unaffected.

Token 0 of a sequence: its K and V depend on the token id only, so those of common first tokens are
constants of the model. If a KV head's K and V at position 0 are such constants, the page marks it:
the first block scale of K is `MARK`, a NaN that no quantizer writes, and the first byte of K's data
is the constant's index. Readers then use the constants. Any other first token is packed as usual.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from halfbyte.kernels.cpu.transform import CpuTransform
from halfbyte.numerics.hadamard import hadamard

MARK = 0xFF
"""Block scale of K that marks a slot whose K and V are constants of the model."""
_REPEATED_SEGMENTS = 15
"""Copies of the last segment behind the angles that decode reads."""
_QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MATCH_TOLERANCE = 2.0**-6
"""Tolerance, relative to the absmax, for K and V to match a constant.

K and V of the same token differ only by rounding, from the order of sums in a matmul.
"""


class MeanTables(NamedTuple):
    """Inputs from which kernels compute means: contiguous, float32, on the device of the pages."""

    cos: torch.Tensor
    """`[segments, D]`"""
    sin: torch.Tensor
    mean: torch.Tensor
    """`[kv_heads, D]`, of each channel."""
    partner_mean: torch.Tensor
    """`mean` of the channel that RoPE pairs with each."""


class PairTables(NamedTuple):
    """The same by channel pairs (half as many), for dot products:

        q . mean(s) = sum over pairs of  cos[s] (q[low] m[low] + q[high] m[high])
                                       + sin[s] (q[low] m[high] - q[high] m[low])

    A channel without RoPE is a pair of its own, with 0 for the other mean.
    """

    low: torch.Tensor
    """int32 `[pairs]`, channels; padded with 0 to a power of two, at least 16."""
    high: torch.Tensor
    cos: torch.Tensor
    """float32 `[segments, pairs]`"""
    sin: torch.Tensor
    low_mean: torch.Tensor
    """float32 `[kv_heads, pairs]`"""
    high_mean: torch.Tensor


@dataclass(frozen=True, eq=False)
class KVTransform:
    """The transform of one layer, on the device of its pages.

    Args:
        rotate: whether K is multiplied by the Hadamard matrix.
        segment: tokens that share a mean.
        mean: float32 `[kv_heads, D]`, K before RoPE; None where K is not centred.
        partner: int64 `[D]`, the channel that RoPE pairs with each one.
        cos, sin: float32 `[segments, D]`.
        first_keys, first_values: `[tokens, kv_heads, D]` and `[tokens, kv_heads, Dv]` in the
            model's dtype; None where the first token is packed like the others.
        feedback: float32 `[kv_heads, D, D]`, zeros on and below the diagonal; None where channels
            of K' are rounded independently.
        k_weights, v_weights: float32 `[kv_heads, D]` and `[kv_heads, Dv]`, of channels of K' and V;
            None where the format chooses its scales.
    """

    rotate: bool
    segment: int
    mean: torch.Tensor | None = None
    partner: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    first_keys: torch.Tensor | None = None
    first_values: torch.Tensor | None = None
    feedback: torch.Tensor | None = None
    k_weights: torch.Tensor | None = None
    v_weights: torch.Tensor | None = None

    @property
    def weighs_errors(self) -> bool:
        """Whether a store must round by weighted error."""
        return self.feedback is not None or self.k_weights is not None

    @cached_property
    def for_cpu(self) -> CpuTransform:
        """The transform as the C++ kernels read it."""
        centring, first = None, None
        if self.mean is not None:
            assert self.cos is not None
            assert self.sin is not None
            centring = (self.mean, self.cos, self.sin)
        if self.first_keys is not None:
            assert self.first_values is not None
            first = (self.first_keys, self.first_values)
        rounding = (self.feedback, self.k_weights, self.v_weights)
        return CpuTransform(self.rotate, self.segment, centring, self.partner, first, rounding)

    @cached_property
    def mean_tables(self) -> MeanTables | None:
        """Means for kernels that store or unpack; None where K is not centred."""
        if self.mean is None or self.cos is None or self.sin is None:
            return None
        tables = self.cos, self.sin, self.mean, self.mean[:, self.partner]
        return MeanTables(*(table.float().contiguous() for table in tables))

    @cached_property
    def pair_tables(self) -> PairTables | None:
        """Means for kernels that compute scores; None where K is not centred."""
        if self.mean is None or self.cos is None or self.sin is None:
            return None
        assert self.partner is not None
        partner = self.partner.cpu()
        is_first = torch.arange(len(partner), device="cpu") <= partner
        low = is_first.nonzero().flatten()
        high = partner[low]
        padding = max(16, 1 << (len(low) - 1).bit_length()) - len(low)
        columns = [table[:, low.to(table.device)] for table in (self.cos, self.sin, self.mean)]
        columns.append(self.mean[:, high.to(self.mean.device)] * (low != high).to(self.mean.device))
        channels = [F.pad(x.int(), (0, padding)).to(self.mean.device) for x in (low, high)]
        return PairTables(*channels, *(F.pad(x.float(), (0, padding)) for x in columns))

    @cached_property
    def split_angles(self) -> torch.Tensor | None:
        """`cos` and `sin` of `pair_tables` for matmuls of bfloat16, as sums of two numbers.

        Returns:
            int32 `[segments + 15, pairs, 2]`: a word with the rounded cosine (low half) and sine,
            and one with what rounding left of both. The last segment is repeated, because decode
            copies 16 at a time. None where K is not centred.
        """
        tables = self.pair_tables
        if tables is None:
            return None
        exact = torch.stack((tables.cos, tables.sin), -1)
        exact = torch.cat((exact, exact[-1:].expand(_REPEATED_SEGMENTS, -1, -1)))
        high = exact.bfloat16()
        low = (exact - high.float()).bfloat16()
        return torch.stack((high, low), -2).view(torch.int32).squeeze(-1)

    @cached_property
    def pairs_are_halves(self) -> bool:
        """Whether RoPE pairs channel i with channel D/2 + i, and all channels. Syncs."""
        if self.partner is None:
            return False
        partner = self.partner.cpu()
        swapped = torch.arange(len(partner), device="cpu").roll(len(partner) // 2)
        return torch.equal(partner, swapped)

    @property
    def is_on_gpu(self) -> bool:
        """Whether kernels on a GPU read it."""
        tensors = (self.mean, self.first_keys)
        return any(tensor is not None and tensor.is_cuda for tensor in tensors)

    def prepare(self) -> None:
        """Make the tables of GPU kernels now: it syncs, which cannot be captured in a graph."""
        _ = self.mean_tables, self.pair_tables, self.split_angles, self.pairs_are_halves
        _ = self._first_tokens

    def first_tokens(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`first_keys` and `first_values` in a dtype of queries, contiguous; None where there are
        none."""
        return None if self._first_tokens is None else self._first_tokens[dtype]

    @cached_property
    def _first_tokens(self) -> Mapping[torch.dtype, tuple[torch.Tensor, torch.Tensor]] | None:
        """Converted once: decode reads them in every layer and step."""
        keys, values = self.first_keys, self.first_values
        if keys is None or values is None:
            return None
        return {d: (keys.to(d).contiguous(), values.to(d).contiguous()) for d in _QUERY_DTYPES}

    @property
    def shared_tokens(self) -> int:
        """Tokens that share a mean; 0 where K is not centred."""
        return 0 if self.mean is None else self.segment

    @property
    def max_position(self) -> int | None:
        """Positions below this have a mean; None where there is no limit."""
        return None if self.cos is None else self.cos.shape[0] * self.segment

    def means(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Means subtracted from K at positions `[n]`: float32 `[n, kv_heads, D]`, or None."""
        if self.mean is None:
            return None
        assert self.cos is not None
        assert self.sin is not None
        segments = positions // self.segment
        cos, sin = self.cos[segments][:, None], self.sin[segments][:, None]
        return cos * self.mean + sin * self.mean[:, self.partner]

    def forward(self, key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """K' from K.

        Args:
            key: float `[n, kv_heads, D]`.
            positions: int64 `[n]`, in the sequence.

        Returns:
            float32 `[n, kv_heads, D]`.
        """
        result = key.float()
        means = self.means(positions)
        if means is not None:
            result = result - means
        return hadamard(result) if self.rotate else result

    def inverse(self, packed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """K from K', in its dtype (float32 or float64)."""
        result = hadamard(packed) if self.rotate else packed
        means = self.means(positions)
        return result if means is None else result + means

    def match_first(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Which constant each head's K and V at position 0 are.

        Args:
            key, value: `[n, kv_heads, D]` and `[n, kv_heads, Dv]`, all at position 0.

        Returns:
            int64 `[n, kv_heads]`, -1 for none.
        """
        found = torch.full(key.shape[:2], -1, dtype=torch.int64, device=key.device)
        if self.first_keys is None or self.first_values is None:
            return found
        for index in reversed(range(self.first_keys.shape[0])):
            same = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
            for x, constants in ((key, self.first_keys), (value, self.first_values)):
                constant = constants[index].float()
                distance = (x.float() - constant).abs().amax(-1)
                same &= distance <= MATCH_TOLERANCE * constant.abs().amax(-1)
            found[same] = index
        return found
