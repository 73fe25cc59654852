"""GPT-OSS's own checkpoints: experts in MXFP4, everything else unquantized.

transformers dequantizes the experts, or runs them on kernels that need a package of their own; here
they stay in four bits (`moe.MxFp4Experts`)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.models.nvfp4.experts import fused_experts
from halfbyte.models.nvfp4.layers import LayerOptions
from halfbyte.moe import MxFp4Experts


def holds_mxfp4_experts(config: Any) -> bool:
    """Whether a transformers config is of such a checkpoint."""
    section = getattr(config, "quantization_config", None)
    is_mxfp4 = isinstance(section, Mapping) and section.get("quant_method") == "mxfp4"
    return is_mxfp4 and config.model_type == "gpt_oss"


def check_surplus_of_experts(model: PreTrainedModel, index: CheckpointIndex) -> None:
    """Raise CheckpointError for a tensor beside those of MXFP4 experts.

    Loading ignores surplus tensors elsewhere; here it could be the same weights unquantized.

    Args:
        model: with `MxFp4Experts` in place.
        index: of its files.
    """
    for name, module in model.named_modules():
        if not isinstance(module, MxFp4Experts):
            continue
        known = {f"{name}.{own}" for own, _ in module.named_parameters()}
        for tensor, entry in index.tensors.items():
            if tensor.startswith(f"{name}.") and tensor not in known:
                raise CheckpointError(
                    f"{index.folder}: {tensor}: expected no such tensor beside experts in MXFP4, "
                    f"found {entry}"
                )


def put_mxfp4_experts_in_place(model: PreTrainedModel, options: LayerOptions) -> None:
    """Replace the modules of fused experts by `MxFp4Experts`, empty and on the meta device.

    Raises:
        CheckpointError: sizes that blocks do not divide.
    """
    for name, module in list(model.named_modules()):
        fused = fused_experts(module)
        if fused is None:
            continue
        assert fused.activation is not None
        try:
            experts = MxFp4Experts(
                fused.num_experts,
                fused.hidden_size,
                fused.intermediate_size,
                activation=dataclasses.replace(fused.activation, interleaved=True),
                dtype=options.dtype,
                device="meta",
                backend=options.moe_backend,
                batch_invariant=options.batch_invariant,
            )
        except ValueError as error:  # sizes that are no multiples of a block
            raise CheckpointError(f"{name}: {error}") from None
        experts.layer_name = name
        model.set_submodule(name, experts)
