"""The pure PyTorch packages on a GPU: same bits as on a CPU, same text within rounding."""

from typing import Any

import pytest
import torch

from attention.cases import make_case
from halfbyte.assets import bundled_model_path
from halfbyte.attention import paged_attention
from halfbyte.engine import LLM, SamplingParams
from halfbyte.evaluation import evaluate_perplexity
from halfbyte.kvcache import (
    KV_CACHE_QUANT_REGISTRY,
    PageLayout,
    get_kv_cache_quant_method,
    read_tokens,
    reshape_and_cache,
)
from halfbyte.models import Cache
from models.zoo import make_model, token_ids

pytestmark = pytest.mark.gpu


def nasty_values() -> torch.Tensor:
    """Random blocks over many magnitudes, with zeros, ties, NaN and infinities."""
    torch.manual_seed(0)
    x = torch.randn(64, 2, 128) * torch.logspace(-9, 3, 64)[:, None, None]
    x[0] = 0
    x[1] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0] * 16) * 2.0**-4
    x[2, 0, 3], x[2, 1, 40], x[3, 0, 5], x[4, 1, 7] = torch.nan, -torch.inf, torch.inf, -0.0
    return x


@pytest.mark.parametrize("dtype", list(KV_CACHE_QUANT_REGISTRY))
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantize_gives_the_same_bits_as_on_a_cpu(dtype: str, input_dtype: torch.dtype) -> None:
    method = get_kv_cache_quant_method(dtype)
    x = nasty_values().to(input_dtype)
    scale = method.global_scale_from_amax(3000.0)
    for on_cpu, on_gpu in zip(
        method.quantize(x, scale), method.quantize(x.cuda(), scale), strict=True
    ):
        if on_cpu is not None and on_gpu is not None:
            torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("v_scale_layout", ["linear", "sm100"])
def test_reshape_and_cache_writes_the_same_pages_as_on_a_cpu(v_scale_layout: str) -> None:
    layout = PageLayout("fp8", "nvfp4", 128, None, 2, 16, "NHD", v_scale_layout)  # type: ignore[arg-type]
    x = nasty_values()
    slots = torch.randperm(80)[:64]
    slots[5] = -1
    pages = torch.zeros(5, layout.page_bytes, dtype=torch.uint8)
    on_gpu = pages.cuda()
    reshape_and_cache(x, x, pages, slots, layout, 6.7, 1.1)
    reshape_and_cache(
        x.cuda(), x.cuda(), on_gpu, slots.cuda(), layout, 6.7, torch.tensor(1.1, device="cuda")
    )
    assert torch.equal(on_gpu.cpu(), pages)
    keep = slots[slots >= 0]
    for a, b in zip(
        read_tokens(pages, keep, layout, 6.7, 1.1),
        read_tokens(on_gpu, keep.cuda(), layout, 6.7, 1.1),
        strict=True,
    ):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "bfloat16"])
def test_paged_attention_agrees_with_a_cpu(dtype: str) -> None:
    case = make_case(
        k_dtype=dtype, sinks=True, sliding_window=30, softcap=5.0, query_dtype=torch.float32
    )
    expected, _ = case.expected()
    arguments: dict[str, Any] = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }
    out = paged_attention(case.query.cuda(), case.pages.cuda(), **arguments)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_oss"])
def test_generate_through_the_cache_agrees_with_a_cpu(architecture: str) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        model = make_model(architecture).to(device)
        texts.append(
            model.generate(
                input_ids=token_ids(2, 20).to(device),
                max_new_tokens=12,
                do_sample=False,
                past_key_values=Cache(model, "float32"),
            ).cpu()
        )
    assert torch.equal(texts[0], texts[1])


def test_llm_generates_on_a_gpu() -> None:
    llm = LLM(bundled_model_path(), kv_cache_dtype="nvfp4", device="cuda")
    outputs = llm.generate(
        ["import os\nimport ", "def main("], SamplingParams(max_tokens=24, ignore_eos=True)
    )
    assert [len(output.token_ids) for output in outputs] == [24, 24]
    assert llm.pool.device.type == "cuda"
    assert llm.core.tables.allocator.num_used == 0


def test_perplexity_agrees_with_a_cpu() -> None:
    windows = [token_ids(100).tolist()]
    names = ["bfloat16", "nvfp4", "mxfp4"]
    on_cpu = evaluate_perplexity(make_model("qwen3"), windows, names, 16)
    on_gpu = evaluate_perplexity(make_model("qwen3").cuda(), windows, names, 16)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert b.nll == pytest.approx(a.nll, rel=2e-3)
