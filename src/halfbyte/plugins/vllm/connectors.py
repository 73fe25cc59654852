"""KV connectors: keys of pages that leave the engine include formats and scales.

vLLM's connectors look up pages by the model's name and the hash of their tokens. Engines with
different scales could find each other's pages (in a folder, in LMCache, in memory that outlives an
engine) and decode wrong values. So connectors get a configuration in which the model's name, and
the folder if there is one, end with the identity of the pages (`kvcache.identity`).
"""

import copy
import hashlib
import json
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from halfbyte.after_import import after_import
from halfbyte.kvcache import KVScales
from halfbyte.kvcache.identity import pages_identity
from halfbyte.plugins.vllm.formats import LayerFormat
from halfbyte.plugins.vllm.options import Options
from halfbyte.plugins.vllm.recipes import resolve_options
from halfbyte.plugins.vllm.registry import uses_halfbyte
from halfbyte.plugins.vllm.scales import scales_of_draft, scales_of_model

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_FOLDER = "shared_storage_path"
"""Folder option of vLLM's example connector, which names files only by their tokens."""
_EXTRA = "kv_connector_extra_config"
"""Options of a connector inside a `MultiConnector`."""
_MARK = "#halfbyte-"


def install() -> None:
    """Wrap vLLM's connector factory when it is imported."""
    after_import(_FACTORY, _wrap_factory)


def is_installed() -> bool:
    """Whether this vLLM's connector factory is wrapped; False for an unsupported vLLM."""
    try:
        factory = import_module(_FACTORY).KVConnectorFactory
        return hasattr(factory.create_connector, "__wrapped__")
    except (ImportError, AttributeError):
        return False


def named_by_pages(vllm_config: Any) -> Any:
    """A connector's configuration; unchanged without halfbyte's attention.

    Args:
        vllm_config: vLLM's; not modified.
    """
    model_config = vllm_config.model_config
    is_ours = model_config is not None and uses_halfbyte(vllm_config)
    if not is_ours or _MARK in str(model_config.model):
        return vllm_config
    identity = _identity(vllm_config)[:16]
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(model_config)
    config.model_config.model = f"{model_config.model}{_MARK}{identity}"
    config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    extra = config.kv_transfer_config.kv_connector_extra_config
    config.kv_transfer_config.kv_connector_extra_config = _named_folders(extra or {}, identity)
    return config


def _named_folders(extra: dict[str, Any], identity: str) -> dict[str, Any]:
    """Options of a connector and of those inside it, with the identity appended to folders."""
    named = dict(extra)
    if _FOLDER in named:
        named[_FOLDER] = f"{named[_FOLDER]}/halfbyte-{identity}"
    if isinstance(named.get("connectors"), list):
        named["connectors"] = [
            {**part, _EXTRA: _named_folders(part[_EXTRA], identity)} if part.get(_EXTRA) else part
            for part in named["connectors"]
        ]
    return named


def _identity(vllm_config: Any) -> str:
    """Hex SHA-256 of all settings of a run that change its pages' meaning."""
    options = resolve_options(vllm_config)
    cache, load_config = vllm_config.cache_config, vllm_config.load_config
    draft = vllm_config.speculative_config
    draft_config = getattr(draft, "draft_model_config", None)
    draft_dtype = getattr(draft, "kv_cache_dtype", None) or cache.cache_dtype
    model_config, given, recipe = vllm_config.model_config, options.kv_scales, options.recipe

    def scales() -> KVScales:
        return scales_of_model(model_config, load_config, given, "kv_scales", recipe)

    def draft_scales() -> KVScales | None:
        try:
            return scales_of_draft(vllm_config, options)
        except ValueError:
            return None  # a draft without its own layers; if it needs scales, setting them raises

    parts = [_identity_of_model(cache.cache_dtype, model_config, options, scales)]
    if draft_config is not None:
        parts.append(_identity_of_model(draft_dtype, draft_config, options, draft_scales))
    fields = {
        "models": parts,
        "skipped": sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ())),
        # A page holds one rank's KV heads, so pages depend on the number of ranks.
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _identity_of_model(
    cache_dtype: str, model_config: Any, options: Options, scales: Callable[[], KVScales | None]
) -> str:
    formats = LayerFormat.of(cache_dtype, model_config.dtype, options)
    needs_scales = formats.k.has_global_scale or formats.v.has_global_scale
    found = scales() if needs_scales else None
    return pages_identity(formats.k, formats.v, found, options.recipe)


def _wrap_factory(module: ModuleType) -> None:
    factory: Any = vars(module)["KVConnectorFactory"]
    create = factory.create_connector.__func__

    @wraps(create)
    def create_connector(cls: Any, config: Any, *arguments: Any, **options: Any) -> Any:
        return create(cls, named_by_pages(config), *arguments, **options)

    factory.create_connector = classmethod(create_connector)
