"""Lets `AutoModelForCausalLM.from_pretrained` load NVFP4 checkpoints once halfbyte is imported.

transformers looks up quantizers by `quant_method`. It knows neither `modelopt` nor SGLang's names
for it (`modelopt_fp4`, ...): after a warning it would load such a checkpoint without its weights.
`compressed-tensors` belongs to the package of that name; halfbyte takes over only checkpoints that
say `"provider": "halfbyte"`, and refuses NVFP4 experts in others: transformers (5.23) loads them
without their global scales.

`import halfbyte` must stay light, so nothing here imports transformers. Registration happens now if
transformers is loaded, else when its registry is imported. The registered objects import the rest
on first use.
"""

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from halfbyte.after_import import after_import

METHOD = "halfbyte"  # as `transformers_quantizer.METHOD`, which is too heavy to import

_REGISTRY = "transformers.quantizers.auto"
_OURS = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")
_SHARED = "compressed-tensors"

logger = logging.getLogger("halfbyte")


def install() -> None:
    """Register with transformers, now or when it is imported. A second call has no effect."""
    after_import(_REGISTRY, _register)


def _register(registry: ModuleType) -> None:
    """Add our method to transformers' tables; if they are missing, log a warning only."""
    try:
        configs, quantizers = (
            registry.AUTO_QUANTIZATION_CONFIG_MAPPING,
            registry.AUTO_QUANTIZER_MAPPING,
        )
        upstream = configs[_SHARED]
    except (AttributeError, KeyError) as error:
        logger.warning(
            "from_pretrained cannot load NVFP4 checkpoints with this transformers (%s); "
            "halfbyte.load_model can",
            error,
        )
        return
    if METHOD in quantizers:
        return
    quantizers[METHOD] = _make_quantizer
    configs[METHOD] = _OurConfig
    for name in _OURS:
        configs[name] = _dispatching(configs[name]) if name in configs else _OurConfig
    configs[_SHARED] = _dispatching(upstream)
    if _SHARED in quantizers:
        quantizers[_SHARED] = _refusing_experts(quantizers[_SHARED])


def _make_quantizer(config: Any, **kwargs: Any) -> Any:
    from halfbyte.models.nvfp4.transformers_quantizer import NvFp4Quantizer

    return NvFp4Quantizer(config, **kwargs)


class _OurConfig:
    """Entry in transformers' table of configurations; creates `NvFp4Config`."""

    @staticmethod
    def from_dict(section: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """See `NvFp4Config.from_dict`."""
        from halfbyte.models.nvfp4.transformers_quantizer import NvFp4Config

        return NvFp4Config.from_dict(section, *args, **kwargs)


def _dispatching(upstream: Any) -> Any:
    """Upstream's class, but with halfbyte's own checkpoints passed to halfbyte."""

    def from_dict(cls: type, section: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        from halfbyte.checkpoints.dialects.base import PROVIDER, PROVIDER_KEY

        ours = section.get(PROVIDER_KEY) == PROVIDER
        target = _OurConfig if ours else upstream
        return target.from_dict(section, *args, **kwargs)

    return type(upstream.__name__, (upstream,), {"from_dict": classmethod(from_dict)})


def _refusing_experts(upstream: Any) -> Any:
    """Upstream's quantizer, but NVFP4 experts are an error before weights are read."""

    def before_loading(self: Any, model: Any, **kwargs: Any) -> Any:
        from halfbyte.models.nvfp4.transformers_quantizer import refuse_packed_experts

        refuse_packed_experts(model, kwargs.get("checkpoint_files") or ())
        return upstream._process_model_before_weight_loading(self, model, **kwargs)

    return type(
        upstream.__name__, (upstream,), {"_process_model_before_weight_loading": before_loading}
    )
