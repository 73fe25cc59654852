"""`MxFp4Experts`: experts with MXFP4 weights, loaded from GPT-OSS's files.

All experts of a layer are in one tensor per projection, gate and up interleaved, with biases:

| name | dtype, shape |
|---|---|
| `gate_up_proj_blocks` | uint8 `[E, 2 * I, H/32, 16]`, E2M1 codes, the even k in the low nibble |
| `gate_up_proj_scales` | uint8 `[E, 2 * I, H/32]`, E8M0 |
| `gate_up_proj_bias` | `[E, 2 * I]` |
| `down_proj_blocks` | uint8 `[E, H, I/32, 16]` |
| `down_proj_scales` | uint8 `[E, H, I/32]` |
| `down_proj_bias` | `[E, H]` |
"""

from collections.abc import Mapping
from typing import Any

import torch

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.moe.experts import GPT_OSS, ExpertMatrices, GatedActivation, PackedExperts
from halfbyte.moe.experts_layer import ExpertsLayer
from halfbyte.numerics.e8m0 import E8M0_NAN

_STACKS = {"gate_up_proj": "gate_up", "down_proj": "down"}
_BLOCK_BYTES = 16


class MxFp4Experts(ExpertsLayer):
    """Experts with MXFP4 weights; the state dict has the tensors above.

    Args:
        num_experts, hidden_size, intermediate_size, dtype, backend, batch_invariant: see
            `ExpertsLayer`.
        activation: applied between the projections; interleaved.
        device: of the tensors; may be "meta".

    Raises:
        ValueError: an invalid size, dtype or activation.
    """

    weight_format = "mxfp4"

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: GatedActivation = GPT_OSS,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(
            num_experts,
            hidden_size,
            intermediate_size,
            True,
            activation,
            dtype,
            backend,
            batch_invariant,
        )
        if not activation.interleaved:
            raise ValueError("activation: expected one that is interleaved, as in the files")
        self._make_empty(device)

    def _make_empty(self, device: torch.device | str | None) -> None:
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        self._parameters.clear()
        for name, n, k in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
            shape = (e, n, k // 32)
            blocks = torch.zeros((*shape, _BLOCK_BYTES), dtype=torch.uint8, device=device)
            scales = torch.full(shape, E8M0_NAN, dtype=torch.uint8, device=device)
            self._set(f"{name}_blocks", blocks)
            self._set(f"{name}_scales", scales)
            self._set(f"{name}_bias", torch.zeros(e, n, dtype=self.dtype, device=device))

    def check_tensors(self) -> None:
        """See `ExpertsLayer.check_tensors`; scales that were never loaded are NaN."""
        prefix = f"{self.layer_name}." if self.layer_name else ""
        for name, tensor in self.named_parameters():
            if tensor.is_meta:
                raise CheckpointError(f"{prefix}{name}: expected a tensor, found none")
            if not name.endswith("_scales"):
                continue
            bad = (tensor.data == E8M0_NAN).flatten(1).sum(1)
            if bool(bad.any()):
                expert = int(bad.nonzero()[0])
                raise CheckpointError(
                    f"{prefix}{name}: expert {expert}: expected finite block scales, found "
                    f"{int(bad[expert])} NaN of {tensor[expert].numel()}"
                )
        self._check_biases()

    def _loaded_experts(self) -> PackedExperts:
        matrices = {
            stack: ExpertMatrices(
                self.get_parameter(f"{name}_blocks").data.flatten(2),
                self.get_parameter(f"{name}_scales").data,
                None,
                self.get_parameter(f"{name}_bias").data,
            )
            for name, stack in _STACKS.items()
        }
        return PackedExperts(**matrices, activation=self.activation)

    def _keep(self, experts: PackedExperts) -> None:
        for name, tensor in _in_files(experts).items():
            self._set(name, tensor)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, tensor in _in_files(self.packed_experts()).items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.layer_name = self.layer_name or prefix.removesuffix(".")
        self.unprocess_weights()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _in_files(experts: PackedExperts) -> dict[str, torch.Tensor]:
    """Tensors by their names in files."""
    tensors = {}
    for name, stack in _STACKS.items():
        matrices: ExpertMatrices = getattr(experts, stack)
        assert matrices.bias is not None
        tensors[f"{name}_blocks"] = matrices.weight.unflatten(2, (-1, _BLOCK_BYTES))
        tensors[f"{name}_scales"] = matrices.scales
        tensors[f"{name}_bias"] = matrices.bias
    return tensors
