"""`NvFp4Experts`: experts with NVFP4 weights, from checkpoints with separate tensors per expert.

Files hold gate, up and down projections per expert (`3.gate_proj.weight`, ...), in the names of a
dialect; the layer holds two stacks of matrices (`PackedExperts`). A file's global scales are kept
as the file has them, because 1/(1/g) is not always g."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.linear.layer_tensors import (
    Expected,
    Role,
    StoredGlobalScale,
    check_block_scales,
    check_global_scale,
    dialect_of,
    file_names,
    full_name,
    scale_shape,
)
from halfbyte.moe.as_loaded import from_tensors, to_tensors
from halfbyte.moe.experts import SWIGLU, GatedActivation, PackedExperts
from halfbyte.moe.experts_layer import ExpertsLayer
from halfbyte.numerics import nvfp4
from halfbyte.numerics.e4m3 import E4M3_NAN

Projection = Literal["gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("gate_proj", "up_proj", "down_proj")
_GLOBAL_SCALES: tuple[Role, ...] = ("weight_global_scale", "input_global_scale")
Place = tuple[int, Projection]
"""An expert's projection."""


class _TensorName(NamedTuple):
    """A tensor of a checkpoint."""

    place: Place
    role: Role


class NvFp4Experts(ExpertsLayer):
    """Experts with NVFP4 weights; the state dict has a set of tensors per expert and projection.

    Args:
        num_experts, hidden_size, intermediate_size, bias, dtype, backend, batch_invariant: see
            `ExpertsLayer`.
        activation: applied between the projections; not interleaved.
        device: of the tensors; may be "meta".
        dialect: of the state dict.

    Raises:
        ValueError: an invalid size, dtype or activation.
    """

    weight_format = "nvfp4"

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        activation: GatedActivation = SWIGLU,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        batch_invariant: bool = False,
        dialect: Dialect = "modelopt",
    ) -> None:
        super().__init__(
            num_experts,
            hidden_size,
            intermediate_size,
            bias,
            activation,
            dtype,
            backend,
            batch_invariant,
        )
        if activation.interleaved:
            raise ValueError("activation: expected one that is not interleaved, got interleaved")
        self.dialect: Dialect = dialect
        self._stored: dict[_TensorName, StoredGlobalScale] = {}
        self._given: set[_TensorName] = set()
        self._make_empty(device)

    def _make_empty(self, device: torch.device | str | None) -> None:
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        self._parameters.clear()
        self._stored.clear()
        self._given.clear()
        for name, n, k, parts in (("gate_up", 2 * i, h, 2), ("down", h, i, 1)):
            weight = torch.zeros(e, n, k // 2, dtype=torch.uint8, device=device)
            scales = torch.full((e, n, k // 16), E4M3_NAN, dtype=torch.uint8, device=device)
            empty = torch.full((e, parts), torch.nan, dtype=torch.float32, device=device)
            self._set(f"{name}_weight", weight)
            self._set(f"{name}_scales", scales.view(torch.float8_e4m3fn))
            self._set(f"{name}_global_scale", empty)
            if self.has_bias:
                self._set(f"{name}_bias", torch.zeros(e, n, dtype=self.dtype, device=device))

    def _loaded_experts(self) -> PackedExperts:
        tensors = {name: p.detach() for name, p in self.named_parameters()}
        return from_tensors(tensors, self.activation)

    def _keep(self, experts: PackedExperts) -> None:
        for name, tensor in to_tensors(experts).items():
            self._set(name, tensor)

    def dequantize(self, place: Place, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights `[N, K]` of an expert's projection; see `NvFp4Linear.dequantize`."""
        stack, rows = self._rows(place[1])
        matrices = getattr(self.packed_experts(), stack)
        weight, scales = matrices.weight[place[0], rows], matrices.scales[place[0], rows]
        stored = self._stored[_TensorName(place, "weight_global_scale")]
        if dtype == torch.float64:
            return nvfp4.dequantize(
                weight, scales, stored.decode_weights().to(weight.device), dtype
            )
        value = stored.value.float().reshape(()).to(weight.device)
        return nvfp4.dequantize_as_stored(weight, scales, value, stored.is_decode, dtype)

    def _expected(self, projection: Projection) -> Expected:
        is_down = projection == "down_proj"
        n = self.hidden_size if is_down else self.intermediate_size
        return Expected(n, self.intermediate_size if is_down else self.hidden_size, 1)

    def _rows(self, projection: Projection) -> tuple[str, slice]:
        """Stack of a projection, and its rows there."""
        half = self.intermediate_size
        rows = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}
        return ("down", slice(None)) if projection == "down_proj" else ("gate_up", rows[projection])

    def name_of(self, place: Place, tensor: str = "") -> str:
        """Name of an expert's projection, or of a tensor of it, for messages."""
        layer = full_name(self.layer_name, f"{place[0]}.{place[1]}")
        return full_name(layer, tensor) if tensor else layer

    def load_projection(
        self, place: Place, tensors: Mapping[str, torch.Tensor], dialect: Dialect
    ) -> None:
        """Copy tensors of an expert's projection from a checkpoint.

        The first ones determine the device of a layer on "meta".

        Args:
            place: expert and projection.
            tensors: by their names in the file, without the projection's.
            dialect: of the names.

        Raises:
            CheckpointError: a tensor of a wrong shape or dtype, or an unknown name; the message
                names it, what was expected and what was found.
        """
        known = file_names(dialect)
        for name in tensors:
            if name not in known or (name == "bias" and not self.has_bias):
                raise CheckpointError(
                    f"{self.name_of(place, name)}: expected one of {', '.join(known)}, found a "
                    f"tensor that this {dialect} layer does not have"
                )
        by_role = self._expected(place[1]).read(tensors, dialect, self.name_of(place))
        self.unprocess_weights()
        if self.device.type == "meta" and by_role:
            self._make_empty(next(iter(by_role.values())).device)
        is_decode = TENSOR_NAMES[dialect].global_scale_is_decode
        stack, rows = self._rows(place[1])
        for role, tensor in by_role.items():
            if role != "input_global_scale":  # only kept, to be written again
                self._given.add(_TensorName(place, role))
            if role in _GLOBAL_SCALES:
                # On the CPU: comparing scalars must not sync the GPU.
                stored = StoredGlobalScale(tensor.detach().clone().cpu(), is_decode)
                self._stored[_TensorName(place, role)] = stored
                continue
            part = {"weight": "weight", "weight_scale": "scales", "bias": "bias"}[role]
            target = self.get_parameter(f"{stack}_{part}").data[place[0], rows]
            target.copy_(tensor.detach())

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of every expert was loaded."""
        roles = 4 if self.has_bias else 3
        return len(self._given) == self.num_experts * len(PROJECTIONS) * roles

    def _first_missing(self) -> _TensorName | None:
        roles: list[Role] = ["weight", "weight_scale", "weight_global_scale"]
        roles += ["bias"] if self.has_bias else []
        places = ((e, projection) for e in range(self.num_experts) for projection in PROJECTIONS)
        wanted = (_TensorName(place, role) for place in places for role in roles)
        return next((key for key in wanted if key not in self._given), None)

    def check_tensors(self) -> None:
        """See `ExpertsLayer.check_tensors`; sets the decode scales."""
        names = TENSOR_NAMES[self.dialect]
        missing = self._first_missing()
        if missing is not None:
            place, role = missing
            name = "bias" if role == "bias" else getattr(names, role)
            raise CheckpointError(
                f"{self.name_of(place, name)}: expected a tensor, found none: it was never loaded"
            )
        for projection in PROJECTIONS:
            stack, rows = self._rows(projection)
            blocks = self.get_parameter(f"{stack}_scales").data[:, rows].view(torch.uint8)
            for expert in (blocks >= E4M3_NAN).flatten(1).any(1).nonzero().flatten().tolist():
                place = (expert, projection)
                check_block_scales(blocks[expert], self.name_of(place, names.weight_scale))
            for expert in range(self.num_experts):
                place = (expert, projection)
                stored = self._stored[_TensorName(place, "weight_global_scale")]
                name = self.name_of(place, names.weight_global_scale)
                # As in linear layers: 0 is valid for zeros, unless it is the inverse of infinity.
                check_global_scale(stored.decode(), name, zero_is_valid=True)
                if bool(stored.value.isinf().any()):
                    raise CheckpointError(f"{name}: expected a finite scale, found infinity")
        self._check_biases()
        self._derive_scales()

    def _derive_scales(self) -> None:
        """Set the decode scales from the files' scales."""
        by_projection = {name: self._decode_scales(name) for name in PROJECTIONS}
        gate_up = [by_projection["gate_proj"], by_projection["up_proj"]]
        self._set("gate_up_global_scale", torch.stack(gate_up, 1).to(self.device))
        self._set("down_global_scale", by_projection["down_proj"][:, None].to(self.device))

    def _decode_scales(self, projection: Projection) -> torch.Tensor:
        """float32 `[E]` on the CPU."""
        result = torch.empty(self.num_experts, dtype=torch.float32, device="cpu")
        places: list[Place] = [(e, projection) for e in range(self.num_experts)]
        stored = [self._stored[_TensorName(place, "weight_global_scale")] for place in places]
        for is_decode in (True, False):  # all experts of one direction at once: it takes a while
            chosen = [e for e, scale in enumerate(stored) if scale.is_decode == is_decode]
            if chosen:
                values = torch.cat([stored[e].value.float().reshape(1) for e in chosen])
                result[chosen] = StoredGlobalScale(values, is_decode).decode_weights()
        return result

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        experts, names = self.packed_experts(), TENSOR_NAMES[self.dialect]
        for expert in range(self.num_experts):
            for projection in PROJECTIONS:
                stack, rows = self._rows(projection)
                matrices = getattr(experts, stack)
                tensors = {
                    names.weight: matrices.weight[expert, rows],
                    names.weight_scale: matrices.scales[expert, rows],
                }
                for role in _GLOBAL_SCALES:
                    stored = self._stored.get(_TensorName((expert, projection), role))
                    if stored is not None:
                        scale = stored.in_dialect(names).reshape(scale_shape(1, names))
                        tensors[getattr(names, role)] = scale.to(self.device)
                if matrices.bias is not None:
                    tensors["bias"] = matrices.bias[expert, rows]
                for name, tensor in tensors.items():
                    destination[f"{prefix}{expert}.{projection}.{name}"] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.layer_name = self.layer_name or prefix.removesuffix(".")
        remaining = {key for key in state_dict if key.startswith(prefix)}
        for expert in range(self.num_experts):
            for projection in PROJECTIONS:
                own = f"{prefix}{expert}.{projection}."
                found = {key.removeprefix(own): key for key in remaining if key.startswith(own)}
                try:
                    dialect = dialect_of(found, self.dialect)
                    roles = file_names(dialect)
                    known = {name: state_dict[found[name]] for name in roles if name in found}
                    self.load_projection((expert, projection), known, dialect)
                except CheckpointError as error:
                    error_msgs.append(str(error))
                    continue
                optional = {"input_global_scale"} | (set() if self.has_bias else {"bias"})
                absent = [n for n, role in roles.items() if n not in found and role not in optional]
                missing_keys += [own + name for name in absent]
                remaining -= {found[name] for name in known}
        if strict:
            unexpected_keys += sorted(remaining)
