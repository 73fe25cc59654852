"""Numbers of `config.json` that no model can have."""

from typing import Any

import pytest

from halfbyte.checkpoints import CheckpointError
from halfbyte.models.config_fields import check_fields
from models.zoo import ARCHITECTURES, make_model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar: .* above 0, .* found -1"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping: .* found 0.0"),
        ({"swiglu_limit": 1e40}, r"swiglu_limit: .* found 1e\+40"),
        ({"num_labels": 10**7}, r"num_labels: expected 1 \.\. 65536, found 10000000"),
        ({"rope_theta": 0}, "rope_theta: .* found 0"),
        ({"rope_theta": "10000"}, "rope_theta: .* found '10000'"),
        ({"rope_theta": True}, "rope_theta: .* found True"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor: .* found nan"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": float("inf")}}},
            "rope_theta: .* found inf",
        ),
    ],
)
def test_numbers_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        check_fields("config.json", fields)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_usual_configs_pass(architecture: str) -> None:
    check_fields("config.json", make_model(architecture).config.to_dict())
    check_fields("config.json", {"final_logit_softcapping": None, "rope_scaling": None})
