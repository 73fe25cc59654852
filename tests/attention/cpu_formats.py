"""Formats of K and V that C++ attention reads, by name: arguments of `make_case`."""

from typing import Any

from kvcache.page_arithmetic import KERNEL_DTYPES

FORMATS: dict[str, dict[str, Any]] = {
    **{dtype: {"k_dtype": dtype} for dtype in KERNEL_DTYPES},
    "fp8-nvfp4": {"k_dtype": "fp8", "v_dtype": "nvfp4", "head_size_v": 128},
    "nvfp4-fp8": {"k_dtype": "nvfp4", "v_dtype": "fp8_e5m2"},
    "nvfp4-bfloat16": {"k_dtype": "nvfp4", "v_dtype": "bfloat16", "head_size_v": 40},
    "float16-mxfp4": {"k_dtype": "float16", "head_size": 72, "v_dtype": "mxfp4", "head_size_v": 96},
    "fp8-odd": {"k_dtype": "fp8", "head_size": 37, "v_dtype": "float32", "head_size_v": 5},
    "fp8-sm100": {"k_dtype": "fp8", "v_dtype": "nvfp4", "v_scale_layout": "sm100"},
}
