"""Converts a layer's tensors between checkpoint dialects and the module, with checks.

A dialect determines tensor names and the direction of global scales (encode or decode) in a file.
The module has one form, that of `base.py`. 1/(1/g) is not always g, so the file's own value of a
global scale is kept (`StoredGlobalScale`) and written back unchanged."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from halfbyte.checkpoints.dialects.base import Dialect, TensorNames
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.validate import is_bad_block_scale
from halfbyte.numerics import nvfp4
from halfbyte.numerics.e4m3 import E4M3_NAN

Role = Literal["weight", "weight_scale", "weight_global_scale", "input_global_scale", "bias"]


@dataclass(frozen=True)
class StoredGlobalScale:
    """A global scale as stored in a file.

    Args:
        value: float, one element or one per part, of any shape.
        is_decode: whether values are codes times it (decode), or codes divided by it (encode).
    """

    value: torch.Tensor
    is_decode: bool

    def decode(self) -> torch.Tensor:
        """float32 `[elements]`, decode scales."""
        return self._in_direction(True)

    def decode_weights(self) -> torch.Tensor:
        """Decode scales for which dequantized bfloat16 weights equal those of the file's own
        library.

        Libraries multiply in another order, which can round differently at ties between two
        bfloat16 values; a scale one or two floats away gives the same values in our order.
        """
        stored, decode = self.value.float().reshape(-1), self.decode()
        if decode.is_meta:
            return decode
        up, down = torch.full_like(decode, torch.inf), torch.zeros_like(decode)
        above, below = torch.nextafter(decode, up), torch.nextafter(decode, down)
        others = (above, below, torch.nextafter(above, up), torch.nextafter(below, down))
        best = decode
        for other in others:
            alike = nvfp4.readers_agree(stored, best, is_decode=self.is_decode)
            if bool(alike.all()):
                return best
            better = ~alike & nvfp4.readers_agree(stored, other, is_decode=self.is_decode)
            best = torch.where(better, other, best)
        return best

    def encode(self) -> torch.Tensor:
        """float32 `[elements]`, encode scales."""
        return self._in_direction(False)

    def in_dialect(self, names: TensorNames) -> torch.Tensor:
        """The scale in a dialect's direction: the same tensor if the direction is the same.

        Else float32, in the dialect's usual shape: `[]` for ModelOpt, `[1]` for
        compressed-tensors, `[P]` for several parts.
        """
        if self.is_decode == names.global_scale_is_decode:
            return self.value
        values = self._in_direction(names.global_scale_is_decode)
        return values.reshape(scale_shape(values.numel(), names))

    def _in_direction(self, is_decode: bool) -> torch.Tensor:
        values = self.value.float().reshape(-1)
        return values if is_decode == self.is_decode else torch.ones_like(values) / values


def scale_shape(num_parts: int, names: TensorNames) -> tuple[int, ...]:
    """Shape of a global scale in a dialect's files."""
    return names.scale_shape if num_parts == 1 else (num_parts,)


def file_names(dialect: Dialect) -> dict[str, Role]:
    """Role of each tensor name of a dialect."""
    names = TENSOR_NAMES[dialect]
    return {
        names.weight: "weight",
        names.weight_scale: "weight_scale",
        names.weight_global_scale: "weight_global_scale",
        names.input_global_scale: "input_global_scale",
        "bias": "bias",
    }


def dialect_of(names: Iterable[str], otherwise: Dialect) -> Dialect:
    """The dialect that has these names; `otherwise` if both have them.

    Raises:
        CheckpointError: names of both dialects.
    """
    present = set(names)
    own = {dialect: set(file_names(dialect)) for dialect in TENSOR_NAMES}
    shared = set.intersection(*own.values())
    found = {dialect: sorted(present & own[dialect] - shared) for dialect in TENSOR_NAMES}
    spoken = [dialect for dialect in TENSOR_NAMES if found[dialect]]
    if len(spoken) > 1:
        listed = " and ".join(f"{', '.join(found[d])} ({d})" for d in spoken)
        raise CheckpointError(f"expected the tensors of one dialect, found {listed}")
    return spoken[0] if spoken else otherwise


@dataclass(frozen=True)
class Expected:
    """Expected tensors of a layer: N output and K input features, P parts."""

    n: int
    k: int
    num_parts: int

    def read(
        self, tensors: Mapping[str, torch.Tensor], dialect: Dialect, layer_name: str
    ) -> dict[Role, torch.Tensor]:
        """Tensors of a file by role: codes as uint8, block scales as float8_e4m3fn.

        Global scales and the bias stay as they are.

        Args:
            tensors: by file name; may be incomplete.
            dialect: of the names.
            layer_name: for messages; may be empty.

        Raises:
            CheckpointError: one does not fit; the message names it, what was expected and found.
        """
        result: dict[Role, torch.Tensor] = {}
        for name, role in file_names(dialect).items():
            if name in tensors:
                result[role] = self._read(tensors[name], role, full_name(layer_name, name))
        return result

    def _read(self, tensor: torch.Tensor, role: Role, name: str) -> torch.Tensor:
        if role == "weight":
            fits = tensor.dtype in (torch.uint8, torch.float4_e2m1fn_x2)
            _check(fits, tensor, name, "uint8", (self.n, self.k // 2))
            return tensor.view(torch.uint8)
        if role == "weight_scale":
            fits = tensor.dtype == torch.float8_e4m3fn
            _check(fits, tensor, name, "float8_e4m3fn", (self.n, self.k // 16))
            return tensor.view(torch.float8_e4m3fn)
        if role == "bias":
            fits = tensor.is_floating_point() and tensor.dtype.itemsize > 1
            _check(fits, tensor, name, "float", (self.n,))
            return tensor
        counts = {1, self.num_parts} if role == "weight_global_scale" else {1}
        if tensor.dtype != torch.float32 or tensor.numel() not in counts:
            raise CheckpointError(
                f"{name}: expected float32 with {' or '.join(map(str, sorted(counts)))} elements, "
                f"found {describe(tensor)}"
            )
        return tensor


def full_name(layer_name: str, name: str) -> str:
    """A tensor's name, prefixed with the layer's if known."""
    return f"{layer_name}.{name}" if layer_name else name


def describe(tensor: torch.Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_block_scales(scales: torch.Tensor, name: str) -> None:
    """Raise CheckpointError if a block scale is NaN (never loaded) or has a sign (-0.0 too)."""
    bad = int(is_bad_block_scale(scales).sum())
    if not bad:
        return
    nan = int(((scales.view(torch.uint8) & 0x7F) == E4M3_NAN).sum())
    found = _or_never(nan, scales.numel()) if nan else f"{bad} of {scales.numel()} with a sign"
    raise CheckpointError(f"{name}: expected finite block scales without a sign, found {found}")


def check_global_scale(scale: torch.Tensor, name: str, *, zero_is_valid: bool) -> None:
    """Raise CheckpointError unless decode scales are finite and positive (or 0)."""
    nan = int(scale.isnan().sum())
    if nan:
        found = _or_never(nan, scale.numel())
    elif bool(((scale < 0) | (scale.isinf())).any()) or not (zero_is_valid or bool(scale.all())):
        found = f"the decode scale {scale.tolist()}"
    else:
        return
    raise CheckpointError(f"{name}: expected a finite scale above 0, found {found}")


def _or_never(nan: int, total: int) -> str:
    return "NaN only: never loaded, or loaded as NaN" if nan == total else f"{nan} NaN of {total}"


def _check(fits: bool, tensor: torch.Tensor, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if not fits or tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name}: expected {dtype} {list(shape)}, found {describe(tensor)}")
