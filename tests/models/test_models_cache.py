"""`halfbyte.Cache`: logits as of the model's own attention, its rows, formats and failed passes."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from halfbyte.kvcache import KVScales
from halfbyte.kvcache.store import interface as store_module
from halfbyte.models import Cache
from halfbyte.models import batch as batch_module
from models.zoo import ALL_EXPERTS, ARCHITECTURES, make_model, token_ids

CHUNKS = (13, 1, 1, 17, 8)


def padded_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and positions of three rows, two of them padded on the left."""
    ids = token_ids(3, sum(CHUNKS))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    mask[2, :20] = 0
    ids[mask == 0] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def feed_columns(
    model: Any, cache: Cache, start: int, stop: int, *, wrong: bool = False
) -> torch.Tensor:
    """Logits of columns `start` .. `stop` of `padded_batch`, or of other ids in their places."""
    ids, mask, positions = padded_batch()
    output = model(
        input_ids=ids[:, start:stop] % 7 if wrong else ids[:, start:stop],
        attention_mask=mask[:, :stop],
        position_ids=positions[:, start:stop],
        past_key_values=cache,
    )
    logits: torch.Tensor = output.logits
    return logits


def feed(model: Any, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, past_key_values=cache).logits[:, -1]


@torch.inference_mode()
def through_cache(model: Any, cache: Cache) -> torch.Tensor:
    """Logits of the tokens of `padded_batch`, fed in chunks."""
    _, mask, _ = padded_batch()
    logits = []
    start = 0
    for count in CHUNKS:
        logits.append(feed_columns(model, cache, start, start + count))
        start += count
    return torch.cat(logits, 1)[mask.bool()]


@torch.inference_mode()
def eager(model: Any) -> torch.Tensor:
    """The same logits in one pass of the model's own eager attention."""
    ids, mask, positions = padded_batch()
    model.set_attn_implementation("eager")
    return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cache_unquantized_reproduces_eager_logits(architecture: str) -> None:
    model = make_model(architecture)
    expected = eager(model)
    logits = through_cache(model, Cache(model, "float32"))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cache_bfloat16_is_as_close_to_exact_as_eager_bfloat16(architecture: str) -> None:
    options = ALL_EXPERTS.get(architecture, {})
    exact = eager(make_model(architecture, torch.bfloat16, **options).float())
    model = make_model(architecture, torch.bfloat16, **options)
    baseline = (eager(model).float() - exact).abs()
    error = (through_cache(model, Cache(model, "bfloat16")).float() - exact).abs()
    assert error.mean() <= 1.5 * baseline.mean()
    assert error.max() <= 2 * baseline.max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cache_nvfp4_differs_from_eager_and_stays_near(architecture: str) -> None:
    model = make_model(architecture)
    expected = eager(model)
    logits = through_cache(model, Cache(model, "nvfp4", kv_recipe="plain"))
    assert not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3)
    similarity = torch.cosine_similarity(logits.flatten(), expected.flatten(), dim=0)
    assert similarity > 0.8


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_switched_model_without_cache_reproduces_eager_logits(architecture: str) -> None:
    model = make_model(architecture)
    expected = eager(model)
    Cache(model, "bfloat16")
    ids, mask, positions = padded_batch()
    with torch.inference_mode():
        dense = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        chunked = []
        cache = DynamicCache(config=model.config)
        for columns in (slice(0, 30), slice(30, 40)):
            output = model(
                input_ids=ids[:, columns],
                attention_mask=mask[:, : columns.stop],
                position_ids=positions[:, columns],
                past_key_values=cache,
            )
            chunked.append(output.logits)
    torch.testing.assert_close(dense[mask.bool()], expected, rtol=1e-4, atol=1e-4)
    if architecture == "llama":  # sliding layers of DynamicCache drop columns that our mask counts
        torch.testing.assert_close(
            torch.cat(chunked, 1)[mask.bool()], expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("argument", [-5, 15], ids=["remove-five", "keep-fifteen"])
def test_cache_crop(argument: int) -> None:
    model = make_model("gemma2")
    ids, last = token_ids(2, 20), token_ids(2, 1, seed=5)
    cache, fresh = Cache(model, "nvfp4"), Cache(model, "nvfp4")
    feed(model, cache, ids)
    cache.crop(argument)
    assert cache.get_seq_length() == 15
    feed(model, fresh, ids[:, :15])
    torch.testing.assert_close(feed(model, cache, last), feed(model, fresh, last))
    cache.crop(0)
    cache.crop(100)
    assert cache.get_seq_length() == 16
    cache.tables.check_integrity()


@pytest.mark.parametrize(
    ("method", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([2, 2, 0]), [2, 2, 0]),
        ("batch_select_indices", torch.tensor([1]), [1]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "select-mask", "repeat"],
)
def test_cache_rows_move_and_then_part(method: str, argument: object, rows: list[int]) -> None:
    model = make_model("llama")
    ids = token_ids(3, 21)
    cache, fresh = Cache(model, "nvfp4"), Cache(model, "nvfp4")
    feed(model, cache, ids)
    getattr(cache, method)(argument)
    feed(model, fresh, ids[rows])
    for seed in (1, 2):
        last = token_ids(len(rows), 3, seed=seed)  # copies of one row get different tokens
        torch.testing.assert_close(feed(model, cache, last), feed(model, fresh, last))
    cache.tables.check_integrity()


def test_cache_reset_frees_everything() -> None:
    model = make_model("llama")
    cache = Cache(model, "nvfp4")
    first = feed(model, cache, token_ids(2, 30))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.tables.allocator.num_used == 0
    assert torch.equal(feed(model, cache, token_ids(2, 30)), first)


def test_cache_grows_past_its_first_pages() -> None:
    model = make_model("llama", max_position_embeddings=2048)
    cache = Cache(model, "nvfp4")
    pages = cache.pool.num_pages
    logits = feed(model, cache, token_ids(1, 1500))
    assert cache.pool.num_pages > pages
    assert not logits.isnan().any()


def test_cache_reads_packed_pages_only() -> None:
    model = make_model("llama")
    ids, last = token_ids(1, 20), token_ids(1, 1, seed=3)
    logits = []
    for flip in (False, True):
        cache = Cache(model, "nvfp4", kv_recipe="plain")
        feed(model, cache, ids)
        if flip:
            page = cache.tables.table(cache._rows[0])[0]
            cache.pool.layer_pages(2)[page, 0] ^= 0x77
        logits.append(feed(model, cache, last))
    assert not torch.equal(logits[0], logits[1])


def test_cache_per_layer_formats() -> None:
    model = make_model("gemma2")
    cache = Cache(model, {"full_attention": "nvfp4", "sliding_attention": "bfloat16"})
    formats = [cache.pool.layout(layer).k_dtype.value for layer in range(4)]
    assert formats == ["bfloat16", "nvfp4_4over6"] * 2
    assert not feed(model, cache, token_ids(1, 30)).isnan().any()


def test_cache_bytes_per_token() -> None:
    model = make_model("qwen3")  # 4 layers, 2 KV heads of 32: K and V take 18 bytes a head each
    assert Cache(model, "nvfp4").bytes_per_token == 4 * 2 * 2 * 18
    assert Cache(model, "bfloat16").bytes_per_token == 4 * 2 * 2 * 64


def test_cache_takes_scales_of_the_user() -> None:
    model = make_model("llama")
    scales = KVScales((9.0,) * 4, (7.0,) * 4, "user")
    cache = Cache(model, "nvfp4", kv_scales=scales)
    assert cache.kv_scales is scales
    with pytest.raises(ValueError, match="3 layers, the model has 4"):
        Cache(model, "nvfp4", kv_scales=KVScales((9.0,) * 3, (7.0,) * 3, "user"))


def test_cache_of_a_compiled_model() -> None:
    model = make_model("llama")
    cache = Cache(torch.compile(model, backend="eager"), "float32")  # type: ignore[arg-type]
    expected = model(token_ids(1, 5), use_cache=False).logits
    torch.testing.assert_close(model(token_ids(1, 5), past_key_values=cache).logits, expected)


def test_hooks_may_change_what_the_cache_gives() -> None:
    model = make_model("llama")
    ids, attention = token_ids(1, 5), model.model.layers[1].self_attn

    def logits() -> torch.Tensor:
        return model(ids, past_key_values=Cache(model, "float32")).logits

    before = logits()
    handle = attention.o_proj.register_forward_pre_hook(lambda _, args: args[0].mul_(2).div_(2))
    torch.testing.assert_close(logits(), before)
    handle.remove()


@pytest.mark.parametrize("where", ["attend", "store", "tables"])
def test_cache_after_a_forward_pass_that_failed(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure in the second layer: the next pass starts from the state before it."""
    model = make_model("llama")
    expected = through_cache(model, Cache(model, "nvfp4"))
    cache = Cache(model, "nvfp4")
    ids, mask, _ = padded_batch()
    owner, name = {
        "attend": (batch_module, "paged_attention"),
        "store": (store_module, "reshape_and_cache"),
        "tables": (cache.tables, "append"),
    }[where]
    function, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    def again(start: int, stop: int) -> None:
        nonlocal calls
        calls = 0
        with pytest.raises(KeyboardInterrupt):
            feed_columns(model, cache, start, stop, wrong=True)
        assert cache.get_seq_length() == start

    logits = []
    start = 0
    for count in CHUNKS:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            again(start, start + count)
            again(start, start + count)
        with torch.inference_mode():
            logits.append(feed_columns(model, cache, start, start + count))
        start += count
        cache.tables.check_integrity()
    assert torch.equal(torch.cat(logits, 1)[mask.bool()], expected)
    calls, more = 0, torch.cat([mask, mask.new_ones(3, 3)], 1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids[:, :3], attention_mask=more, past_key_values=cache)
    cache.crop(start - 8)
    assert cache.get_seq_length() == start - 8
    assert [cache.tables.length(row) for row in cache._rows] == mask[:, : start - 8].sum(1).tolist()


def test_cache_takes_another_batch_after_a_failed_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama")
    cache = Cache(model, "nvfp4")
    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "paged_attention", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=token_ids(2, 9), past_key_values=cache)
    with torch.inference_mode():
        out = model(input_ids=token_ids(3, 9), past_key_values=cache).logits
        fresh = model(input_ids=token_ids(3, 9), past_key_values=Cache(model, "nvfp4")).logits
    assert torch.equal(out, fresh)


def test_a_cache_that_is_deleted_frees_its_pool_at_once() -> None:
    model = make_model("llama")
    cache = Cache(model, "nvfp4")
    feed(model, cache, token_ids(1, 20))
    pool = weakref.ref(cache.pool)
    gc.disable()
    try:
        del cache
        assert pool() is None
    finally:
        gc.enable()


def test_copies_go_on_by_themselves() -> None:
    """Copies continue independently, as in transformers' documentation of prefix reuse."""
    model = make_model("llama")
    cache = Cache(model, "nvfp4")
    feed(model, cache, token_ids(1, 70))
    copied = copy.deepcopy(cache)
    other = feed(model, cache, token_ids(1, 3, seed=1))
    same = feed(model, copied, token_ids(1, 3, seed=1))
    assert torch.equal(other, same)
    assert not torch.equal(feed(model, copied, token_ids(1, 3, seed=2)), other)
    del cache
    assert copied.get_seq_length() == 76
