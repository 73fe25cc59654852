"""KV connectors: pages that leave the engine are named by their formats and scales, too.

vLLM's connectors look pages up by the model's name and the hash of their tokens. Two engines with
other scales would find each other's pages, in a folder, in LMCache, in memory that outlives an
engine, and read them as other values. So connectors get a configuration in which the model's
name, and the folder where there is one, end in the identity of the pages (`kvcache.identity`).
"""

import copy
from functools import wraps
from types import ModuleType
from typing import Any

from halfbyte.after_import import after_import
from halfbyte.kvcache.identity import pages_identity
from halfbyte.plugins.vllm.formats import LayerFormat
from halfbyte.plugins.vllm.options import Options
from halfbyte.plugins.vllm.registry import is_halfbyte
from halfbyte.plugins.vllm.scales import scales_of_model

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_FOLDER = "shared_storage_path"
"""Of vLLM's example connector, which names files by their tokens alone."""
_MARK = "#halfbyte-"


def install() -> None:
    """Wrap vLLM's factory of connectors as soon as it is imported."""
    after_import(_FACTORY, _wrap_factory)


def named_by_pages(vllm_config: Any) -> Any:
    """A configuration for a connector; the same where halfbyte's attention is not in use.

    Args:
        vllm_config: vLLM's; it stays as it is.
    """
    model_config = vllm_config.model_config
    if not is_halfbyte(vllm_config.attention_config.backend) or _MARK in str(model_config.model):
        return vllm_config
    options = Options.parse(vllm_config.additional_config)
    formats = LayerFormat.of(vllm_config.cache_config.cache_dtype, model_config.dtype, options)
    scales = None
    if formats.k.has_global_scale or formats.v.has_global_scale:
        scales = scales_of_model(
            model_config, vllm_config.load_config, options.kv_scales, "kv_scales"
        )
    identity = pages_identity(formats.k, formats.v, scales)[:16]
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(model_config)
    config.model_config.model = f"{model_config.model}{_MARK}{identity}"
    config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    extra = dict(config.kv_transfer_config.kv_connector_extra_config or {})
    if _FOLDER in extra:
        extra[_FOLDER] = f"{extra[_FOLDER]}/halfbyte-{identity}"
    config.kv_transfer_config.kv_connector_extra_config = extra
    return config


def _wrap_factory(module: ModuleType) -> None:
    factory: Any = vars(module)["KVConnectorFactory"]
    create = factory.create_connector.__func__

    @wraps(create)
    def create_connector(cls: Any, config: Any, *arguments: Any, **options: Any) -> Any:
        return create(cls, named_by_pages(config), *arguments, **options)

    factory.create_connector = classmethod(create_connector)
