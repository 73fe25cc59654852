"""Rejects unsupported configurations by name, together with vLLM's configuration checks.

Checks that need layers or scales run when the first layer is created, before weights are loaded."""

import json
import os
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from halfbyte.plugins.vllm import connectors
from halfbyte.plugins.vllm.compilation import fuse_operators, overlap_launches
from halfbyte.plugins.vllm.formats import CARRIER
from halfbyte.plugins.vllm.log import follow_vllm
from halfbyte.plugins.vllm.options import ALL_CACHE_DTYPES, SECTION, Options
from halfbyte.plugins.vllm.recipes import captures_stores, check_local_scales, resolve_options
from halfbyte.plugins.vllm.registry import (
    has_own_layers,
    has_page_specs,
    is_disabled,
    is_halfbyte,
    uses_halfbyte,
)

MAX_CAPTURED_QUERIES = 8
"""Max query tokens per sequence of a step in a full CUDA graph."""
WHOLE_BLOCK_CONNECTORS = (
    "DecodeBenchConnector",
    "ExampleConnector",
    "LMCacheMPConnector",
    "OffloadingConnector",
    "SharedStorageConnector",
    "SimpleCPUOffloadConnector",
)
"""KV connectors that copy whole blocks between engines of one layout. LMCache's other one,
`LMCacheConnectorV1`, sizes its memory by the model's heads in one dtype, not by pages."""
OFFLOADING_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""Those that copy whole blocks in vLLM 0.24 too, where other connectors split K and V."""

_CONNECTOR_PACKAGES = ("vllm", "lmcache")
"""Packages whose connectors of these names copy whole blocks: vLLM prefers the class of a
`kv_connector_module_path` to its own of that name."""


def install() -> None:
    """Check halfbyte's options where vLLM checks its own, and set compiler options.

    Has no effect without halfbyte's attention or options.
    """
    from vllm.config import VllmConfig

    check_own: Callable[[Any], None] = VllmConfig.__post_init__

    @wraps(check_own)
    def check_both(self: Any) -> None:
        check_own(self)
        _check_options(self)
        overlap_launches(self)
        fuse_operators(self)

    VllmConfig.__post_init__ = check_both


def _check_options(vllm_config: Any) -> None:
    """Raise ValueError for options and settings that cannot be served, and scales that are missing.

    Here the error is vLLM's last line; in a worker it would precede pages of traceback.
    """
    if is_disabled():
        return
    options = Options.parse(vllm_config.additional_config)
    if uses_halfbyte(vllm_config):
        follow_vllm()
        _check_settings(vllm_config, options)
        check_local_scales(vllm_config, options)
    # A draft's configuration, derived from the run's, may have another backend.
    elif vllm_config.speculative_config is None:
        for name in options.of_attention():
            raise ValueError(f"{SECTION}.{name}: needs --attention-backend CUSTOM")


def check_config(vllm_config: Any) -> Options:
    """Check that halfbyte can serve a run, and return its options.

    Args:
        vllm_config: vLLM's.

    Raises:
        ValueError: one line with what is not supported and what to do instead.
    """
    follow_vllm()
    _check_settings(vllm_config, Options.parse(vllm_config.additional_config))
    options = resolve_options(vllm_config)
    if options.recipe.changes_k and captures_stores(vllm_config):
        raise _refused(
            f"kv_recipe {options.kv_recipe} with piecewise CUDA graphs that contain the cache's "
            "update, and would replay it with the positions of the captured step,",
            "leave out use_inductor_graph_partition and splitting_ops, or use "
            "cudagraph_mode FULL_DECODE_ONLY or NONE",
        )
    return options


def _check_settings(vllm_config: Any, options: Options) -> None:
    """Raise ValueError for settings that cannot be served, whatever the model and its scales."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise _refused(f"{name} = {size}", "use tensor or pipeline parallel")
    if getattr(cache, "calculate_kv_scales", False):
        raise _refused(
            "calculate_kv_scales, which takes scales from live requests,",
            "use `halfbyte calibrate`",
        )
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    if skipped and not has_page_specs():
        raise _refused(
            f"kv_cache_dtype_skip_layers = {skipped} with this vLLM, which gives every layer the "
            "page of the run's cache dtype,",
            "use vLLM 0.32 or later, or one cache dtype",
        )
    if (options.k_dtype or options.v_dtype) and not has_page_specs():
        raise _refused(
            "k_dtype and v_dtype with this vLLM, which supports only its own cache dtypes,",
            "use vLLM 0.32 or later",
        )
    model_config: Any = getattr(vllm_config, "model_config", None)
    if getattr(model_config, "enable_sleep_mode", False) and not has_page_specs():
        raise _refused(
            "enable_sleep_mode with this vLLM, which loses the cache's scales in sleep mode,",
            "use vLLM 0.32 or later",
        )
    # A draft's configuration, derived from the run's, may have another backend or model.
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    if (options.k_dtype or options.v_dtype) and _needs_nvfp4_cache_dtype(vllm_config):
        raise _refused(
            f"k_dtype or v_dtype with the cache dtype {cache.cache_dtype}",
            f"use --kv-cache-dtype {CARRIER}",
        )
    attention: Any = getattr(vllm_config, "attention_config", None)
    if speculative is None and attention is not None and is_halfbyte(attention.backend):
        if cache.cache_dtype not in ALL_CACHE_DTYPES:
            raise _refused(
                f"kv_cache_dtype = {cache.cache_dtype}",
                f"use --kv-cache-dtype {CARRIER}, or another of {', '.join(ALL_CACHE_DTYPES)}",
            )
        if getattr(model_config, "use_mla", False):
            raise _refused(
                f"{model_config.model}: MLA, which stores no separate K and V,",
                "use vLLM's own backend: leave out --attention-backend",
            )
    _check_graphs(vllm_config)
    _check_skipped_layers(skipped, model_config if speculative is None else None)
    _check_draft_scales(options, speculative)
    _check_files(options)
    _check_connector(getattr(vllm_config, "kv_transfer_config", None))


def _needs_nvfp4_cache_dtype(vllm_config: Any) -> bool:
    """Whether `k_dtype` and `v_dtype` are for this configuration's layers, but its cache dtype is
    not the one that they need.

    A draft may have an unquantized cache beside them. For a target on another backend they are
    ignored, since they are its draft's.
    """
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype == CARRIER:
        return False
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return True
    draft = getattr(speculative, "draft_model_config", None)
    # Proposers without a model, such as ngram, have the target's configuration there.
    own_draft = draft is not None and draft is not getattr(speculative, "target_model_config", None)
    if own_draft and vllm_config.model_config is draft:
        return cache_dtype not in ("auto", "bfloat16", "float16")
    return has_own_layers(vllm_config.attention_config)


def queries_per_step(vllm_config: Any) -> int:
    """Query tokens per sequence of a decode step: one, and the draft's."""
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    return 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)


def _check_graphs(vllm_config: Any) -> None:
    """Raise ValueError for full CUDA graphs of more query tokens than the decode kernels take.

    With other modes vLLM runs such steps in piecewise graphs, or without, and says so.
    """
    compilation: Any = getattr(vllm_config, "compilation_config", None)
    mode = getattr(getattr(compilation, "cudagraph_mode", None), "name", None)
    queries = queries_per_step(vllm_config)
    if mode == "FULL" and queries > MAX_CAPTURED_QUERIES:
        raise _refused(
            f"cudagraph_mode {mode} with {queries - 1} draft tokens, since full CUDA graphs take "
            f"up to {MAX_CAPTURED_QUERIES} query tokens per sequence,",
            f"use up to {MAX_CAPTURED_QUERIES - 1} draft tokens, or cudagraph_mode PIECEWISE",
        )


def _check_skipped_layers(skipped: Any, model_config: Any) -> None:
    """Raise ValueError for names that no layer has, which vLLM ignores.

    Args:
        skipped: `kv_cache_dtype_skip_layers`.
        model_config: None if a draft's layers are numbered, too.
    """
    text_config = getattr(model_config, "hf_text_config", None)
    layers = getattr(text_config, "num_hidden_layers", None)
    has_windows = text_config is None or getattr(text_config, "sliding_window", None)
    for name in skipped or ():
        # As vLLM writes indices: "01" would match none.
        is_index = re.fullmatch(r"0|[1-9][0-9]*", name) and (layers is None or int(name) < layers)
        if not is_index and not (name == "sliding_window" and has_windows):
            last = "" if layers is None else f" up to {layers - 1}"
            raise _refused(
                f"kv_cache_dtype_skip_layers = {name}, which names no layer,",
                f"use the number of a layer{last}, or sliding_window where layers have one",
            )


def _check_draft_scales(options: Options, speculative: Any) -> None:
    if options.draft_kv_scales is None:
        return
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft is getattr(speculative, "target_model_config", None):
        raise ValueError(
            f"halfbyte: draft_kv_scales: {options.draft_kv_scales}: the run has no draft model; "
            "leave it out, or give --speculative-config"
        )


def _check_files(options: Options) -> None:
    for name in ("kv_scales", "draft_kv_scales"):
        path = getattr(options, name)
        if path is not None and not os.path.exists(path):
            raise ValueError(f"halfbyte: {name}: {path}: no such file; give a file of KV scales")


def _check_connector(transfer: Any) -> None:
    allowed = WHOLE_BLOCK_CONNECTORS if has_page_specs() else OFFLOADING_CONNECTORS
    for name, module in _connectors(transfer):
        if name not in allowed:
            raise _refused(
                f"kv_connector = {name}, which may split pages or move them between layouts,",
                f"use one that moves whole blocks: {', '.join(allowed)}",
            )
        if _is_foreign(module):
            raise _refused(
                f"kv_connector_module_path = {module}, whose {name} may split pages,",
                "leave it out, so that vLLM's own is used",
            )
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    if "canonical_layout" in json.dumps(extra, default=str):
        raise _refused(
            "canonical_layout, which splits pages by vLLM's own order of K and V,",
            "leave it out",
        )
    if _connectors(transfer) and not connectors.is_installed():
        raise _refused(
            "a KV connector with this vLLM, whose block keys cannot include the scales,",
            "use a version of vLLM listed in docs/vllm.md",
        )


def _connectors(transfer: Any) -> list[tuple[str, str | None]]:
    """Names and modules of the connectors in use, including those inside a `MultiConnector`."""
    if transfer is None or getattr(transfer, "kv_connector", None) is None:
        return []
    module = getattr(transfer, "kv_connector_module_path", None)
    if transfer.kv_connector != "MultiConnector" or _is_foreign(module):
        return [(transfer.kv_connector, module)]
    parts = (transfer.kv_connector_extra_config or {}).get("connectors", [])
    return [(str(x.get("kv_connector")), x.get("kv_connector_module_path")) for x in parts]


def _is_foreign(module: str | None) -> bool:
    return bool(module) and str(module).partition(".")[0] not in _CONNECTOR_PACKAGES


def _refused(what: str, instead: str) -> ValueError:
    return ValueError(f"halfbyte: {what} is not supported; {instead}")
