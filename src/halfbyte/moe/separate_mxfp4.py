"""`SeparateMxFp4Experts`: experts with MXFP4 weights, from compressed-tensors' checkpoints.

Per expert and projection `[N, K]`:

| name | dtype, shape |
|---|---|
| `weight_packed` | uint8 `[N, K/2]`, E2M1 codes, the even k in the low nibble |
| `weight_scale` | uint8 `[N, K/32]`, E8M0 |
| `bias` | `[N]`, where a model has biases |
"""

from collections.abc import Mapping
from typing import Any

import torch

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.linear.dialect_tensors import Role, describe
from halfbyte.moe.experts import BLOCK_SIZES, ExpertMatrices
from halfbyte.moe.separate_experts import PROJECTIONS, ExpertTensor, Place, SeparateExperts
from halfbyte.numerics.e8m0 import E8M0_NAN


class SeparateMxFp4Experts(SeparateExperts):
    """Experts with MXFP4 weights; arguments as of `SeparateExperts`."""

    weight_format = "mxfp4"
    roles = ("weight", "weight_scale")

    def _make_empty(self, device: torch.device | str | None) -> None:
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        self._parameters.clear()
        self._given.clear()
        for name, n, k in (("gate_up", 2 * i, h), ("down", h, i)):
            weight = torch.zeros(e, n, k // 2, dtype=torch.uint8, device=device)
            shape = e, n, k // BLOCK_SIZES["mxfp4"]
            self._set(f"{name}_weight", weight)
            self._set(
                f"{name}_scales", torch.full(shape, E8M0_NAN, dtype=torch.uint8, device=device)
            )
            if self.has_bias:
                self._set(f"{name}_bias", torch.zeros(e, n, dtype=self.dtype, device=device))

    def _file_names(self, dialect: Dialect) -> dict[str, Role]:
        return {n: r for n, r in super()._file_names(dialect).items() if r in (*self.roles, "bias")}

    def load_projection(
        self, place: Place, tensors: Mapping[str, torch.Tensor], dialect: Dialect
    ) -> None:
        """See `SeparateExperts.load_projection`."""
        self._check_known(place, tensors, dialect)
        n, k = self._sizes(place[1])
        shapes: dict[Role, tuple[int, ...]] = {
            "weight": (n, k // 2),
            "weight_scale": (n, k // BLOCK_SIZES["mxfp4"]),
            "bias": (n,),
        }
        by_role = {self._file_names(dialect)[name]: (name, x) for name, x in tensors.items()}
        for role, (name, tensor) in by_role.items():
            is_float = tensor.is_floating_point() and tensor.dtype.itemsize > 1
            fits = is_float if role == "bias" else tensor.dtype == torch.uint8
            if not fits or tuple(tensor.shape) != shapes[role]:
                raise CheckpointError(
                    f"{self.name_of(place, name)}: expected "
                    f"{'float' if role == 'bias' else 'uint8'} {list(shapes[role])}, found "
                    f"{describe(tensor)}"
                )
        self.unprocess_weights()
        if self.device.type == "meta" and by_role:
            self._make_empty(next(iter(by_role.values()))[1].device)
        for role, (_, tensor) in by_role.items():
            self._given.add(ExpertTensor(place, role))
            self._copy(place, role, tensor)

    def check_tensors(self) -> None:
        """See `ExpertsLayer.check_tensors`."""
        self._check_complete()
        name = TENSOR_NAMES[self.dialect].weight_scale
        for projection in PROJECTIONS:
            stack, rows = self._rows(projection)
            bad = (self.get_parameter(f"{stack}_scales").data[:, rows] == E8M0_NAN).flatten(1)
            if bool(bad.any()):
                expert = int(bad.any(1).nonzero()[0])
                raise CheckpointError(
                    f"{self.name_of((expert, projection), name)}: expected finite block scales, "
                    f"found {int(bad[expert].sum())} NaN of {bad.shape[1]}"
                )
        self._check_biases()

    def _stored(self, place: Place, matrices: ExpertMatrices, rows: slice) -> dict[Role, Any]:
        return {
            "weight": matrices.weight[place[0], rows],
            "weight_scale": matrices.scales[place[0], rows],
        }
