"""transformers models on the paged cache: loading, attention functions, `Cache` for `generate`."""

from halfbyte.models.architectures import (
    SUPPORTED_MODEL_TYPES,
    LayerDTypes,
    UnsupportedModelError,
    check_layer_dtypes,
    check_supported,
    layer_specs,
)
from halfbyte.models.attention_functions import BATCH_ARGUMENT, ENGINE, GENERATE, register
from halfbyte.models.batch import KVQuantization, PagedBatch
from halfbyte.models.cache import Cache
from halfbyte.models.choose_kv_scales import find_kv_scales, resolve_kv_scales
from halfbyte.models.kv_calibration import calibrate
from halfbyte.models.loader import load_model
from halfbyte.models.local_files import ModelLoadError
from halfbyte.models.tokenizer import load_tokenizer

__all__ = [
    "BATCH_ARGUMENT",
    "ENGINE",
    "GENERATE",
    "SUPPORTED_MODEL_TYPES",
    "Cache",
    "KVQuantization",
    "LayerDTypes",
    "ModelLoadError",
    "PagedBatch",
    "UnsupportedModelError",
    "calibrate",
    "check_layer_dtypes",
    "check_supported",
    "find_kv_scales",
    "layer_specs",
    "load_model",
    "load_tokenizer",
    "register",
    "resolve_kv_scales",
]
