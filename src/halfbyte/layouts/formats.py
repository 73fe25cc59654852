"""The one table of KV cache formats: what the bytes mean, and the ids that kernels give them.

`KVCacheDType` takes its names and properties from here. Kernels derive their tables from it: they
read the formats that have an id of theirs, or that fulfil a condition on other fields, and leave
all others to the reference. A new row without ids therefore runs on the reference.
"""

from dataclasses import dataclass, replace

import torch

from halfbyte.numerics import block_fp4, nvfp4
from halfbyte.numerics.e2m1 import E2M1_MAX
from halfbyte.numerics.e4m3 import E4M3_MAX
from halfbyte.numerics.e5m2 import E5M2_MAX
from halfbyte.numerics.fp8 import Fp8Format


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """A format of K or V. Values are `element * block scale * global scale`.

    Raises:
        ValueError: a block size without a dtype of the block scales, or the reverse.
    """

    bits: int
    """Bits per element."""
    element: torch.dtype | None = None
    """Torch's dtype of an element; None if it has none."""
    max_value: float
    """Largest finite element."""
    block_size: int | None = None
    """Values that share one block scale; None where there are no block scales."""
    scale_dtype: torch.dtype | None = None
    """Of block scales."""
    has_global_scale: bool = False
    """Whether K and V have a float32 scale per layer."""

    fp8: Fp8Format | None = None
    """The format's name in `numerics.fp8`, if it is one of those."""
    nvfp4_recipe: nvfp4.Recipe | None = None
    """How block scales are chosen (`numerics.nvfp4`), if the bits are NVFP4; not a `KVRecipe`."""
    modelopt: str | None = None
    """ModelOpt's name (`kv_cache_quant_algo`), if checkpoints can declare the format."""

    exact_in_float16: bool = False
    """Whether float16 holds every element times its block scale times `2^-shift`; others are
    decoded to bfloat16 or float32."""
    shift: int = 0
    """Decoding in Triton returns values times `2^-shift` (`kernels/formats/decode.py`)."""
    triton_kind: str | None = None
    """Name of the format whose decoder reads it in Triton; None if Triton's kernels lack it."""
    cpu_id: int | None = None
    """Its value in the C++ enum `Format` (`kernels/cpu/formats.h`)."""
    cuda_id: int | None = None
    """`K_KIND` and `V_KIND` of decode in CUDA C++ (`attention/decode/formats.cuh`); equal for
    formats with one decoder."""
    cuda_store_id: int | None = None
    """`V_KIND` of the store in CUDA C++ (`kvcache/store/cuda/values.cuh`). Unlike a reader, a
    writer must tell `nvfp4` from `nvfp4_4over6`."""

    def __post_init__(self) -> None:
        if (self.block_size is None) != (self.scale_dtype is None):
            raise ValueError(
                "block_size and scale_dtype: expected both or neither, got "
                f"{self.block_size} and {self.scale_dtype}"
            )

    @property
    def is_quantized(self) -> bool:
        """Whether values are stored in fewer bits than a model computes in."""
        return self.bits < 16

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the stored elements: uint8 for quantized formats, else the float dtype."""
        return torch.uint8 if self.is_quantized or self.element is None else self.element


_NVFP4 = KVFormat(
    bits=4,
    max_value=E2M1_MAX,
    block_size=nvfp4.BLOCK_SIZE,
    scale_dtype=torch.float8_e4m3fn,
    has_global_scale=True,
    nvfp4_recipe="amax6",
    modelopt="NVFP4",
    exact_in_float16=True,
    shift=7,
    triton_kind="nvfp4",
    cpu_id=5,
    cuda_id=4,
    cuda_store_id=4,
)

KV_FORMATS = {
    "float32": KVFormat(
        bits=32,
        element=torch.float32,
        max_value=torch.finfo(torch.float32).max,
        triton_kind="float32",
        cpu_id=0,
    ),
    "float16": KVFormat(
        bits=16,
        element=torch.float16,
        max_value=torch.finfo(torch.float16).max,
        exact_in_float16=True,
        triton_kind="float16",
        cpu_id=1,
        cuda_id=16,
    ),
    "bfloat16": KVFormat(
        bits=16,
        element=torch.bfloat16,
        max_value=torch.finfo(torch.bfloat16).max,
        triton_kind="bfloat16",
        cpu_id=2,
        cuda_id=17,
    ),
    "fp8_e4m3": KVFormat(
        bits=8,
        element=torch.float8_e4m3fn,
        max_value=E4M3_MAX,
        has_global_scale=True,
        fp8="e4m3",
        modelopt="FP8",
        exact_in_float16=True,
        shift=8,
        triton_kind="fp8_e4m3",
        cpu_id=3,
        cuda_id=8,
        cuda_store_id=8,
    ),
    "fp8_e5m2": KVFormat(
        bits=8,
        element=torch.float8_e5m2,
        max_value=E5M2_MAX,
        has_global_scale=True,
        fp8="e5m2",
        exact_in_float16=True,
        triton_kind="fp8_e5m2",
        cpu_id=4,
        cuda_id=9,
        cuda_store_id=9,
    ),
    "nvfp4": _NVFP4,
    "nvfp4_4over6": replace(
        _NVFP4, nvfp4_recipe="four_over_six", modelopt=None, cpu_id=6, cuda_store_id=6
    ),
    "fp4_block16": KVFormat(
        bits=4,
        max_value=E2M1_MAX,
        block_size=block_fp4.FP4_BLOCK16_BLOCK_SIZE,
        scale_dtype=torch.float8_e8m0fnu,
        shift=6,
        triton_kind="fp4_block16",
        cpu_id=7,
    ),
    "mxfp4": KVFormat(
        bits=4,
        max_value=E2M1_MAX,
        block_size=block_fp4.MXFP4_BLOCK_SIZE,
        scale_dtype=torch.float8_e8m0fnu,
        shift=6,
        triton_kind="mxfp4",
        cpu_id=8,
    ),
}
"""All formats by name."""
