"""The FlashInfer backend: refusals, the arguments of its calls, and on a GPU its results."""

from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch

from attention.cases import DECODE_CASES, Case, assert_close_to_exact, config, make_case
from attention.documented_flashinfer import PrefillWrapper, install
from halfbyte.attention import ATTENTION_BACKENDS, paged_attention
from halfbyte.attention.base import AttentionInputs, AttentionPlans
from halfbyte.attention.flashinfer import FlashInferAttention
from halfbyte.dispatch import NoImplementationError
from halfbyte.kernels.runtime.flashinfer_package import missing_flashinfer
from halfbyte.kvcache import reshape_and_cache
from halfbyte.layouts import PageLayout

SM100 = PageLayout("nvfp4", "nvfp4", 128, None, 8, 16, "HND", "sm100")


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer as documented, on the CPU."""
    install(monkeypatch)


def forward(case: Case, *, lse: bool = False, **changes: Any) -> AttentionInputs:
    """Runs the backend on a case, without checks of the device."""
    inputs = AttentionInputs(
        query=case.query,
        pages=case.pages,
        batch_invariant=False,
        given_out=None,
        lse=torch.full(case.query.shape[:2], torch.nan) if lse else None,
        plans=AttentionPlans(),
        **{"sliding_window": None, "sinks": None, "softcap": None, **case.arguments()},
    )
    inputs = replace(inputs, **changes)
    FlashInferAttention.forward(inputs)
    return inputs


_LENGTHS: dict[str, Any] = {"query_lens": (1, 3, 17, 1), "seq_lens": (1, 40, 17, 100)}
FA2_CASES: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "nvfp4-d128": {"head_size": 128},
    "nvfp4-d256": {"head_size": 256, "kv_heads": 1},
    "nvfp4-4over6-nhd": {"k_dtype": "nvfp4_4over6", "order": "NHD", "head_size": 128},
    "nvfp4-page-48": {"block_size": 48},
    "fp8": {"k_dtype": "fp8", "head_size": 128},
    "fp8-nhd": {"k_dtype": "fp8", "order": "NHD"},
    "fp8-e5m2": {"k_dtype": "fp8_e5m2", "head_size": 128},
    "bfloat16": {"k_dtype": "bfloat16"},
    "bfloat16-nhd-d128": {"k_dtype": "bfloat16", "order": "NHD", "head_size": 128},
    "float16": {"k_dtype": "float16", "query_dtype": torch.float16, "head_size": 128},
    "window": {"sliding_window": 9, "head_size": 128},
    "window-of-one": {"sliding_window": 1, "k_dtype": "fp8", "head_size": 128},
    "softcap-window": {"softcap": 3.0, "sliding_window": 20, "head_size": 128},
    "empty-and-short": {
        "head_size": 128,
        "query_lens": (1, 5, 0, 2, 4),
        "seq_lens": (0, 3, 7, 33, 4),
    },
}


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("name", FA2_CASES)
def test_fa2_as_documented_gives_attention(name: str) -> None:
    case = make_case(**{**_LENGTHS, **FA2_CASES[name]})
    inputs = forward(case, lse=True)
    assert inputs.lse is not None
    exact, exact_lse = case.expected()
    torch.testing.assert_close(inputs.out.double(), exact, rtol=2**-8, atol=2e-3)
    torch.testing.assert_close(inputs.lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("documented")
def test_fa2_no_row_attends_to_anything() -> None:
    inputs = forward(make_case(query_lens=(1, 2), seq_lens=(0, 0)), lse=True)
    assert inputs.lse is not None
    assert not inputs.out.any()
    assert (inputs.lse == -torch.inf).all()


@pytest.mark.usefixtures("documented")
def test_fa2_takes_scales_as_tensors_and_writes_to_any_out() -> None:
    case = make_case(head_size=128)
    expected = forward(case).out
    wide = torch.zeros(24, 8, 256)
    inputs = forward(
        case,
        k_scale=torch.tensor([case.k_scale]),
        v_scale=torch.tensor(case.v_scale),
        given_out=wide[..., ::2],
        query=case.query.flip(0).flip(0).transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert torch.equal(inputs.out.to(expected.dtype), expected)
    assert not wide[..., 1::2].any()


@pytest.mark.usefixtures("documented")
def test_fa2_plans_once_per_step_and_table() -> None:
    case = make_case(head_size=128)
    plans = AttentionPlans()
    before = PrefillWrapper.plans
    first = forward(case, plans=plans).out
    again = forward(case, plans=plans, block_tables=case.arguments()["block_tables"]).out
    assert PrefillWrapper.plans == before + 1
    assert torch.equal(first, again)
    other = case.block_tables.clone()
    other[3, :2] = other[2, :2]
    changed = forward(case, plans=plans, block_tables=other).out
    assert PrefillWrapper.plans == before + 2
    assert torch.equal(changed[:7], first[:7])
    assert not torch.equal(changed[7:], first[7:])


def coarse_case(**options: Any) -> Case:
    """A case with block scales of at most 72, as trtllm-gen needs."""
    case = make_case(head_size=128, v_scale_layout="sm100", **options)
    case.k_scale = case.v_scale = 8.0 / 448
    slots = torch.cat(case.slots)
    reshape_and_cache(
        case.key, case.value, case.pages, slots, case.layout, case.k_scale, case.v_scale
    )
    return case


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize(
    "options",
    [
        {"query_lens": (1, 1, 1), "seq_lens": (5, 40, 200)},
        {"query_lens": (4, 4), "seq_lens": (5, 40), "sinks": True},
        {"query_lens": (1, 5, 30, 1), "seq_lens": (1, 40, 77, 0), "sliding_window": 20},
    ],
    ids=["decode", "four-queries-sinks", "context-window-empty"],
)
def test_trtllm_gen_as_documented_gives_attention(options: dict) -> None:
    case = coarse_case(**options)
    out = forward(case).out
    assert out.dtype == case.query.dtype
    given = torch.empty(out.shape)
    assert torch.equal(forward(case, given_out=given).out.bfloat16(), out)
    out = out.double()
    exact, _ = case.expected()
    # Queries and output are FP8: 3 bits of mantissa.
    assert (out - exact).abs().max() < 0.1 * exact.abs().max()
    similarity = torch.cosine_similarity(out.flatten(), exact.flatten(), dim=0)
    assert similarity > 0.998


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("side", ["key", "value"])
def test_trtllm_gen_refuses_scales_that_saturate(side: str) -> None:
    case = coarse_case(query_lens=(1, 2), seq_lens=(20, 40))
    tensor = getattr(case, side)
    tensor[20 + 38] *= 100  # a query token of the second sequence
    arguments = (case.pages, torch.cat(case.slots), case.layout, case.k_scale, case.v_scale)
    reshape_and_cache(case.key, case.value, *arguments)
    with pytest.raises(ValueError, match=f"scale of {side[0].upper()} exceeds 72"):
        forward(case)


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["nvfp4", "nvfp4_4over6", "fp8", "fp8_e5m2", "bfloat16"])
def test_fa2_is_for_linear_scales_on_every_gpu(capability: int, dtype: str) -> None:
    work = config(
        layout=PageLayout(dtype, dtype, 128, None, 8, 16),
        compute_capability=capability,
        sliding_window=100,
        softcap=30.0,
        return_lse=True,
    )
    backend = ATTENTION_BACKENDS.select(work, "flashinfer", compute_capability=capability)
    assert backend is FlashInferAttention


@pytest.mark.parametrize("capability", [100, 103])
def test_trtllm_gen_is_for_sm100_scales(capability: int) -> None:
    work = config(layout=SM100, has_sinks=True, sliding_window=9, compute_capability=capability)
    assert ATTENTION_BACKENDS.select(work, "flashinfer", compute_capability=capability)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "not on a GPU"),
        ({"batch_invariant": True}, "not batch-invariant"),
        ({"has_sinks": True}, "no attention sinks"),
        ({"query_dtype": torch.float32}, "query in bfloat16 or float16"),
        ({"layout": PageLayout("fp8", "nvfp4", 128, None, 8, 16)}, "K and V alike"),
        ({"layout": PageLayout("mxfp4", "mxfp4", 128, None, 8, 16)}, "not K mxfp4"),
        ({"layout": PageLayout("float32", "float32", 128, None, 8, 16)}, "not K float32"),
        ({"layout": PageLayout("float16", "float16", 128, None, 8, 16)}, "needs a query in it"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 80, None, 8, 16)}, "head sizes 64, 128 and 256"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 64, 128, 8, 16)}, "head sizes 64, 128 and 256"),
        ({"layout": SM100}, "sm100 order are for SM100"),
        ({"layout": SM100, "compute_capability": 120}, "sm100 order are for SM100"),
        ({"layout": SM100, "compute_capability": 100, "softcap": 3.0}, "no softcap"),
        ({"layout": SM100, "compute_capability": 100, "return_lse": True}, "log-sum-exp"),
        (
            {
                "layout": PageLayout("nvfp4", "nvfp4", 64, None, 8, 16, "HND", "sm100"),
                "compute_capability": 100,
            },
            "head sizes 128 and 256",
        ),
        (
            {
                "layout": PageLayout("nvfp4", "nvfp4", 128, None, 8, 16, "NHD", "sm100"),
                "compute_capability": 100,
            },
            "copy NHD",
        ),
        (
            {
                "layout": PageLayout("nvfp4", "nvfp4", 128, None, 8, 4, "HND", "sm100"),
                "compute_capability": 100,
            },
            "pages of 16, 32 or 64",
        ),
        (
            {
                "layout": PageLayout("fp8", "nvfp4", 128, None, 8, 16, "HND", "sm100"),
                "compute_capability": 100,
            },
            "reads K in nvfp4 as well",
        ),
    ],
)
def test_refusals_say_why(changes: dict, reason: str) -> None:
    work = config(**changes)
    with pytest.raises(NoImplementationError, match=reason):
        ATTENTION_BACKENDS.select(work, "flashinfer", compute_capability=work.compute_capability)


def test_never_chosen_by_default() -> None:
    for capability in (80, 90, 100, 120):
        for layout in (SM100, PageLayout("bfloat16", "bfloat16", 128, None, 8, 16)):
            work = config(layout=layout, compute_capability=capability)
            chosen = ATTENTION_BACKENDS.select(work, compute_capability=capability)
            assert chosen.name != "flashinfer"


@pytest.mark.parametrize(("capability", "reason"), [(0, "needs an NVIDIA GPU"), (75, "8.0")])
def test_machines_without_it(capability: int, reason: str) -> None:
    usable, why = FlashInferAttention.is_supported(capability)
    assert not usable
    assert reason in why


@pytest.mark.parametrize(
    ("version", "nvcc", "reason"),
    [
        (None, True, "which is not installed"),
        ("0.6.18", True, "0.7.0 or later, this is 0.6.18"),
        ("0.7.0", False, "needs nvcc"),
        ("0.10.2.post1", True, None),
        ("1.0rc1", True, None),
    ],
)
def test_versions_and_compiler(
    monkeypatch: pytest.MonkeyPatch, version: str | None, nvcc: bool, reason: str | None
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("halfbyte.dispatch.current_compute_capability", lambda: 90)
    monkeypatch.setattr(metadata, "version", installed)
    package = "halfbyte.kernels.runtime.flashinfer_package"
    monkeypatch.setattr(f"{package}.shutil.which", lambda name: "/bin/nvcc" if nvcc else None)
    monkeypatch.setattr(f"{package}.Path.exists", lambda self: False)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    missing_flashinfer.cache_clear()
    usable, why = FlashInferAttention.is_supported()
    missing_flashinfer.cache_clear()
    assert usable == (reason is None)
    assert (reason or "if requested") in why


def on_gpu(case: Case, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }
    return paged_attention(
        case.query.cuda(), case.pages.cuda(), backend="flashinfer", **arguments, **options
    )


GPU_CASES = {
    **{f"decode-{name}": value for name, value in DECODE_CASES.items()},
    **{name: {**_LENGTHS, **value} for name, value in FA2_CASES.items()},
    "long-prefill": {"head_size": 128, "query_lens": (200, 70), "seq_lens": (700, 70)},
    "fp8-decode": {
        "k_dtype": "fp8",
        "head_size": 128,
        "query_lens": (1,) * 5,
        "seq_lens": (1, 40, 300, 3000, 17),
    },
}


@pytest.mark.gpu
@pytest.mark.slow  # a dozen kernels, each compiled for 20 s; in parallel with pytest -n
@pytest.mark.parametrize("name", GPU_CASES)
def test_flashinfer_attention(name: str) -> None:
    pytest.importorskip("flashinfer")
    options = GPU_CASES[name]
    if {"sinks", "head_size_v", "v_dtype"} & set(options):
        pytest.skip("fa2 has neither sinks nor, here, two head sizes or dtypes")
    case = make_case(**options)
    out, lse = on_gpu(case, return_lse=True)
    assert_close_to_exact(out.cpu(), case)
    _, exact_lse = case.expected()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (1, 5, 30)], ids=["decode", "context"])
def test_flashinfer_trtllm_gen_attention(query_lens: tuple[int, ...]) -> None:
    pytest.importorskip("flashinfer")
    if torch.cuda.get_device_capability() not in ((10, 0), (10, 3)):
        pytest.skip("trtllm-gen needs SM100 or SM103")
    case = coarse_case(query_lens=query_lens, seq_lens=(5, 40, 200))
    out = on_gpu(case).cpu().double()
    exact, _ = case.expected()
    assert torch.cosine_similarity(out.flatten(), exact.flatten(), dim=0) > 0.99
