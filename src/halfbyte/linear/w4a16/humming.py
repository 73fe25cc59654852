"""The Humming library: W4A16 on every NVIDIA GPU from SM75, compiled for each shape at load.

Humming supports NVFP4 directly: E2M1 codes, E4M3 scales in groups of 16 and one float32 global
scale, applied to the float32 accumulator. Codes times block scales are exact in its float16 and
bfloat16, subnormals included, so that only the result is rounded. It also has a scale per output
channel, but in the dtype of the activations; so parts with different global scales are separate
calls (`runs`).

By default Humming splits K: CTAs round their partial sums and add them to the result in any order.
The error is up to 1.47 times the limit for backends here (`benchmarks/results/linear.json`). Layers
use its batch-invariant mode, which accumulates all of K in float32; its speed was not measured.

N is padded to a multiple of 8 here, and by Humming itself to tiles. Humming cannot restore the
weights that it repacked.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import nn

from halfbyte.dispatch import missing_version
from halfbyte.layouts.gemm_layouts import BLOCK_SIZE, pad_weight
from halfbyte.linear.base import NvFp4LinearLayerConfig
from halfbyte.linear.ops import linear_op
from halfbyte.linear.runs import concat_outputs, runs_of
from halfbyte.linear.tensors import matrix_of, set_tensor, tensor_of
from halfbyte.linear.w4a16.weight_only import WeightOnlyKernel

_OLDEST = (0, 1, 19)
_ROW_MULTIPLE = 8
_TILE_N, _TILE_K = 256, 128
"""Padding for Humming: vLLM's choice, which Humming is tuned for."""
_NUM_LOCKS = 2048
"""int32 locks of stream-K, as many as Humming's own layer has."""

BATCH_INVARIANT_CAPABILITIES: frozenset[int] = frozenset()
"""Compute capabilities on which its batch-invariant mode was verified to be bitwise invariant."""


# The locks are zero again after every call, so `mutates_args` stays empty.
@linear_op("nvfp4_linear_humming")
def _humming_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    locks: torch.Tensor,
    layer_config: str,
    compute_config: str,
    n: int,
) -> torch.Tensor:
    matrix = matrix_of(x)
    if not matrix.shape[0]:
        return x.new_empty((*x.shape[:-1], n))
    product = import_module("humming.ops").humming_gemm(
        layer_config=layer_config,
        compute_config=compute_config,
        inputs=matrix,
        weight=weight,
        weight_scale=weight_scale,
        weight_scale_2=global_scale,
        locks=locks,
    )
    return product[:, :n].contiguous().view(*x.shape[:-1], n)


class HummingKernel(WeightOnlyKernel):
    """`humming.ops.humming_gemm` with 16-bit activations."""

    name: ClassVar[str] = "humming"
    library: ClassVar[str] = "the Humming library"
    _splits_k: ClassVar[bool] = False

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self.layer_configs: list[str] = []
        self.compute_config = json.dumps(
            {
                "use_batch_invariant": config.batch_invariant or not self._splits_k,
                "use_f16_accum": False,
                "gemm_type": "dense",
            }
        )

    @classmethod
    @contextmanager
    def splitting_k(cls) -> Iterator[None]:
        """Within this context, new layers let Humming split K, for benchmarks of its best speed."""
        before, cls._splits_k = cls._splits_k, True
        try:
            yield
        finally:
            cls._splits_k = before

    @classmethod
    def is_batch_invariant(cls, compute_capability: int) -> bool:
        """Only where Humming's batch-invariant mode was verified."""
        return compute_capability in BATCH_INVARIANT_CAPABILITIES

    @classmethod
    def missing(cls) -> str | None:
        """Humming, if not installed or too old; not imported, because that starts compilers."""
        return missing_version("humming-kernels", _OLDEST)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Let Humming repack the weights and compile its kernels for every M."""
        weight, scales = tensor_of(layer, "weight"), tensor_of(layer, "weight_scale")
        global_scales = tensor_of(layer, "weight_global_scale")
        self.runs = runs_of(self.config, layer)
        self.layer_configs = []
        for run in self.runs:
            codes, block_scales = pad_weight(
                run.of(weight), run.of(scales), _ROW_MULTIPLE, BLOCK_SIZE
            )
            global_scale = global_scales[run.part : run.part + 1].clone()
            layer_config, tensors = _transform(codes, block_scales, global_scale, self.config)
            self.layer_configs.append(layer_config)
            set_tensor(layer, run.name("weight"), tensors["weight"])
            set_tensor(layer, run.name("weight_scale"), tensors["weight_scale"])
            set_tensor(layer, run.name("humming_global_scale"), tensors["weight_scale_2"])
        set_tensor(layer, "locks", torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=weight.device))
        # Compiles now; the first call may be within graph capture.
        probe = torch.zeros(1, self.config.k, dtype=self.config.dtype, device=weight.device)
        self.apply_weights(layer, probe)

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `NvFp4LinearKernel.apply_weights`."""
        outputs = [
            _humming_linear(
                x,
                getattr(layer, run.name("weight")),
                getattr(layer, run.name("weight_scale")),
                getattr(layer, run.name("humming_global_scale")),
                layer.locks,
                layer_config,
                self.compute_config,
                run.rows,
            )
            for run, layer_config in zip(self.runs, self.layer_configs, strict=True)
        ]
        return concat_outputs(outputs, bias)


def _transform(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    config: NvFp4LinearLayerConfig,
) -> tuple[str, dict[str, torch.Tensor]]:
    """Humming's description of a run, as JSON, and the run's tensors in its order."""
    dtypes, schema = import_module("humming.dtypes"), import_module("humming.schema")
    enums, transform = import_module("humming.config"), import_module("humming.transform")
    weight_schema = schema.HummingWeightSchema(
        b_dtype=dtypes.float4e2m1,
        bs_dtype=dtypes.float8e4m3,
        weight_scale_group_size=BLOCK_SIZE,
        weight_scale_type=enums.WeightScaleType.GROUP,
        weight_scale_2_type=enums.WeightScale2Type.TENSOR,
    )
    layer_config: Any
    layer_config, tensors = transform.prepare_and_transform_humming_tensors(
        tensors={
            "weight": codes.contiguous().view(torch.int32),
            "weight_scale": scales.contiguous(),
            "weight_scale_2": global_scale,
        },
        shape_n=codes.shape[0],
        shape_k=config.k,
        weight_schema=weight_schema,
        pad_n_to_multiple=_TILE_N,
        pad_k_to_multiple=_TILE_K,
        torch_dtype=config.dtype,
        device=codes.device,
    )
    return layer_config.to_str(), tensors
