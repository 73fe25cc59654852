"""`NvFp4Experts`: experts with NVFP4 weights, from checkpoints with separate tensors per expert.

A file's global scales are kept as the file has them, because 1/(1/g) is not always g."""

from collections.abc import Mapping
from typing import Any

import torch

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.linear.dialect_tensors import (
    Expected,
    Role,
    StoredGlobalScale,
    check_block_scales,
    check_global_scale,
    scale_shape,
)
from halfbyte.moe.experts import ExpertMatrices
from halfbyte.moe.separate_experts import (
    PROJECTIONS,
    ExpertTensor,
    Place,
    Projection,
    SeparateExperts,
)
from halfbyte.numerics import nvfp4
from halfbyte.numerics.e4m3 import E4M3_NAN

_GLOBAL_SCALES: tuple[Role, ...] = ("weight_global_scale", "input_global_scale")


class NvFp4Experts(SeparateExperts):
    """Experts with NVFP4 weights; arguments as of `SeparateExperts`."""

    weight_format = "nvfp4"
    roles = ("weight", "weight_scale", "weight_global_scale")

    _global_scales: dict[ExpertTensor, StoredGlobalScale]

    def _make_empty(self, device: torch.device | str | None) -> None:
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        self._parameters.clear()
        self._global_scales = {}
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

    def dequantize(self, place: Place, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights `[N, K]` of an expert's projection; see `NvFp4Linear.dequantize`."""
        stack, rows = self._rows(place[1])
        matrices = getattr(self.packed_experts(), stack)
        weight, scales = matrices.weight[place[0], rows], matrices.scales[place[0], rows]
        stored = self._global_scales[ExpertTensor(place, "weight_global_scale")]
        if dtype == torch.float64:
            return nvfp4.dequantize(
                weight, scales, stored.decode_weights().to(weight.device), dtype
            )
        value = stored.value.float().reshape(()).to(weight.device)
        return nvfp4.dequantize_as_stored(weight, scales, value, stored.is_decode, dtype)

    def load_projection(
        self, place: Place, tensors: Mapping[str, torch.Tensor], dialect: Dialect
    ) -> None:
        """See `SeparateExperts.load_projection`."""
        self._check_known(place, tensors, dialect)
        expected = Expected(*self._sizes(place[1]), num_parts=1)
        by_role = expected.read(tensors, dialect, self.name_of(place))
        self.unprocess_weights()
        if self.device.type == "meta" and by_role:
            self._make_empty(next(iter(by_role.values())).device)
        is_decode = TENSOR_NAMES[dialect].global_scale_is_decode
        for role, tensor in by_role.items():
            if role != "input_global_scale":  # only kept, to be written again
                self._given.add(ExpertTensor(place, role))
            if role in _GLOBAL_SCALES:
                # On the CPU: comparing scalars must not sync the GPU.
                stored = StoredGlobalScale(tensor.detach().clone().cpu(), is_decode)
                self._global_scales[ExpertTensor(place, role)] = stored
                continue
            self._copy(place, role, tensor)

    def check_tensors(self) -> None:
        """See `ExpertsLayer.check_tensors`; sets the decode scales."""
        names = TENSOR_NAMES[self.dialect]
        self._check_complete()
        for projection in PROJECTIONS:
            stack, rows = self._rows(projection)
            blocks = self.get_parameter(f"{stack}_scales").data[:, rows].view(torch.uint8)
            for expert in (blocks >= E4M3_NAN).flatten(1).any(1).nonzero().flatten().tolist():
                place = (expert, projection)
                check_block_scales(blocks[expert], self.name_of(place, names.weight_scale))
            for expert in range(self.num_experts):
                place = (expert, projection)
                stored = self._global_scales[ExpertTensor(place, "weight_global_scale")]
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
        stored = [
            self._global_scales[ExpertTensor(place, "weight_global_scale")] for place in places
        ]
        for is_decode in (True, False):  # all experts of one direction at once: it takes a while
            chosen = [e for e, scale in enumerate(stored) if scale.is_decode == is_decode]
            if chosen:
                values = torch.cat([stored[e].value.float().reshape(1) for e in chosen])
                result[chosen] = StoredGlobalScale(values, is_decode).decode_weights()
        return result

    def _stored(self, place: Place, matrices: ExpertMatrices, rows: slice) -> dict[Role, Any]:
        names = TENSOR_NAMES[self.dialect]
        tensors: dict[Role, Any] = {
            "weight": matrices.weight[place[0], rows],
            "weight_scale": matrices.scales[place[0], rows],
        }
        for role in _GLOBAL_SCALES:
            stored = self._global_scales.get(ExpertTensor(place, role))
            if stored is not None:
                scale = stored.in_dialect(names).reshape(scale_shape(1, names))
                tensors[role] = scale.to(self.device)
        return tensors
