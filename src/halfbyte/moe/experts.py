"""Values that describe the experts of one layer: packed matrices and the activation between them.

An expert is `down(activation(gate_up(x)))`. `gate_up` has the rows of gate and up in one matrix,
either gate's before up's (Qwen, Mixtral) or interleaved, gate in the even rows (GPT-OSS).

Two formats of weights:

    nvfp4   E4M3 scales per block of 16, and a float32 decode scale per expert and part
    mxfp4   E8M0 scales per block of 32, no global scale (OCP Microscaling Formats v1.0)
"""

from dataclasses import dataclass
from typing import Literal

import torch

WeightFormat = Literal["nvfp4", "mxfp4"]
BLOCK_SIZES: dict[WeightFormat, int] = {"nvfp4": 16, "mxfp4": 32}
_FORMATS: dict[torch.dtype, WeightFormat] = {torch.float8_e4m3fn: "nvfp4", torch.uint8: "mxfp4"}
"""Formats by the dtype of their block scales."""


@dataclass(frozen=True)
class GatedActivation:
    """`gate * sigmoid(alpha * gate) * (up + up_offset)`, by default SwiGLU.

    Args:
        alpha: factor in the sigmoid.
        limit: clamps gate to at most `limit` and up to `-limit .. limit`; None for no clamps.
        up_offset: added to up.
        interleaved: gate is in the even columns and up in the odd ones; else gate before up.

    Raises:
        ValueError: a limit that is not positive.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit: expected a positive number or None, got {self.limit}")

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[..., 2 * I]` to `[..., I]`, in the dtype of the input."""
        if self.interleaved:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        # Not torch.sigmoid, whose last bit on a CPU depends on the position in the tensor.
        return gate / (1 + (-self.alpha * gate).exp()) * (up + self.up_offset)


SWIGLU = GatedActivation()
GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)
"""transformers' `GptOssExperts`, with the values of its checkpoints."""


@dataclass(frozen=True)
class ExpertMatrices:
    """One matrix `[N, K]` of each of E experts.

    Args:
        weight: uint8 `[E, N, K/2]`, E2M1 codes, the even k in the low nibble.
        scales: block scales: float8_e4m3fn `[E, N, K/16]` (nvfp4), or E8M0 as uint8 `[E, N, K/32]`
            (mxfp4).
        global_scale: float32 `[E, P]`, decode scales of each expert's P equal parts (gate and up;
            with interleaved rows, of even and odd rows); None for mxfp4.
        bias: floating point `[E, N]`, or None.

    Raises:
        ValueError: a tensor whose dtype or shape does not fit the others.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.scales.dtype not in _FORMATS:
            raise ValueError(
                f"scales: expected float8_e4m3fn (nvfp4) or uint8 (mxfp4), got {self.scales.dtype}"
            )
        if self.weight.dtype != torch.uint8 or self.weight.dim() != 3:
            raise ValueError(f"weight: expected uint8 [E, N, K/2], got {_describe(self.weight)}")
        (e, n), k, block = self.weight.shape[:2], self.k, BLOCK_SIZES[self.format]
        if k == 0 or k % block:
            raise ValueError(
                f"weight: expected K in multiples of {block} for {self.format}, got K = {k}"
            )
        _check(self.scales, "scales", (self.scales.dtype,), (e, n, k // block))
        if (self.global_scale is None) != (self.format == "mxfp4"):
            raise ValueError("global_scale: expected float32 [E, P] for nvfp4, None for mxfp4")
        if self.global_scale is not None:
            parts = self.global_scale.shape[-1] if self.global_scale.dim() else 1
            if parts not in (1, 2) or n % parts:
                raise ValueError(
                    f"global_scale: expected one or two parts that divide N = {n}, "
                    f"got {_describe(self.global_scale)}"
                )
            _check(self.global_scale, "global_scale", (torch.float32,), (e, parts))
        if self.bias is not None:
            floats = (torch.float32, torch.float16, torch.bfloat16)
            _check(self.bias, "bias", floats, (e, n))
        tensors = (self.weight, self.scales, self.global_scale, self.bias)
        devices = {tensor.device for tensor in tensors if tensor is not None}
        if len(devices) > 1:
            raise ValueError(f"expected tensors on one device, got {sorted(map(str, devices))}")

    @property
    def format(self) -> WeightFormat:
        """The weights' format, determined by the dtype of the block scales."""
        return _FORMATS[self.scales.dtype]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weight.shape[0]

    @property
    def n(self) -> int:
        """Output features of an expert's matrix."""
        return self.weight.shape[1]

    @property
    def k(self) -> int:
        """Input features."""
        return 2 * self.weight.shape[2]

    def row_scales(self, interleaved: bool = False) -> torch.Tensor:
        """float32 `[E, N]`, the global scale of every row (1 for mxfp4).

        Args:
            interleaved: rows of the two parts alternate.
        """
        if self.global_scale is None:
            shape = self.weight.shape[:2]
            return torch.ones(shape, dtype=torch.float32, device=self.weight.device)
        repeats = self.n // self.global_scale.shape[1]
        if interleaved:
            return self.global_scale.repeat(1, repeats)
        return self.global_scale.repeat_interleave(repeats, dim=1)


@dataclass(frozen=True)
class PackedExperts:
    """The experts of one layer, H hidden and I intermediate features.

    Args:
        gate_up: N = 2 * I, K = H.
        down: N = H, K = I; one part.
        activation: applied between them.

    Raises:
        ValueError: matrices that do not fit each other.
    """

    gate_up: ExpertMatrices
    down: ExpertMatrices
    activation: GatedActivation = SWIGLU

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up, self.down
        expected = (gate_up.num_experts, gate_up.k, gate_up.n // 2)
        found = (down.num_experts, down.n, down.k)
        if gate_up.n % 2 or found != expected:
            raise ValueError(
                f"down: expected [E, N, K] = {list(expected)}, as gate_up is "
                f"{[gate_up.num_experts, gate_up.n, gate_up.k]}, got {list(found)}"
            )
        if down.global_scale is not None and down.global_scale.shape[1] != 1:
            raise ValueError(f"down: expected one global scale, got {_describe(down.global_scale)}")
        ours, theirs = _kind(gate_up), _kind(down)
        if ours != theirs:
            raise ValueError(f"down: expected {ours}, as gate_up is, got {theirs}")

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.num_experts

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.gate_up.k

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.down.k

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.gate_up.weight.device


def _kind(matrices: ExpertMatrices) -> str:
    bias = "without bias" if matrices.bias is None else "with bias"
    return f"{matrices.format} {bias} on {matrices.weight.device}"


def _check(
    tensor: torch.Tensor, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        names = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected {names} {list(shape)}, got {_describe(tensor)}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
