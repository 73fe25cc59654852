"""`prepare.cu`, the kernel before decode, run on the CPU, against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.cases import TRANSFORM_CASES, make_case
from attention.decode.decode_plans import Step, on_host
from attention.queries.test_queries import assert_transformed
from cuda_on_host import needs_compiler
from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.decode.prepare import Prepared, prepare
from halfbyte.attention.queries.launcher import TransformedQuery

pytestmark = needs_compiler

NAMES = ["d128", "several-queries", "window", "sinks-softcap", "mqa-32"]


def made(inputs: AttentionInputs, prepared: Prepared) -> TransformedQuery:
    """The tensors that `prepare` returns."""
    of_address = {tensor.data_ptr(): tensor for tensor in prepared.kept}
    struct = prepared.transformed
    return TransformedQuery(
        prepared.query,
        of_address.get(struct.bias),
        of_address.get(struct.first_scores),
        of_address.get(struct.first_indices),
        of_address.get(struct.first_values),
        0 if prepared.variant is None else prepared.variant.segment,
    )


@pytest.mark.parametrize("name", NAMES)
def test_queries_are_transformed(name: str) -> None:
    def transform(inputs: AttentionInputs, bias_scale: float) -> Any:
        with on_host(Step([], []), attention=True):
            result = made(inputs, prepare(inputs))
        assert result.bias is not None
        scale = inputs.scale * (1.0 if inputs.softcap else torch.log2(torch.tensor(torch.e)))
        return result._replace(bias=result.bias * float(bias_scale / scale))

    case = make_case(**TRANSFORM_CASES[name])
    constants = case.options["transform"]
    case.options["transform"] = replace(
        constants,
        first_keys=constants.first_keys.to(case.query.dtype),
        first_values=constants.first_values.to(case.query.dtype),
    )
    assert_transformed(transform, case, "cpu", bias_error=2.0**-15)
