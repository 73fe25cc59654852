"""Quantization parameters of a layer's K and V: global scales and the recipe's transform."""

from typing import NamedTuple

import torch

from halfbyte.kvcache.quant_methods import get_kv_cache_quant_method
from halfbyte.kvcache.recipe import KVRecipe
from halfbyte.kvcache.scales import KVScales
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import KVCacheDType


class LayerQuantization(NamedTuple):
    """Global scales and transform of one layer."""

    k_scale: float
    """Global scale of K; 1 for formats without one."""
    v_scale: float
    transform: KVTransform | None
    """None if K is packed unchanged."""

    @classmethod
    def of(
        cls,
        scales: KVScales | None,
        layer: int,
        k_dtype: KVCacheDType,
        v_dtype: KVCacheDType,
        recipe: KVRecipe | None = None,
        device: torch.device | str = "cpu",
        heads: slice = slice(None),
    ) -> "LayerQuantization":
        """The parameters for a layer's formats.

        Args:
            scales: of the model; None where no format has a global scale.
            layer: its number.
            k_dtype, v_dtype: formats of K and V.
            recipe: by default `plain`; one that changes K applies only if K is NVFP4.
            device: for the transform's tensors.
            heads: KV heads that the layer has here, by default all of the model's.

        Raises:
            ValueError: the layer needs a scale and there is none, or the recipe a calibration.
        """
        k_method, v_method = map(get_kv_cache_quant_method, (k_dtype, v_dtype))
        if not (k_method.needs_global_scale() or v_method.needs_global_scale()):
            return cls(1.0, 1.0, None)
        if scales is None:
            raise ValueError(f"KV scales: layer {layer} is {k_dtype} and has no scale")
        k_amax, v_amax = scales.amax_of_layer(layer)
        transform = None
        if recipe is not None and recipe.changes_k and k_dtype.is_nvfp4:
            calibration = scales.calibration_for(recipe)
            k_amax, v_amax = calibration.amax(layer, recipe)
            transform = calibration.transform(layer, recipe, device, heads)
            if transform.is_on_gpu:
                transform.prepare()
        k_scale, v_scale = (
            method.global_scale_from_amax(amax)
            for method, amax in ((k_method, k_amax), (v_method, v_amax))
        )
        return cls(k_scale, v_scale, transform)
