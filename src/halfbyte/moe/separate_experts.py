"""Base of experts from checkpoints with separate tensors per expert and projection.

Files hold gate, up and down projections per expert (`3.gate_proj.weight`, ...), in the names of a
dialect; the layer holds two stacks of matrices (`PackedExperts`)."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.linear.dialect_tensors import Role, dialect_of, file_names, full_name
from halfbyte.moe.as_loaded import from_tensors, to_tensors
from halfbyte.moe.experts import SWIGLU, ExpertMatrices, GatedActivation, PackedExperts
from halfbyte.moe.experts_layer import ExpertsLayer

Projection = Literal["gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("gate_proj", "up_proj", "down_proj")
Place = tuple[int, Projection]
"""An expert's projection."""


class ExpertTensor(NamedTuple):
    """A tensor of one projection of one expert."""

    place: Place
    role: Role


class SeparateExperts(ExpertsLayer):
    """Experts whose state dict has a set of tensors per expert and projection.

    Args:
        num_experts, hidden_size, intermediate_size, bias, dtype, backend, batch_invariant: see
            `ExpertsLayer`.
        activation: applied between the projections; not interleaved.
        device: of the tensors; may be "meta".
        dialect: of the state dict.

    Raises:
        ValueError: an invalid size, dtype or activation.
    """

    roles: ClassVar[tuple[Role, ...]]
    """Of the tensors that every projection must have beside a bias."""

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
        self._given: set[ExpertTensor] = set()
        self._make_empty(device)

    @abstractmethod
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

    @abstractmethod
    def _stored(self, place: Place, matrices: ExpertMatrices, rows: slice) -> dict[Role, Any]:
        """Tensors of a projection other than the bias, for the state dict.

        Args:
            place: expert and projection.
            matrices, rows: where the projection is.
        """

    def _loaded_experts(self) -> PackedExperts:
        tensors = {name: p.detach() for name, p in self.named_parameters()}
        return from_tensors(tensors, self.activation)

    def _keep(self, experts: PackedExperts) -> None:
        for name, tensor in to_tensors(experts).items():
            self._set(name, tensor)

    def _file_names(self, dialect: Dialect) -> dict[str, Role]:
        """Roles of a projection's tensors by their names in the file."""
        return file_names(dialect)

    def _check_known(self, place: Place, tensors: Mapping[str, Any], dialect: Dialect) -> None:
        """Raise CheckpointError for a name that a projection does not have."""
        known = self._file_names(dialect)
        for name in tensors:
            if name not in known or (name == "bias" and not self.has_bias):
                raise CheckpointError(
                    f"{self.name_of(place, name)}: expected one of {', '.join(known)}, found a "
                    f"tensor that this {dialect} layer does not have"
                )

    def _sizes(self, projection: Projection) -> tuple[int, int]:
        """N and K of a projection."""
        hidden, size = self.hidden_size, self.intermediate_size
        return (hidden, size) if projection == "down_proj" else (size, hidden)

    def _rows(self, projection: Projection) -> tuple[str, slice]:
        """Stack of a projection, and its rows there."""
        half = self.intermediate_size
        rows = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}
        return ("down", slice(None)) if projection == "down_proj" else ("gate_up", rows[projection])

    def _copy(self, place: Place, role: Role, tensor: torch.Tensor) -> None:
        """Copy codes, block scales or biases to their place."""
        stack, rows = self._rows(place[1])
        part = {"weight": "weight", "weight_scale": "scales", "bias": "bias"}[role]
        self.get_parameter(f"{stack}_{part}").data[place[0], rows].copy_(tensor.detach())

    def name_of(self, place: Place, tensor: str = "") -> str:
        """Name of an expert's projection, or of a tensor of it, for messages."""
        layer = full_name(self.layer_name, f"{place[0]}.{place[1]}")
        return full_name(layer, tensor) if tensor else layer

    @property
    def _needed(self) -> tuple[Role, ...]:
        return (*self.roles, "bias") if self.has_bias else self.roles

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of every expert was loaded."""
        return len(self._given) == self.num_experts * len(PROJECTIONS) * len(self._needed)

    def _check_complete(self) -> None:
        """Raise CheckpointError for the first tensor that was never loaded."""
        places = ((e, projection) for e in range(self.num_experts) for projection in PROJECTIONS)
        wanted = (ExpertTensor(place, role) for place in places for role in self._needed)
        missing = next((key for key in wanted if key not in self._given), None)
        if missing is not None:
            place, role = missing
            name = "bias" if role == "bias" else getattr(TENSOR_NAMES[self.dialect], role)
            raise CheckpointError(
                f"{self.name_of(place, name)}: expected a tensor, found none: it was never loaded"
            )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        experts, names = self.packed_experts(), TENSOR_NAMES[self.dialect]
        for expert in range(self.num_experts):
            for projection in PROJECTIONS:
                stack, rows = self._rows(projection)
                matrices = getattr(experts, stack)
                own = f"{prefix}{expert}.{projection}."
                for role, tensor in self._stored((expert, projection), matrices, rows).items():
                    destination[own + getattr(names, role)] = tensor
                if matrices.bias is not None:
                    destination[f"{own}bias"] = matrices.bias[expert, rows]

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
                    roles = self._file_names(dialect)
                    known = {name: state_dict[found[name]] for name in roles if name in found}
                    self.load_projection((expert, projection), known, dialect)
                except CheckpointError as error:
                    error_msgs.append(str(error))
                    continue
                needed = self._needed
                absent = [n for n, role in roles.items() if n not in found and role in needed]
                missing_keys += [own + name for name in absent]
                remaining -= {found[name] for name in known}
        if strict:
            unexpected_keys += sorted(remaining)
