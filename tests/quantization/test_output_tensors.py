"""Global scales in both directions, KV scales, and declarations that the reader understands."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.checkpoints.dialects.base import Dialect, OutputFormat
from halfbyte.checkpoints.dialects.registry import DIALECTS, get_dialect, read_declaration
from halfbyte.checkpoints.output_folder import write_json
from halfbyte.numerics import nvfp4
from halfbyte.quantization.output_tensors import global_scale, kv_scale_tensors, weight_tensors

AMAXES = st.floats(2**-20, 2**20, width=32)


@pytest.mark.parametrize(("recipe", "divisor"), [("amax6", 2688), ("four_over_six", 1536)])
def test_global_scale_directions(recipe: nvfp4.Recipe, divisor: int) -> None:
    decode = global_scale(3.0, "modelopt", recipe)
    assert float(decode.stored) == float(decode.decode) == pytest.approx(3 / divisor, rel=1e-7)
    assert decode.stored.shape == ()
    encode = global_scale(3.0, "compressed-tensors", recipe)
    assert float(encode.stored) == pytest.approx(divisor / 3, rel=1e-7)
    assert encode.stored.shape == (1,)
    assert float(encode.decode) == float(1 / encode.stored)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("amax", [0.0, 1e-45])
def test_global_scale_of_nothing_is_one(dialect: Dialect, amax: float) -> None:
    scale = global_scale(amax, dialect)
    assert float(scale.stored) == float(scale.decode) == 1


@pytest.mark.parametrize("amax", [-1.0, math.inf, math.nan])
def test_global_scale_refuses(amax: float) -> None:
    with pytest.raises(ValueError, match="amax"):
        global_scale(amax, "modelopt")


def every_product(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All E2M1 codes, and all finite E4M3 scales that are not zero."""
    codes = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])[:, None]
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes, scales


def read_by_modelopt(stored: torch.Tensor) -> torch.Tensor:
    codes, scales = every_product(stored)
    return (codes * (scales * stored)).bfloat16()


def read_by_compressed_tensors(stored: torch.Tensor) -> torch.Tensor:
    codes, scales = every_product(stored)
    return (codes * (scales / stored)).bfloat16()


def read_by_us(decode: torch.Tensor) -> torch.Tensor:
    codes, scales = every_product(decode)
    return ((codes * scales) * decode).bfloat16()


# For each of these, readers disagree about a plain amax / 2688 or its reciprocal.
UNLUCKY = {"modelopt": 0.32744139432907104, "compressed-tensors": 0.03546142578125}
READERS = {"modelopt": read_by_modelopt, "compressed-tensors": read_by_compressed_tensors}


@pytest.mark.parametrize("dialect", DIALECTS)
@given(amax=AMAXES)
def test_global_scale_reads_alike(dialect: Dialect, amax: float) -> None:
    scale = global_scale(amax, dialect)
    assert torch.equal(READERS[dialect](scale.stored), read_by_us(scale.decode))
    assert float(scale.decode) == pytest.approx(amax / 2688, rel=1e-6)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_global_scale_moves_where_it_must(dialect: Dialect) -> None:
    amax = UNLUCKY[dialect]
    decode = nvfp4.global_scale_from_amax(amax)
    stored = decode if dialect == "modelopt" else (1 / decode.double()).float()
    plain = decode if dialect == "modelopt" else 1 / stored
    assert not torch.equal(READERS[dialect](stored), read_by_us(plain))
    moved = global_scale(amax, dialect)
    assert float(moved.stored) == float(torch.nextafter(stored, torch.tensor(torch.inf)))
    assert torch.equal(READERS[dialect](moved.stored), read_by_us(moved.decode))


def test_weight_tensors_names() -> None:
    data = torch.zeros(4, 16, dtype=torch.uint8)
    scales = torch.ones(4, 2).to(torch.float8_e4m3fn)
    names = {}
    for dialect in DIALECTS:
        for input_amax in (None, 2.0):
            output = OutputFormat(dialect, input_amax is not None)
            scale = global_scale(1.0, dialect)
            tensors = weight_tensors(output, "a.b", data, scales, scale, input_amax)
            names[dialect, input_amax is not None] = list(tensors)
    assert names == {
        ("modelopt", False): ["a.b.weight", "a.b.weight_scale", "a.b.weight_scale_2"],
        ("modelopt", True): [
            "a.b.weight",
            "a.b.weight_scale",
            "a.b.weight_scale_2",
            "a.b.input_scale",
        ],
        ("compressed-tensors", False): [
            "a.b.weight_packed",
            "a.b.weight_scale",
            "a.b.weight_global_scale",
        ],
        ("compressed-tensors", True): [
            "a.b.weight_packed",
            "a.b.weight_scale",
            "a.b.weight_global_scale",
            "a.b.input_global_scale",
        ],
    }


def test_weight_tensors_input_scale_is_for_amax6() -> None:
    """Activations are quantized with `amax6`, whatever the recipe of the weights."""
    output = OutputFormat("modelopt", True, recipe="four_over_six")
    scale = global_scale(1.0, "modelopt", "four_over_six")
    empty = torch.zeros(1, 8, dtype=torch.uint8)
    tensors = weight_tensors(output, "a", empty, empty[:, :1], scale, 5.376)
    assert float(tensors["a.input_scale"]) == pytest.approx(0.002, rel=1e-6)


def test_kv_scale_tensors() -> None:
    found = {}
    for dialect in DIALECTS:
        output = OutputFormat(dialect, False, kv_cache_dtype="nvfp4")
        found[dialect] = kv_scale_tensors(output, "l.0.self_attn", 4.48, 8.96)
    assert list(found["modelopt"]) == [
        "l.0.self_attn.k_proj.k_scale",
        "l.0.self_attn.v_proj.v_scale",
    ]
    packed = found["compressed-tensors"]
    assert list(packed) == ["l.0.self_attn.k_scale", "l.0.self_attn.v_scale"]
    fp8 = OutputFormat("compressed-tensors", False, kv_cache_dtype="fp8_e4m3")
    assert kv_scale_tensors(fp8, "l.0.self_attn", 4.48, 8.96) == packed
    for dialect, shape in (("modelopt", ()), ("compressed-tensors", (1,))):
        k, v = found[dialect].values()
        assert k.shape == v.shape == shape
        assert float(k) == pytest.approx(0.01, rel=1e-6)
        assert float(v) == pytest.approx(0.02, rel=1e-6)


def test_kv_scale_tensors_are_never_zero() -> None:
    output = OutputFormat("modelopt", False, kv_cache_dtype="nvfp4")
    with pytest.raises(ValueError, match=r"l\.0: v_amax: expected a number above 0, got 0\.0"):
        kv_scale_tensors(output, "l.0", 4.48, 0.0)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", [None, "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("with_file", [False, True])
def test_declarations_are_read_back(
    tmp_path: Path,
    dialect: Dialect,
    activations: bool,
    kv_cache_dtype: str | None,
    with_file: bool,
) -> None:
    output = OutputFormat(dialect, activations, kv_cache_dtype=kv_cache_dtype)
    ignore = ["lm_head", "model.layers.1.mlp.gate"]
    if with_file:
        for name, fields in get_dialect(dialect).own_files(output, ignore).items():
            write_json(tmp_path / name, fields)
    config = {"quantization_config": get_dialect(dialect).config_section(output, ignore)}
    declared = read_declaration(tmp_path, config)
    assert declared is not None
    assert declared.dialect == dialect
    assert declared.is_ours
    assert declared.kv_cache_dtype == kv_cache_dtype
    assert declared.quantize_activations == activations
    scheme = "nvfp4" if activations else "nvfp4-a16"
    assert declared.scheme_of("model.layers.0.self_attn.q_proj") == scheme
    assert declared.scheme_of("model.layers.1.mlp.gate_proj") == scheme
    assert declared.scheme_of("model.layers.1.mlp.gate") is None
    assert declared.scheme_of("lm_head") is None


@pytest.mark.parametrize(
    ("kv_cache_dtype", "algo"), [(None, None), ("nvfp4", "NVFP4"), ("fp8_e4m3", "FP8")]
)
def test_modelopt_file_has_what_vllm_requires(kv_cache_dtype: str, algo: str) -> None:
    """vLLM refuses files without these fields, or with another producer."""
    output = OutputFormat("modelopt", True, kv_cache_dtype=kv_cache_dtype)
    fields = get_dialect("modelopt").own_files(output, ["a"])["hf_quant_config.json"]
    assert fields["producer"]["name"] == "modelopt"
    assert fields["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": algo,
        "group_size": 16,
        "exclude_modules": ["a"],
    }
