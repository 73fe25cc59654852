"""`NvFp4Linear`: a linear layer with NVFP4 weights, a replacement of `nn.Linear`.

Life of a layer: created empty, filled (`load_state_dict`, `load_tensors`, `from_float`), processed
by a kernel (`process_weights_after_loading`, at the latest in the first call), called. Empty scales
are NaN, so that a scale that was never loaded is an error and not 1.0.

The state dict is written in the dialect `dialect`; both dialects are read. It is the same before
and after processing: the kernel restores the weights, and the layer never keeps two copies. Moving
a layer to another device or dtype restores them as well; the next call selects a kernel again.
Codes and scales keep their dtypes in `layer.to(dtype)`."""

from collections.abc import Sequence
from threading import RLock
from typing import Any, Self

import torch
from torch import nn

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.dispatch import compute_capability_of
from halfbyte.linear.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from halfbyte.linear.dialect_tensors import StoredGlobalScale, describe
from halfbyte.linear.registry import init_nvfp4_linear_kernel
from halfbyte.linear.state import SCALES, LayerState
from halfbyte.numerics import nvfp4

# Rows quantized at a time, to bound temporaries to a few MB.
_QUANTIZED_ROWS = 512
_PROCESSING = RLock()
"""One lock for all layers: a lock in a layer would prevent `copy.deepcopy`."""


class NvFp4Linear(LayerState):
    """`y = x @ weight^T + bias` with weights, and optionally activations, in NVFP4.

    Args:
        in_features: K, a multiple of 16.
        out_features: N.
        bias: whether there is one.
        part_sizes: rows of each fused part (q, k and v; gate and up), each with its own global
            scale; by default one part.
        quantize_activations: W4A4 (needs an input scale) instead of W4A16.
        dtype: of activations, bias and result: float16, bfloat16 or float32; by default PyTorch's.
        device: of the tensors; may be "meta".
        backend: a name of `LINEAR_BACKENDS`, or None for the first that supports the layer.
        batch_invariant: a token's result is bitwise the same for any batch.
        dialect: of the state dict.
        m_hint: tokens per call, >= 1, where known; see `NvFp4LinearLayerConfig`.

    Raises:
        ValueError: an invalid size, dtype or hint.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        part_sizes: Sequence[int] | None = None,
        quantize_activations: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        batch_invariant: bool = False,
        dialect: Dialect = "modelopt",
        m_hint: int | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            part_sizes,
            quantize_activations,
            dtype,
            device,
            dialect,
        )
        self.backend, self.batch_invariant, self.m_hint = backend, batch_invariant, m_hint
        self.weights_padding_cols = 0
        self.kernel: NvFp4LinearKernel | None = None
        self._loaded_scales: dict[str, nn.Parameter | None] = {}
        self._device = torch.device("cpu")
        self.config()  # raises for invalid options now, not in the first call

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        *,
        recipe: nvfp4.Recipe = "amax6",
        input_amax: float | None = None,
        part_sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> Self:
        """Quantize an `nn.Linear`.

        Args:
            linear: the layer; weight `[N, K]`.
            recipe: of the weights' block scales, see `numerics.nvfp4.quantize`.
            input_amax: largest magnitude of the activations; W4A4 needs it.
            part_sizes: rows of each fused part, each of which gets its own global scale.
            options: of the constructor; `dtype` and `device` default to those of `linear`.

        Raises:
            ValueError: no `nn.Linear`, W4A4 without `input_amax`, invalid options, or weights
                that are not finite.
        """
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"linear: expected an nn.Linear, got {type(linear).__name__}")
        weight = linear.weight.detach()
        options = {"dtype": weight.dtype, "device": weight.device, **options}
        n, k = weight.shape
        layer = cls(k, n, linear.bias is not None, part_sizes=part_sizes, **options)
        weight = weight.to(layer.weight.device)
        if layer.quantize_activations and input_amax is None:
            raise ValueError("input_amax: W4A4 needs the largest magnitude of the activations")
        parts = weight.split(layer.part_sizes)
        amax = torch.stack([part.abs().amax().float() for part in parts])
        if not weight.is_meta and not bool(amax.isfinite().all()):
            raise ValueError("weight: expected finite values, found NaN or infinities")
        layer._store("weight_global_scale", nvfp4.global_scale_from_amax(amax, recipe))
        if input_amax is not None:
            layer._store("input_global_scale", nvfp4.global_scale_from_amax(input_amax))
        packed = [
            nvfp4.quantize(rows, scale, recipe)
            for part, scale in zip(parts, layer.weight_global_scale, strict=True)
            for rows in part.split(_QUANTIZED_ROWS)
        ]
        layer._set("weight", torch.cat([data for data, _ in packed]))
        scales = torch.cat([scales.view(torch.uint8) for _, scales in packed])
        layer._set("weight_scale", scales.view(torch.float8_e4m3fn))
        if linear.bias is not None:
            layer._set("bias", linear.bias.detach().to(layer.weight.device, layer.dtype, copy=True))
        return layer

    @classmethod
    def from_parts(cls, parts: Sequence["NvFp4Linear"], **options: Any) -> Self:
        """Fuse layers of the same input (q, k and v; gate and up); outputs are concatenated.

        Each part keeps its own global scale. Weights that a kernel repacked are restored first.

        Args:
            parts: layers of the same input; not modified.
            options: of the constructor; by default the first part's.

        Raises:
            ValueError: parts that are no `NvFp4Linear`, or of different K, dtype, device or W4A4,
                or whose activations have different global scales: the fused layer quantizes its
                input once.
        """
        if not parts:
            raise ValueError("parts: expected at least one layer")
        for part in parts:
            if not isinstance(part, NvFp4Linear):
                raise ValueError(f"parts: expected NvFp4Linear, got {type(part).__name__}")
        first = parts[0]
        for attribute in ("in_features", "dtype", "quantize_activations", "device"):
            found = {str(getattr(part, attribute)) for part in parts}
            if len(found) > 1:
                raise ValueError(f"parts: {attribute} differs: {', '.join(sorted(found))}")
        names = ("dtype", "quantize_activations", "device", "backend", "batch_invariant", "dialect")
        options = {**{name: getattr(first, name) for name in names}, **options}
        with_bias = any(part.bias is not None for part in parts)
        sizes = [size for part in parts for size in part.part_sizes]
        layer = cls(first.in_features, sum(sizes), with_bias, part_sizes=sizes, **options)
        weights = [part.loaded_weights() for part in parts]
        layer._set("weight", torch.cat([weight for weight, _ in weights]))
        scales = torch.cat([scales.view(torch.uint8) for _, scales in weights])
        layer._set("weight_scale", scales.view(torch.float8_e4m3fn))
        layer._fuse_scales(parts)
        if with_bias:
            zeros = layer.weight.new_zeros
            biases = [
                zeros(p.out_features).to(p.dtype) if p.bias is None else p.bias for p in parts
            ]
            layer._set("bias", torch.cat(biases).detach().to(layer.dtype))
        return layer

    def _fuse_scales(self, parts: Sequence["NvFp4Linear"]) -> None:
        stored = [part._stored_scale("weight_global_scale") for part in parts]
        # If the directions differ, convert the encode scales: they are inverted in use anyway.
        is_decode = any(scale.is_decode for scale in stored)
        values = [
            (s.decode_weights() if is_decode else s.encode()).expand(len(p.part_sizes))
            for s, p in zip(stored, parts, strict=True)
        ]
        self._keep("weight_global_scale", StoredGlobalScale(torch.cat(values), is_decode))
        if self.quantize_activations:
            inputs = [part._stored_scale("input_global_scale") for part in parts]
            scales = [float(scale.decode()) for scale in inputs]
            if len(set(scales)) > 1:
                raise ValueError(f"parts: input_global_scale differs: {scales}")
            self._keep("input_global_scale", inputs[0])

    def config(self) -> NvFp4LinearLayerConfig:
        """The layer's sizes and options, by which a kernel is selected."""
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        return NvFp4LinearLayerConfig(
            n=self.out_features,
            k=self.in_features,
            dtype=self.dtype,
            has_bias=self._parameters.get("bias") is not None,
            quantize_activations=self.quantize_activations,
            batch_invariant=self.batch_invariant,
            m_hint=self.m_hint,
            part_sizes=self.part_sizes,
            device_type=device.type,
            compute_capability=compute_capability_of(device),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., K]` to `[..., N]`, in the layer's dtype.

        Raises:
            ValueError: x does not fit the layer.
            CheckpointError: a scale was never loaded, or is not finite.
            NoImplementationError: no backend, or not the requested one, can do the work.
        """
        if self.kernel is None:
            self.process_in_first_call()
        assert self.kernel is not None
        fits = x.ndim > 0 and x.shape[-1] == self.in_features
        if not fits or x.dtype != self.dtype or x.device != self._device:
            raise ValueError(
                f"x: expected {str(self.dtype).removeprefix('torch.')} "
                f"[..., {self.in_features}] on {self._device}, "
                f"got {describe(x)} on {x.device}"
            )
        return self.kernel.apply_weights(self, x, self._parameters["bias"])

    @torch.inference_mode(False)  # inference tensors must not remain in the layer
    def process_weights_after_loading(self) -> None:
        """Select a kernel and let it convert the weights; does nothing if already processed.

        Raises:
            CheckpointError: a tensor was never loaded (a bias only if it is all zeros), does not
                fit, or has a scale that is not finite; one line that names it.
            NoImplementationError: no backend, or not the requested one, can do the work.
        """
        with _PROCESSING:  # first calls may come from several threads
            if self.kernel is not None:
                return
            self.check_tensors()
            self.derive_scales()
            kernel = init_nvfp4_linear_kernel(self.config(), self.backend)
            self._device = self.weight.device
            self._loaded_scales = {name: self._parameters[name] for name in SCALES}
            kernel.process_weights_after_loading(self)
            self.kernel = kernel

    @torch.inference_mode(False)  # inference tensors must not remain in the layer
    def unprocess_weights(self) -> None:
        """Restore the weights as loaded; does nothing if not processed.

        Raises:
            RuntimeError: the backend cannot restore them.
        """
        if self.kernel is None:
            return
        weight, weight_scale = self.kernel.restore_weights(self)
        bias = self._parameters.get("bias")
        self._parameters.clear()
        self._buffers.clear()
        self._set("weight", weight)
        self._set("weight_scale", weight_scale)
        for name, parameter in self._loaded_scales.items():
            self.register_parameter(name, parameter)
        self.register_parameter("bias", bias)
        self.kernel, self._loaded_scales, self.weights_padding_cols = None, {}, 0

    def loaded_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`weight` uint8 `[N, K/2]` and `weight_scale` float8_e4m3fn `[N, K/16]`, as loaded.

        Raises:
            RuntimeError: the layer's backend cannot restore them.
        """
        if self.kernel is not None:
            return self.kernel.restore_weights(self)
        return super().loaded_weights()

    def loaded_scale(self, name: str) -> torch.Tensor:
        """A tensor of `SCALES` as loaded, also if the weights were processed."""
        scale = self._loaded_scales.get(name)
        return super().loaded_scale(name) if scale is None else scale.detach()

    def extra_repr(self) -> str:
        """For `print(model)`."""
        parts = f", part_sizes={self.part_sizes}" if len(self.part_sizes) > 1 else ""
        kind = "W4A4" if self.quantize_activations else "W4A16"
        backend = self.kernel.name if self.kernel else self.backend or "not chosen yet"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {kind}{parts}, dtype={self.dtype}, backend={backend}"
        )
