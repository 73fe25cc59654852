"""Recipes of K and V in `LLM`, `Cache` and evaluation: through packed pages, on small models."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from halfbyte import LLM, Cache, SamplingParams, load_model
from halfbyte.assets import bundled_model_path, heldout_texts
from halfbyte.evaluation import evaluate_perplexity, text_windows
from halfbyte.kvcache import KVRecipe, KVScales, read_tokens, reshape_and_cache
from halfbyte.kvcache.recipe import RECIPES
from halfbyte.models import calibrate, key_statistics, load_tokenizer
from halfbyte.models.kv_calibration import usual_first_tokens
from kvcache.transforms import with_heads, without_costs
from models.zoo import ARCHITECTURES, make_model, token_ids
from slow import slow

BALANCED, ACCURATE = RECIPES["balanced"], RECIPES["accurate"]


def generated(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    options = {"kv_recipe": "balanced", "num_pages": 400, **options}
    llm = LLM(model, dtype="float32", **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [list(output.token_ids) for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    lengths = (1, 5, 64, 65, 130)
    return [token_ids(1, length)[0].tolist() for length in lengths]


@pytest.mark.parametrize(
    "architecture",
    [name if name in {"llama", "gemma2", "gpt_oss"} else slow(name) for name in ARCHITECTURES],
)
def test_tokens_do_not_depend_on_chunks_or_on_company(
    architecture: str, prompts: list[list[int]]
) -> None:
    model = make_model(architecture)
    together = generated(model, prompts)
    assert generated(model, prompts, max_batched_tokens=16) == together
    assert [generated(model, [prompt])[0] for prompt in prompts] == together


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_tokens_of_accurate_do_not_depend_on_chunks_or_batch(architecture: str) -> None:
    """Also with preemption, at lengths around multiples of 16, of segments and of rings."""
    model = make_model(architecture)
    lengths = (1, 16, 17, 63, 65, 80, 129)
    prompts = [token_ids(1, length, seed=length)[0].tolist() for length in lengths]
    together = generated(model, prompts, kv_recipe="accurate")
    few_pages = 18 if architecture == "llama" else 60
    for options in ({"max_batched_tokens": 16}, {"max_num_seqs": 1}, {"num_pages": few_pages}):
        assert generated(model, prompts, kv_recipe="accurate", **options) == together
    assert generated(model, prompts[::-1], kv_recipe="accurate") == together[::-1]


def test_pages_of_accurate_do_not_depend_on_chunks() -> None:
    """Bit for bit, in all layers' pages of one row of tokens, cut anywhere."""
    model = make_model("llama")
    ids = token_ids(1, 83)
    scales = calibrate(model, token_ids(1, 200), "test", first_tokens=ids[:, 0].tolist())
    found = []
    for cuts in ((83,), (1, 83), (16, 32, 83), (15, 31, 64, 65, 83), (80, 81, 82, 83)):
        cache = Cache(model, "nvfp4", kv_scales=scales, kv_recipe=ACCURATE)
        # K and V themselves may differ in the last bit between chunks: the same for all.
        generator = torch.Generator().manual_seed(1)
        layout = cache.pool.layout(0)
        key, value = torch.randn(2, 83, 2, layout.head_size, generator=generator)
        pages = torch.zeros(6, layout.page_bytes, dtype=torch.uint8)
        begin = 0
        for end in cuts:
            positions = torch.arange(begin, end)
            reshape_and_cache(
                key[begin:end],
                value[begin:end],
                pages,
                positions,
                layout,
                *cache._quantization.scales[0],
                transform=cache._quantization.transforms[0],
                positions=positions,
            )
            begin = end
        found.append(pages)
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.parametrize("recipe", [BALANCED, ACCURATE], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_cache_reads_what_the_engine_reads(architecture: str, recipe: KVRecipe) -> None:
    """Also behind left padding, and in rows that are copies of others."""
    model = make_model(architecture)
    ids = token_ids(2, 80)
    scales = calibrate(model, token_ids(1, 200), "test", first_tokens=ids[:, 0].tolist())
    with torch.inference_mode():
        rows = []
        for padding in (0, 9):
            cache = Cache(model, "nvfp4", kv_scales=scales, kv_recipe=recipe)
            mask = torch.ones(2, 80 + padding, dtype=torch.int64)
            mask[:, :padding] = 0
            padded = torch.cat([ids[:, :padding], ids], 1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            for begin, end in ((0, 40), (40, 41), (41, 80 + padding)):
                out = model(
                    padded[:, begin:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, begin:end],
                    past_key_values=cache,
                )
            rows.append(out.logits[:, -1])
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)
    cache = Cache(model, "nvfp4", kv_scales=scales, kv_recipe=recipe)
    with torch.inference_mode():
        model(ids[:1], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.crop(-16)
        again = model(ids[:1, -16:].expand(2, -1), past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(again, rows[0][:1].expand(2, -1), rtol=1e-4, atol=1e-4)


def test_preemption_changes_no_token(prompts: list[list[int]]) -> None:
    model = make_model("llama")
    expected = generated(model, prompts)
    llm = LLM(model, dtype="float32", kv_recipe="balanced", num_pages=14, max_num_seqs=5)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = [list(output.token_ids) for output in llm.generate(prompts, params)]
    assert found == expected
    assert llm.core.tables.recent is not None
    assert len(llm.core.tables.recent._free) == llm.core.tables.recent.count - 1


def test_more_removed_than_the_rings_can_restore(prompts: list[list[int]]) -> None:
    """Tokens overwritten in the rings are read from the pages after a large crop."""
    model = make_model("llama")
    ids = token_ids(1, 200)
    cache = Cache(model, "nvfp4", kv_recipe="balanced")
    with torch.inference_mode():
        expected = model(ids[:, :150], past_key_values=cache).logits[:, -1]
        model(ids[:, 150:], past_key_values=cache)
        cache.crop(149)
        tables = cache.tables
        assert tables.recent is not None
        row, pair = cache._rows[0], tables.recent[0]
        assert pair is not None
        # 200 tokens less a ring of 80 leave those from 120 on; 86 to 119 are missing.
        assert tables._get(row).kept_from == 120
        kept = pair[0][tables.entry(row)].clone()
        again = model(ids[:, 149:150], past_key_values=cache).logits[:, -1]
        assert tables._get(row).kept_from == 86
    slots = tables.slots(row, 86, 149)
    rows, _ = read_tokens(
        cache.pool.layer_pages(0),
        slots,
        cache.pool.layout(0),
        *cache._quantization.scales[0],
        transform=cache._quantization.transforms[0],
        positions=torch.arange(86, 149),
    )
    ring = pair[0][tables.entry(row)]
    for position in range(86, 149):
        found, as_packed = ring[:, position % 80], rows[position - 86]
        assert torch.equal(found, as_packed if position < 120 else kept[:, position % 80])
    assert 0 < (again - expected).norm() < 0.1 * expected.norm()


def test_a_step_that_fails_leaves_nothing_half_filled() -> None:
    """Rings that were only partly filled from the pages are filled again by the next step."""
    model = make_model("llama")
    ids = token_ids(1, 200)
    scales = calibrate(model, token_ids(1, 200), "test")
    layer = model.model.layers[1]
    logits = []
    for fails in (False, True):
        cache = Cache(model, "nvfp4", kv_scales=scales, kv_recipe="balanced")
        with torch.inference_mode():
            model(ids[:, :199], past_key_values=cache)
            cache.crop(-60)
            if fails:
                with (
                    patch.object(layer.self_attn, "forward", side_effect=KeyboardInterrupt),
                    pytest.raises(KeyboardInterrupt),
                ):
                    model(ids[:, 139:140], past_key_values=cache)
            logits.append(model(ids[:, 139:140], past_key_values=cache).logits)
    assert torch.equal(*logits)


def test_a_context_of_billions_of_tokens_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibration averages the rotary embedding over all positions."""
    monkeypatch.setattr(key_statistics, "_MAX_POSITIONS", 4096)
    model = make_model("llama", max_position_embeddings=2**31 - 1)
    with torch.inference_mode():
        cache = Cache(model, "nvfp4", kv_recipe="balanced")
        with pytest.raises(ValueError, match=r"means of K for 4096 tokens, a sequence has 4097"):
            model(token_ids(1, 4097), past_key_values=cache)


def test_a_cache_ends_where_the_means_do() -> None:
    model = make_model("llama", max_position_embeddings=128)
    cache = Cache(model, "nvfp4", kv_recipe="balanced")
    with torch.inference_mode():
        model(token_ids(1, 128), past_key_values=cache)
        with pytest.raises(ValueError, match=r"means of K for 128 tokens.*a sequence has 129"):
            model(token_ids(1, 1), past_key_values=cache)


def test_sequences_of_a_cache_diverge(prompts: list[list[int]]) -> None:
    """Each copy of a row has its own ring."""
    model = make_model("llama")
    ids = token_ids(2, 90)
    scales = calibrate(model, token_ids(1, 200), "test", first_tokens=ids[:, 0].tolist())
    with torch.inference_mode():
        alone = []
        for tail in (ids[:1, 70:], ids[1:, 70:]):
            cache = Cache(model, "nvfp4", kv_scales=scales, kv_recipe="balanced")
            model(ids[:1, :70], past_key_values=cache)
            alone.append(model(tail, past_key_values=cache).logits[:, -1])
        cache = Cache(model, "nvfp4", kv_scales=scales, kv_recipe="balanced")
        model(ids[:1, :70].expand(2, -1), past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 1]))
        both = model(ids[:, 70:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_the_last_tokens_bring_it_closer_still() -> None:
    path = bundled_model_path()
    model, tokenizer = load_model(path, dtype="float32"), load_tokenizer(path)
    windows, _ = text_windows(tokenizer, list(heldout_texts().values())[:1], 512, 1024)
    divergence = {}
    for chunk in (128, 16):
        without, balanced = evaluate_perplexity(
            model,
            windows,
            ["nvfp4"],
            chunk,
            tokenizer=tokenizer,
            kv_recipes=[BALANCED.of_pages, BALANCED],
        )
        divergence[chunk] = balanced.kl_divergence
        assert 0 < balanced.kl_divergence < 0.4 * without.kl_divergence
    assert divergence[16] == pytest.approx(divergence[128], rel=1e-4)


def test_balanced_is_closer_than_plain_on_the_bundled_model() -> None:
    path = bundled_model_path()
    model, tokenizer = load_model(path, dtype="float32"), load_tokenizer(path)
    windows, _ = text_windows(tokenizer, list(heldout_texts().values())[:1], 512, 1024)
    plain, balanced = evaluate_perplexity(
        model, windows, ["nvfp4"], 128, tokenizer=tokenizer, kv_recipes=["plain", "balanced"]
    )
    assert (plain.kv_recipe, balanced.kv_recipe) == ("plain", "balanced")
    assert balanced.kv_cache_dtype == "nvfp4"
    assert balanced.bytes_per_token == plain.bytes_per_token
    assert 0 < balanced.kl_divergence < 0.7 * plain.kl_divergence


def test_accurate_is_closer_than_balanced_on_the_bundled_model() -> None:
    """Without recent tokens, which are the same for both, over the model's whole context."""
    path = bundled_model_path()
    model, tokenizer = load_model(path, dtype="float32"), load_tokenizer(path)
    windows, _ = text_windows(tokenizer, list(heldout_texts().values())[:2], 2048, 4096)
    recipes = [BALANCED.of_pages, ACCURATE.of_pages]
    balanced, accurate = evaluate_perplexity(
        model, windows, ["nvfp4"], 128, tokenizer=tokenizer, kv_recipes=recipes
    )
    assert accurate.bytes_per_token == balanced.bytes_per_token
    assert 0 < accurate.kl_divergence < 0.85 * balanced.kl_divergence


@pytest.mark.parametrize("name", ["feedback", "weighted_scales"])
def test_rounding_by_itself_combines_with_k_as_it_is(name: str) -> None:
    """Read like `plain`: other bytes, with an error of at most 1.05 times that of `plain`."""
    model = make_model("llama")
    scales = calibrate(model, token_ids(1, 100), "test")
    logits = []
    for dtype, recipe in (
        ("float32", KVRecipe()),
        ("nvfp4", KVRecipe()),
        ("nvfp4", KVRecipe(**{name: True})),
    ):
        cache = Cache(model, dtype, kv_scales=scales, kv_recipe=recipe)
        with torch.inference_mode():
            logits.append(model(token_ids(1, 200), past_key_values=cache).logits)
    exact, plain, other = logits
    assert not torch.equal(plain, other)
    assert (other - exact).norm() < 1.05 * (plain - exact).norm()


def test_every_requested_format_is_evaluated() -> None:
    """Formats without recipes use `plain`, whatever recipes are requested."""
    model = make_model("llama")
    windows = [token_ids(1, 20)[0].tolist()]
    results = evaluate_perplexity(
        model, windows, ["bfloat16", "nvfp4", "fp8"], 16, kv_recipes=["balanced"]
    )
    assert [(result.kv_cache_dtype, result.kv_recipe) for result in results] == [
        ("bfloat16", "plain"),
        ("nvfp4", "balanced"),
        ("fp8_e4m3", "plain"),
    ]


def test_layers_of_other_formats_stay_as_they_are() -> None:
    """K in fp8 has no recipe: logits equal those of `plain`."""
    model = make_model("llama")
    scales = calibrate(model, token_ids(1, 100), "test")
    logits = []
    for recipe in ("plain", "balanced"):
        cache = Cache(model, "fp8", kv_scales=scales, kv_recipe=recipe)
        with torch.inference_mode():
            logits.append(model(token_ids(1, 40), past_key_values=cache).logits)
    assert torch.equal(*logits)


def test_first_tokens_are_constants_of_the_model() -> None:
    """Text that begins with a known token: K and V at position 0 are read unquantized."""
    model = make_model("llama")
    ids = token_ids(1, 30)
    scales = calibrate(model, token_ids(1, 100), "test", first_tokens=[int(ids[0, 0])])
    assert scales.calibration is not None
    only_first = KVRecipe(keep_first_token=True)
    for known in (True, False):
        cache = Cache(model, "nvfp4", kv_scales=scales, kv_recipe=only_first)
        start = ids if known else (ids + 1) % model.config.vocab_size
        with torch.inference_mode():
            model(start, past_key_values=cache)
        layout = cache.pool.layout(0)
        views = layout.views(cache.pool.layer_pages(0))
        assert views.k_scale is not None
        page = int(cache.tables.block_table([cache._rows[0]], 0)[0, 0])
        assert ((views.k_scale[page, 0, :, 0] == 0xFF) == known).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (KVScales((9.0,) * 4, (9.0,) * 4, "user"), "balanced: needs a calibration of K, .* user"),
    ],
)
def test_scales_without_a_calibration_are_refused(given: KVScales, message: str) -> None:
    model = make_model("llama")
    given = replace(
        given,
        k_amax=(9.0,) * model.config.num_hidden_layers,
        v_amax=(9.0,) * model.config.num_hidden_layers,
    )
    with pytest.raises(ValueError, match=message):
        Cache(model, "nvfp4", kv_scales=given, kv_recipe="balanced")
    for unknown in ("best", ["plain"]):
        with pytest.raises(ValueError, match=r"kv_recipe: unknown .*; expected one of plain, "):
            Cache(model, "nvfp4", kv_recipe=unknown)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [1, 4])
def test_a_calibration_of_other_heads_is_refused(heads: int) -> None:
    """Of scales that do not name their model: its means would apply to other heads."""
    stored = KVScales.load(bundled_model_path())
    assert stored is not None
    model = load_model(bundled_model_path())
    other = with_heads(stored, heads)
    message = f"layer 0 has a calibration for {heads} KV heads of 64, the model has 2 of 64"
    for make in (LLM, Cache):
        with pytest.raises(ValueError, match=message):
            make(model, kv_cache_dtype="nvfp4", kv_scales=other, kv_recipe="balanced")
        make(model, kv_cache_dtype="nvfp4", kv_scales=other, kv_recipe="plain")  # no means


def test_an_older_calibration_is_refused_by_name(tmp_path: Path) -> None:
    """Also when it is found by itself; the error has the command that makes a new one."""
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    scales = calibrate(model, token_ids(1, 100), "test")
    assert scales.calibration is not None
    replace(scales, calibration=without_costs(scales.calibration)).save(tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    unweighted = replace(BALANCED, weighted_scales=False)
    assert Cache(model, "nvfp4", kv_recipe=unweighted).recipe == unweighted
    for recipe in (None, "balanced", "accurate"):
        message = (
            rf"kv_recipe {recipe or 'balanced'}: needs a calibration of queries and outputs.*"
            r"kv_scales\.json.* is older; `halfbyte calibrate` measures it"
        )
        with pytest.raises(ValueError, match=message):
            Cache(model, "nvfp4", kv_recipe=recipe)
        with pytest.raises(ValueError, match=message):
            LLM(model, kv_cache_dtype="nvfp4", kv_recipe=recipe, num_pages=8)
    scales.save(tmp_path)
    assert Cache(model, "nvfp4").recipe == BALANCED


def test_stored_scales_without_a_calibration_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    layers = model.config.num_hidden_layers
    KVScales((99.0,) * layers, (99.0,) * layers, "old").save(tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    assert Cache(model, "nvfp4").kv_scales.k_amax[0] == 99.0  # type: ignore[union-attr]
    with caplog.at_level("INFO", "halfbyte"):
        found = Cache(model, "nvfp4", kv_recipe="balanced").kv_scales
    assert found is not None
    assert found.k_amax[0] < 99.0
    assert "kv_scales.json (old): not used, kv_recipe needs others" in caplog.text


def test_usual_first_tokens_of_a_tokenizer() -> None:
    tokenizer = load_tokenizer(bundled_model_path())
    found = usual_first_tokens(tokenizer)
    assert tokenizer.bos_token_id is None or tokenizer.bos_token_id in found
    assert len(found) == len(set(found))
    assert usual_first_tokens(None) == []


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('needs a system message') }}", "{{ 1 / 0 }}", "{% for", "{{ a.b.c }}"],
)
def test_usual_first_tokens_where_the_template_refuses(template: str) -> None:
    tokenizer = load_tokenizer(bundled_model_path())
    expected = usual_first_tokens(tokenizer)
    tokenizer.chat_template = template
    assert usual_first_tokens(tokenizer) == expected
    tokenizer.chat_template = "x{{ messages[0]['content'] }}"
    first = tokenizer.encode("xa", add_special_tokens=False)[0]
    assert first in usual_first_tokens(tokenizer)
