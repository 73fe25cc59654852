"""The tensors of a quantized layer: loading, checking, moving and saving.

The state dict is written in the dialect `dialect`; both dialects are read. Empty scales are NaN, so
that a scale that was never loaded is an error and not 1.0. Codes and scales keep their dtypes in
`layer.to(dtype)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.checkpoints.dialects.registry import TENSOR_NAMES
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.linear.base import NvFp4LinearLayerConfig, check_dtype
from halfbyte.linear.dialect_tensors import (
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
from halfbyte.linear.quantized_module import QuantizedModule
from halfbyte.numerics import nvfp4
from halfbyte.numerics.e4m3 import E4M3_NAN

SCALES = ("weight_global_scale", "input_global_scale", "input_global_scale_inv", "alpha")


class LayerState(QuantizedModule):
    """`NvFp4Linear` without the kernel; arguments as there."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor
    input_global_scale: torch.Tensor | None
    input_global_scale_inv: torch.Tensor | None
    alpha: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        part_sizes: Sequence[int] | None,
        quantize_activations: bool,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        dialect: Dialect,
    ) -> None:
        super().__init__()
        if dialect not in TENSOR_NAMES:
            raise ValueError(f"dialect: expected one of {', '.join(TENSOR_NAMES)}, got {dialect!r}")
        self.in_features, self.out_features = in_features, out_features
        self.part_sizes = tuple(part_sizes or (out_features,))
        self.quantize_activations = quantize_activations
        self.dtype = check_dtype(torch.get_default_dtype() if dtype is None else dtype)
        NvFp4LinearLayerConfig(out_features, in_features, self.dtype, part_sizes=self.part_sizes)
        self.dialect: Dialect = dialect
        self.layer_name = ""
        """Name in error messages; set by `load_state_dict`."""
        self._stored: dict[Role, StoredGlobalScale] = {}
        self._given: set[Role] = set()
        """Roles loaded so far; a missing weight could not be distinguished from zeros."""
        self._make_empty(device, bias)

    def _make_empty(self, device: torch.device | str | None, bias: bool) -> None:
        n, k, parts = self.out_features, self.in_features, len(self.part_sizes)
        self._set("weight", torch.zeros(n, k // 2, dtype=torch.uint8, device=device))
        scales = torch.full((n, k // 16), E4M3_NAN, dtype=torch.uint8, device=device)
        self._set("weight_scale", scales.view(torch.float8_e4m3fn))
        for name in SCALES:
            per_part = not name.startswith("input")
            shape = (parts,) if per_part else ()
            empty = torch.full(shape, torch.nan, dtype=torch.float32, device=device)
            self._set(name, empty if per_part or self.quantize_activations else None)
        self._set("bias", torch.zeros(n, dtype=self.dtype, device=device) if bias else None)

    def _set(self, name: str, tensor: torch.Tensor | None) -> None:
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        self.register_parameter(name, parameter)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(self.parameters()).device

    def loaded_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`weight` uint8 `[N, K/2]` and `weight_scale` float8_e4m3fn `[N, K/16]`, as loaded."""
        return self.weight, self.weight_scale

    def loaded_scale(self, name: str) -> torch.Tensor:
        """`weight_global_scale` or another small tensor of `SCALES`, as loaded."""
        return getattr(self, name).detach()

    def unprocess_weights(self) -> None:
        """Restore the tensors as loaded, if a kernel converted them."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights `[N, K]`, each part with its own global scale.

        In float64 these are exactly the values that kernels multiply by. In other dtypes they are
        bitwise those that the file's own library dequantizes to
        (`numerics.nvfp4.dequantize_as_stored`).
        """
        weight, scales = self.loaded_weights()
        sizes = torch.tensor(self.part_sizes, device=weight.device)
        if dtype == torch.float64:
            rows = self.loaded_scale("weight_global_scale").repeat_interleave(sizes)
            return nvfp4.dequantize(weight, scales, rows[:, None], dtype)
        stored = self._stored_scale("weight_global_scale")
        values = stored.value.float().reshape(-1).to(weight.device).expand(len(sizes))
        rows = values.repeat_interleave(sizes)[:, None]
        return nvfp4.dequantize_as_stored(weight, scales, rows, stored.is_decode, dtype)

    def load_tensors(
        self,
        tensors: Mapping[str, torch.Tensor],
        dialect: Dialect | None = None,
        *,
        copy: bool = False,
    ) -> None:
        """Load tensors of a checkpoint: all of the layer's, or some now and others later.

        After an error none of them is loaded.

        Args:
            tensors: by their names in the file, without the layer's prefix.
            dialect: of the names; None to infer it.
            copy: copy into the layer's memory; else the layer keeps the given tensors.

        Raises:
            CheckpointError: one that does not fit or that the layer does not know; the message
                names it, what was expected and what was found.
        """
        dialect = dialect or dialect_of(tensors, self.dialect)
        known = file_names(dialect)
        for name in tensors:
            if name not in known or (name == "bias" and self.bias is None):
                raise CheckpointError(
                    f"{full_name(self.layer_name, name)}: expected one of {', '.join(known)}, "
                    f"found a tensor that this {dialect} layer does not have"
                )
        expected = Expected(self.out_features, self.in_features, len(self.part_sizes))
        by_role = expected.read(tensors, dialect, self.layer_name)
        if copy and self.device.type == "meta" and by_role:
            raise CheckpointError(
                f"{self.layer_name or 'NvFp4Linear'}: expected memory to load into, found a layer "
                "on 'meta': load with assign=True, or call to_empty() first"
            )
        self.unprocess_weights()
        self._given |= set(by_role)
        is_decode = TENSOR_NAMES[dialect].global_scale_is_decode
        for role, tensor in by_role.items():
            if role in ("weight_global_scale", "input_global_scale"):
                device = self.device if copy else tensor.device
                self._keep(role, StoredGlobalScale(tensor.detach().clone(), is_decode), device)
            elif copy:
                getattr(self, role).data.copy_(tensor)
            else:
                tensor = tensor.detach().contiguous()
                self._set(role, tensor.to(self.dtype) if role == "bias" else tensor)
        for name in ("alpha", "input_global_scale_inv"):  # still on "meta"
            derived = self._parameters[name]
            if derived is not None and derived.is_meta and not self.weight.is_meta:
                self._set(name, torch.full_like(derived, torch.nan, device=self.device))

    def _keep(
        self, role: Role, stored: StoredGlobalScale, device: torch.device | None = None
    ) -> None:
        """Keep a global scale as stored in the file, and set the layer's tensor from it."""
        if stored.value.device.type != "meta":
            # On the CPU: comparing one to three scalars must not sync the GPU.
            stored = StoredGlobalScale(stored.value.cpu(), stored.is_decode)
        self._stored[role] = stored
        device = self.device if device is None else device
        if role == "weight_global_scale":
            decode = stored.decode_weights().to(device)
            self._set(role, decode.expand(len(self.part_sizes)).clone())
        elif self.quantize_activations:
            self._set(role, stored.decode().to(device).reshape(()))

    def _store(self, role: Role, decode: torch.Tensor) -> None:
        """Set a global scale from a decode scale, as a file of this dialect would store it."""
        names = TENSOR_NAMES[self.dialect]
        value = StoredGlobalScale(decode, True).in_dialect(names)
        value = value.reshape(scale_shape(value.numel(), names))
        self._keep(role, StoredGlobalScale(value, names.global_scale_is_decode))

    def _stored_scale(self, role: Role) -> StoredGlobalScale:
        """The scale as stored in the file, or the layer's tensor if that was changed since."""
        stored = self._stored.get(role)
        if role == "input_global_scale" and not self.quantize_activations:
            if stored is None:
                name = full_name(self.layer_name, role)
                raise CheckpointError(f"{name}: expected a scale for W4A4, found none")
            return stored
        scale = self.loaded_scale(role)
        if scale.is_meta:
            return stored or StoredGlobalScale(scale, True)
        scale = scale.cpu()
        if stored is not None:
            weights = role == "weight_global_scale"
            decode = stored.decode_weights() if weights else stored.decode()
            if torch.equal(decode.expand(scale.numel()), scale.view(-1)):
                return stored
        shape = scale_shape(scale.numel(), TENSOR_NAMES["modelopt"])
        return StoredGlobalScale(scale.reshape(shape), True)

    def drop_input_scale(self) -> None:
        """Turn a W4A4 layer into a W4A16 layer; drops the input scale."""
        self.unprocess_weights()
        self.quantize_activations = False
        self._stored.pop("input_global_scale", None)
        for name in ("input_global_scale", "input_global_scale_inv"):
            self._set(name, None)

    def check_tensors(self) -> None:
        """Raise CheckpointError unless every tensor was loaded and every scale is finite."""
        names = TENSOR_NAMES[self.dialect]
        for role in ("weight", "weight_scale", "weight_global_scale", "input_global_scale"):
            tensor = self._parameters[role]
            if tensor is not None and tensor.is_meta:
                raise self._never_loaded(getattr(names, role))
        if "weight_scale" in self._given:
            if "weight" not in self._given:
                raise self._never_loaded(names.weight)
            bias = None if "bias" in self._given else self._parameters["bias"]
            if bias is not None and (bias.is_meta or not bool(bias.any())):
                raise self._never_loaded("bias")
        expected = Expected(self.out_features, self.in_features, len(self.part_sizes))
        as_file = {names.weight: self.weight, names.weight_scale: self.weight_scale}
        expected.read(as_file, self.dialect, self.layer_name)
        check_block_scales(self.weight_scale, full_name(self.layer_name, names.weight_scale))
        name = full_name(self.layer_name, names.weight_global_scale)
        # A scale of 0 is valid for an all-zero weight, unless it is the inverse of infinity.
        check_global_scale(self.weight_global_scale, name, zero_is_valid=True)
        stored = self._stored_scale("weight_global_scale").value
        if bool(stored.isinf().any()):
            raise CheckpointError(f"{name}: expected a finite scale, found {stored.tolist()}")
        if self.input_global_scale is not None:
            check_global_scale(
                self.input_global_scale,
                full_name(self.layer_name, names.input_global_scale),
                zero_is_valid=False,
            )

    def _never_loaded(self, name: str) -> CheckpointError:
        name = full_name(self.layer_name, name)
        return CheckpointError(f"{name}: expected a tensor, found none: it was never loaded")

    def derive_scales(self) -> None:
        """Compute `alpha` and `input_global_scale_inv` from the loaded scales."""
        alpha = self.weight_global_scale.detach().clone()
        if self.input_global_scale is not None:
            alpha *= self.input_global_scale
            encode = self._stored_scale("input_global_scale").encode()
            self._set("input_global_scale_inv", encode.to(alpha.device).reshape(()))
        self._set("alpha", alpha)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        weight, weight_scale = self.loaded_weights()
        names = TENSOR_NAMES[self.dialect]
        tensors = {names.weight: weight, names.weight_scale: weight_scale}
        roles: list[Role] = ["weight_global_scale"]
        if self.quantize_activations or "input_global_scale" in self._stored:
            roles.append("input_global_scale")
        for role in roles:
            scale = self._stored_scale(role).in_dialect(names)
            tensors[getattr(names, role)] = scale.to(weight.device)
        if self.bias is not None:
            tensors["bias"] = self.bias
        for name, tensor in tensors.items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

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
        found = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        try:
            dialect = dialect_of(found, self.dialect)
            roles = file_names(dialect)
            if self.bias is None:
                del roles["bias"]
            optional = set() if self.quantize_activations else {"input_global_scale"}
            known = {name: found[name] for name in roles if name in found}
            missing = [n for n, role in roles.items() if n not in found and role not in optional]
            missing_keys += [prefix + name for name in missing]
            if strict:
                unexpected_keys += [prefix + name for name in found if name not in roles]
            assign = bool(local_metadata.get("assign_to_params_buffers"))
            self.load_tensors(known, dialect, copy=not assign)
        except CheckpointError as error:
            error_msgs.append(str(error))

    def _biases(self) -> Sequence[torch.Tensor | None]:
        return (self.bias,)

    def _forget(self, device: torch.device) -> None:
        self._make_empty(device, self.bias is not None)
        self._stored.clear()
        self._given.clear()
