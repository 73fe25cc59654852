"""halfbyte's W4A16 kernels behind vLLM's interface for NVFP4 layers."""

import logging
from functools import cache
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig

from halfbyte.linear import NvFp4LinearLayerConfig as LayerConfig
from halfbyte.linear import init_nvfp4_linear_kernel
from halfbyte.plugins.vllm.attention import batch_invariant
from halfbyte.plugins.vllm.log import follow_vllm
from halfbyte.plugins.vllm.part_scales import part_scales
from halfbyte.plugins.vllm.scales import has_no_weights
from halfbyte.plugins.vllm.unloaded import check_linear, mark_linear

logger = logging.getLogger("halfbyte")

_SURPLUS = ("input_global_scale", "input_global_scale_inv", "alpha")
"""Parameters that vLLM creates for quantized activations."""


def make_kernel(use_a16: bool) -> "HalfbyteNvFp4LinearKernel":
    """The kernel of one layer; logs once how W4A4 layers run."""
    _log_choice(use_a16)
    return HalfbyteNvFp4LinearKernel(NvFp4LinearLayerConfig())


@cache
def _log_choice(use_a16: bool) -> None:
    follow_vllm()
    if use_a16:
        logger.info("NVFP4 linear layers run on halfbyte's kernels")
    else:
        logger.warning(
            "NVFP4 linear layers run on halfbyte's kernels as W4A16: activations stay in 16 bits, "
            "which the checkpoint would quantize (W4A4)"
        )


class HalfbyteNvFp4LinearKernel(NvFp4LinearKernel):
    """W4A16, also for W4A4 checkpoints."""

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        # Read it here: the configuration is not available when weights are processed.
        load_config = get_current_vllm_config().load_config
        self._is_dummy = has_no_weights(load_config)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """CPUs, and GPUs from SM80."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            return True, None
        capability = current_platform.get_device_capability()
        if capability is None or capability.to_int() < 80:
            return False, "needs a CPU, or an NVIDIA GPU from SM80"
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """True for every layer: `config` does not describe it."""
        return True, None

    def mark_unloaded(self, layer: Any) -> None:
        """Mark the parameters that vLLM has created; dummy weights leave codes as they are."""
        if not self._is_dummy:
            mark_linear(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the layer's attributes to halfbyte's, and repack its weights for a kernel.

        Raises:
            ValueError: weights were not loaded, or a scale is invalid; the message names the layer.
        """
        device = layer.weight.device
        n, k = layer.weight.shape[0], 2 * layer.weight.shape[1]
        parts = tuple(size for size in layer.logical_widths if size)
        config = LayerConfig(
            n=n,
            k=k,
            dtype=layer.params_dtype,
            device_type=device.type,
            batch_invariant=batch_invariant(),
            part_sizes=parts if sum(parts) == n else (),
        )
        scales = part_scales(layer, len(config.part_sizes) or 1).to(device)
        if not self._is_dummy:
            check_linear(layer, config.part_sizes or (n,), scales)
        for name in _SURPLUS:
            layer._parameters.pop(name, None)
            vars(layer).pop(name, None)
        weight, weight_scale = layer.weight.data, layer.weight_scale.data
        if self._is_dummy:
            weight_scale, scales = sane_scales(weight_scale, scales)
        # Plain parameters, without vLLM's weight loaders.
        for name, tensor in (
            ("weight", weight),
            ("weight_scale", weight_scale),
            ("weight_global_scale", scales),
            ("alpha", scales.clone()),
        ):
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
        attributes: dict[str, Any] = {
            "input_global_scale": None,
            "input_global_scale_inv": None,
            "part_sizes": config.part_sizes or (n,),
            "in_features": k,
            "out_features": n,
            "weights_padding_cols": 0,
        }
        for name, value in attributes.items():
            setattr(layer, name, value)
        self.kernel = init_nvfp4_linear_kernel(config)
        self.kernel.process_weights_after_loading(layer)

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[..., K]` to `[..., N]`."""
        return self.kernel.apply_weights(layer, x, bias)


def sane_scales(
    weight_scale: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace invalid dummy scales, which may be NaN, negative or nearly 0.

    Args:
        weight_scale: float8_e4m3fn, block scales.
        scales: float32, global scales.
    """
    codes = 0x28 + weight_scale.view(torch.uint8) % 0x20
    return codes.view(torch.float8_e4m3fn), torch.full_like(scales, 1e-3)
