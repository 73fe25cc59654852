"""Quantizes the cache of GPT-OSS, whose files have experts in MXFP4 (`halfbyte quantize` without a
format).

A checkpoint declares one method, and all that read `mxfp4` (transformers, vLLM, halfbyte) expect
every layer but the experts unquantized. So all tensors are copied bit for bit. New are the scales
of K and V, measured with one layer in memory at a time, and the declared format of the cache.

The scales have compressed-tensors' names. vLLM's loader of GPT-OSS ignores names that it does not
know, but it takes ModelOpt's `k_proj.k_scale` for a part of `qkv_proj` and fails.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from halfbyte.checkpoints.dialects.base import KV_CACHE_ALGOS, OutputFormat
from halfbyte.checkpoints.dialects.registry import read_config
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.output_folder import (
    REPORT_FILE,
    ShardWriter,
    copy_file,
    new_folder,
    write_json,
)
from halfbyte.checkpoints.stored_kv_scales import is_kv_scale
from halfbyte.kvcache import KVScales
from halfbyte.models.amax import AmaxRecorder
from halfbyte.models.architectures import check_supported
from halfbyte.models.kv_calibration import calibration_tokens, check_vocabulary, scales_from_amax
from halfbyte.models.layerwise import StreamedModel
from halfbyte.models.loader import device_or_default
from halfbyte.models.local_files import read_model_config
from halfbyte.models.nvfp4.mxfp4_experts import holds_mxfp4_experts
from halfbyte.models.tokenizer import load_tokenizer
from halfbyte.quantization.output_tensors import kv_scale_tensors
from halfbyte.quantization.report import OnProgress, QuantizationReport
from halfbyte.quantization.select_layers import attention_modules
from halfbyte.quantization.source_folder import files_to_copy

logger = logging.getLogger("halfbyte")


def check_source(folder: Path) -> None:
    """Raise ValueError unless a folder has GPT-OSS's own files."""
    if not holds_mxfp4_experts(read_model_config(folder)):
        raise ValueError(
            "format: expected modelopt or compressed-tensors; only GPT-OSS's own files, with "
            "experts in MXFP4, are written without one"
        )


def keep_mxfp4(
    folder: Path,
    destination: str | Path,
    kv_cache_dtype: str | None,
    text: str,
    name_of_text: str,
    max_shard_bytes: int,
    replace: bool,
    on_progress: OnProgress,
) -> QuantizationReport:
    """Copy a checkpoint with MXFP4 experts, with new KV scales and a declared cache.

    Args:
        folder: of the source, see `check_source`.
        kv_cache_dtype: a key of `KV_CACHE_ALGOS`.
        text, name_of_text: to calibrate on.
        destination, max_shard_bytes, replace, on_progress: as `quantize_checkpoint`; the phases are
            "measuring" and "copying".

    Raises:
        ValueError: `kv_cache_dtype` is None: there would be nothing to do.
        CheckpointError, ModelLoadError, UnsupportedModelError: as `quantize_checkpoint`.
    """
    if kv_cache_dtype is None:
        raise ValueError(
            "kv_cache_dtype: expected nvfp4 or fp8, because without a format nothing else is "
            "quantized: experts stay in MXFP4"
        )
    config = read_config(folder)
    model_config = read_model_config(folder)
    check_supported(model_config)
    files = files_to_copy(folder)
    streamed = StreamedModel(folder, model_config, device_or_default(None), "auto")
    modules = dict(streamed.model.named_modules())  # the model loses them as it runs
    attentions = attention_modules(modules)
    linear = tuple(name for name, module in modules.items() if isinstance(module, nn.Linear))
    del modules
    logger.info("%d linear layers stay unquantized: mxfp4 is a format of experts only", len(linear))
    with new_folder(destination, replace=replace) as target:
        scales = _measure(streamed, model_config, folder, text, name_of_text, on_progress)
        index = CheckpointIndex.read(folder)
        _copy_tensors(
            index, target, attentions, scales, kv_cache_dtype, max_shard_bytes, on_progress
        )
        report = QuantizationReport.of_kept(kv_cache_dtype, scales.source, linear, index, target)
        for file in files:
            copy_file(file, target / file.name)
        write_json(target / REPORT_FILE, asdict(report))
        write_json(target / "config.json", _declaring(config, kv_cache_dtype))
    return report


def _measure(
    streamed: StreamedModel,
    config: Any,
    folder: Path,
    text: str,
    name_of_text: str,
    on_progress: OnProgress,
) -> KVScales:
    ids, _ = calibration_tokens(load_tokenizer(folder), config, text, max_tokens=sys.maxsize)
    check_vocabulary(config, ids)
    recorder = AmaxRecorder()
    streamed.run(ids, recorder, partial(on_progress, "measuring"))
    source = f"{ids.numel()} tokens of {name_of_text}"
    return scales_from_amax(recorder.result(), source, 1.0)


def _copy_tensors(
    index: CheckpointIndex,
    target: Path,
    attentions: tuple[str, ...],
    scales: KVScales,
    kv_cache_dtype: str,
    max_shard_bytes: int,
    on_progress: OnProgress,
) -> None:
    """Copy all tensors but old KV scales, and write the new ones."""
    writer = ShardWriter(target, max_shard_bytes)
    names = sorted(name for name in index.tensors if not is_kv_scale(name))
    for done, (name, tensor) in enumerate(index.stream(names)):
        writer.add(name, tensor)
        on_progress("copying", done + 1, len(names))
    output = OutputFormat("compressed-tensors", False, kv_cache_dtype=kv_cache_dtype)
    for attention, *amax in zip(attentions, scales.k_amax, scales.v_amax, strict=True):
        for name, tensor in kv_scale_tensors(output, attention, *amax).items():
            writer.add(name, tensor)
    writer.finish()


def _declaring(config: Mapping[str, Any], kv_cache_dtype: str) -> dict[str, Any]:
    """The source's configuration, with the format of the cache."""
    section = config["quantization_config"]
    kept = {name: value for name, value in section.items() if not name.startswith("kv_cache_")}
    declared = {**kept, "kv_cache_quant_algo": KV_CACHE_ALGOS[kv_cache_dtype]}
    return {**config, "quantization_config": declared}
