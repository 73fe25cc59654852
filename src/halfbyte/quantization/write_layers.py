"""Step 3: quantizes and writes the tensors of a checkpoint, one group of layers at a time.

Layers that engines fuse (q, k and v; gate and up) get one global scale, from the amax of the group,
so that an engine with one scale for the fused weight is exact. All other tensors are copied. Memory
holds one group of layers and one shard of the result.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from halfbyte.checkpoints.dialects.base import OutputFormat
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.output_folder import ShardWriter
from halfbyte.checkpoints.stored_kv_scales import is_kv_scale
from halfbyte.kernels.cpu import library as cpu_library
from halfbyte.kvcache.store import cpu as cpu_store
from halfbyte.kvcache.store.base import StoreInputs
from halfbyte.layouts import KVCacheDType, PageLayout
from halfbyte.layouts.formats import KV_FORMATS
from halfbyte.numerics import nvfp4
from halfbyte.quantization.calibrate_layers import CalibrationResult
from halfbyte.quantization.output_tensors import (
    OutputGlobalScale,
    global_scale,
    kv_scale_tensors,
    weight_tensors,
)
from halfbyte.quantization.select_layers import LayerSelection

_NOT_FINITE = "{}: expected finite values, found NaN or infinity"
_CHUNK_VALUES = 2**20
"""Values quantized at once; temporaries take about 20 bytes per value."""
_KERNEL_FORMATS = {
    row.nvfp4_recipe: KVCacheDType(name)
    for name, row in KV_FORMATS.items()
    if row.nvfp4_recipe is not None
}


class RoundedWeight(NamedTuple):
    """A matrix in NVFP4."""

    data: torch.Tensor
    """uint8 `[N, K/2]`"""
    scales: torch.Tensor
    """float8_e4m3fn `[N, K/16]`"""


class RoundedLayer(NamedTuple):
    """A layer's codes, and the global scale that they were rounded with."""

    weight: RoundedWeight
    scale: OutputGlobalScale


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer, and its error.

    Args:
        module: its name.
        shape: `(N, K)`.
        global_scale: of the weight, a decode scale.
        sqnr_db: signal to quantization noise ratio of the weight in dB, 10 log10(sum w^2 /
            sum (w - w_quantized)^2); None if the error is zero.
    """

    module: str
    shape: tuple[int, int]
    global_scale: float
    sqnr_db: float | None


def write_layers(
    index: CheckpointIndex,
    writer: ShardWriter,
    selection: LayerSelection,
    output: OutputFormat,
    calibration: CalibrationResult,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
    rounded: Mapping[str, RoundedLayer] = MappingProxyType({}),
) -> list[LayerReport]:
    """Write every tensor of a checkpoint, with the selected layers quantized.

    Args:
        index: of the unquantized checkpoint.
        writer: receives the tensors; the caller calls its `finish`.
        selection: what to quantize.
        output: how to write it.
        calibration: with `input_amax` for every layer if `output.quantize_activations`, and
            `kv_amax` for every decoder layer if `output.kv_cache_dtype`.
        on_progress: called with the number of tensors done and the total.
        rounded: layers that are rounded already; other layers are rounded to nearest.

    Returns:
        The error of each quantized layer, in the order written.

    Raises:
        CheckpointError: a weight that is not finite, or not float32, float16 or bfloat16.
    """
    group_of = {f"{module}.weight": group for group in selection.groups for module in group}
    waiting: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    errors: list[LayerReport] = []
    # Sorting by name makes the layers of a group adjacent, so that few are held in memory.
    names = sorted(index.tensors)
    if output.kv_cache_dtype:  # drop the source's scales, in any dialect
        names = [name for name in names if not is_kv_scale(name)]
    for done, (name, tensor) in enumerate(index.stream(names)):
        group = group_of.get(name)
        if group is None:
            writer.add(name, tensor)
        else:
            waiting[group[0]][name.removesuffix(".weight")] = tensor
            if len(waiting[group[0]]) == len(group):
                weights = waiting.pop(group[0])
                errors += _quantize_group(writer, weights, output, calibration.input_amax, rounded)
        on_progress(done + 1, len(names))
    if output.kv_cache_dtype:
        for attention, amax in zip(selection.attentions, calibration.kv_amax, strict=True):
            for name, tensor in kv_scale_tensors(output, attention, *amax).items():
                writer.add(name, tensor)
    return errors


def quantize_weight(
    weight: torch.Tensor, decode: torch.Tensor, recipe: nvfp4.Recipe = "amax6"
) -> RoundedWeight:
    """Round a matrix to nearest, in chunks of rows.

    Args:
        weight: `[N, K]` on the CPU, float32, float16 or bfloat16, K % 16 == 0.
        decode: float32 `[]`, the global scale.
        recipe: of `numerics.nvfp4`; the result is bit-equal to its quantization.
    """
    n, k = weight.shape
    data = torch.empty((n, k // 2), dtype=torch.uint8, device="cpu")
    scales = torch.empty((n, k // nvfp4.BLOCK_SIZE), dtype=torch.float8_e4m3fn, device="cpu")
    for part in _row_chunks(weight):
        data[part], scales[part] = _encode(weight[part], decode, recipe)
    return RoundedWeight(data, scales)


def weight_sqnr(weight: torch.Tensor, rounded: RoundedWeight, decode: torch.Tensor) -> float | None:
    """SQNR of a quantized matrix in dB, see `LayerReport`.

    Args:
        weight: `[N, K]` on the CPU.
        rounded: the same, quantized.
        decode: float32 `[]`, the global scale.
    """
    signal = noise = 0.0
    for part in _row_chunks(weight):
        exact = weight[part].double()  # squares may exceed float32's range
        error = nvfp4.dequantize(rounded.data[part], rounded.scales[part], decode) - exact
        signal += float(exact.square().sum())
        noise += float(error.square().sum())
    return 10 * math.log10(signal / noise) if noise and signal else None


def _row_chunks(weight: torch.Tensor) -> Iterator[slice]:
    n, k = weight.shape
    rows = max(1, _CHUNK_VALUES // k)
    return (slice(start, start + rows) for start in range(0, n, rows))


def _quantize_group(
    writer: ShardWriter,
    weights: Mapping[str, torch.Tensor],
    output: OutputFormat,
    input_amax: Mapping[str, float],
    rounded: Mapping[str, RoundedLayer],
) -> list[LayerReport]:
    amax = max(max_magnitude(f"{module}.weight", x) for module, x in weights.items())
    known = rounded.get(next(iter(weights)))
    scale = known.scale if known else global_scale(amax, output.dialect, output.recipe)
    errors = []
    for module, weight in weights.items():
        if known:
            codes = rounded[module].weight
        else:
            codes = quantize_weight(weight, scale.decode, output.recipe)
        sqnr = weight_sqnr(weight, codes, scale.decode)
        seen = input_amax[module] if output.quantize_activations else None
        for name, tensor in weight_tensors(output, module, *codes, scale, seen).items():
            writer.add(name, tensor)
        n, k = weight.shape
        errors.append(LayerReport(module, (n, k), float(scale.decode), sqnr))
    return errors


def check_finite(index: CheckpointIndex, modules: Sequence[str]) -> None:
    """Raise CheckpointError for the first layer with a weight that is NaN or infinite.

    Args:
        index: of the checkpoint.
        modules: names of the layers.
    """
    names = [f"{module}.weight" for module in modules]
    bad = {name for name, weight in index.stream(names) if not weight.isfinite().all()}
    for name in names:
        if name in bad:
            raise CheckpointError(_NOT_FINITE.format(name))


def max_magnitude(name: str, weight: torch.Tensor) -> float:
    """amax of a weight.

    Raises:
        CheckpointError: the weight is not finite, or not float32, float16 or bfloat16.
    """
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise CheckpointError(
            f"{name}: expected float32, float16 or bfloat16 (an unquantized weight), "
            f"found {weight.dtype}"
        )
    low, high = (float(bound) for bound in weight.aminmax())
    amax = max(-low, high)
    if not math.isfinite(low + high):
        raise CheckpointError(_NOT_FINITE.format(name))
    return amax


def _encode(
    rows: torch.Tensor, decode: torch.Tensor, recipe: nvfp4.Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """`nvfp4.quantize`, with the C++ kernel if it is built.

    The kernel writes cache pages: a matrix is passed as K of one head, with one token per row.
    """
    if cpu_library.library() is None:
        return nvfp4.quantize(rows, decode, recipe)
    n, k = rows.shape
    layout = _layout(_KERNEL_FORMATS[recipe], n, k)
    pages = torch.empty((1, layout.page_bytes), dtype=torch.uint8, device="cpu")
    cpu_store.run(
        StoreInputs(
            key=rows[:, None],
            value=torch.zeros((), dtype=rows.dtype, device="cpu").expand(n, 1, nvfp4.BLOCK_SIZE),
            pages=pages,
            slot_mapping=torch.arange(n, device="cpu"),
            layout=layout,
            k_scale=decode,
            v_scale=1.0,
        )
    )
    views = layout.views(pages)
    assert views.k_scale is not None
    return views.k_data[0, :, 0], views.k_scale[0, :, 0].view(torch.float8_e4m3fn)


@lru_cache(maxsize=64)
def _layout(dtype: KVCacheDType, n: int, k: int) -> PageLayout:
    return PageLayout(dtype, dtype, k, nvfp4.BLOCK_SIZE, 1, n)
