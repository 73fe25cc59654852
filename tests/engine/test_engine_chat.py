"""Conversations, progress bars, and the repr of `LLM`."""

import sys
from typing import Any

import pytest

from engine.tokenizers_zoo import byte_level
from halfbyte.engine import LLM, SamplingParams
from models.zoo import make_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if not (continue_final_message and loop.last) %}<|im_end|>{% endif %}{% endfor %}"
    "{% if tools %}T{{ tools | length }}{% endif %}{% if mood %}{{ mood }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = SamplingParams(max_tokens=5, temperature=0)
HELLO = [{"role": "user", "content": "hello"}]


def make_llm(template: str | None = TEMPLATE) -> LLM:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return LLM(make_model("llama", vocab_size=len(tokenizer)), tokenizer, kv_cache_dtype="nvfp4")


def test_chat_writes_the_template_s_text_with_its_special_tokens() -> None:
    llm = make_llm()
    output = llm.chat(HELLO, GREEDY)[0]
    assert output.prompt == "<s><user>hello<|im_end|><assistant>"
    ids = llm.tokenizer(output.prompt, add_special_tokens=False).input_ids
    assert output.prompt_token_ids == ids
    assert (ids[0], ids.count(2)) == (0, 1)  # special tokens, not their letters
    assert output.token_ids == llm.generate([ids], GREEDY)[0].token_ids


def test_chat_of_several_conversations() -> None:
    llm = make_llm()
    longer: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    together = llm.chat([HELLO, longer], [GREEDY, SamplingParams(max_tokens=3, temperature=0)])
    assert [output.prompt for output in together] == [
        "<s><user>hello<|im_end|><assistant>",
        "<s><system>be brief<|im_end|><user>a\nb<|im_end|><assistant>",
    ]
    assert together[0] == llm.chat(HELLO, GREEDY)[0]
    assert len(together[1].token_ids) == 3


def test_chat_passes_the_template_s_options_on() -> None:
    llm = make_llm()

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one.
            b: other.
        """
        return a + b

    output = llm.chat(HELLO, GREEDY, tools=[add], chat_template_kwargs={"mood": "glad"})[0]
    assert output.prompt == "<s><user>hello<|im_end|>T1glad<assistant>"
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    output = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)[0]
    assert output.prompt == "<s><user>hello<|im_end|><assistant>Well"
    output = llm.chat(HELLO, GREEDY, chat_template="{{ messages[0].content }}!")[0]
    assert output.prompt == "hello!"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("hello", {}, "messages: expected .*, got str"),
        ({"role": "user"}, {}, "messages: expected .*, got dict"),
        (["hello"], {}, "messages: expected a list of messages, got 'hello'"),
        ([[]], {}, "messages: a conversation is empty"),
        ([{"content": "x"}], {}, "messages: expected a role and a content, got {'content': 'x'}"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "expected text as content"),
        (HELLO, {"continue_final_message": True}, "goes with add_generation_prompt=False"),
        (HELLO, {"chat_template": "{{"}, "the chat template refused them: "),
        (HELLO, {"chat_template": "{{ raise_exception('no') }}"}, "refused them: no"),
    ],
)
def test_chat_refuses_in_one_line(messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_llm().chat(messages, GREEDY, **options)
    assert "\n" not in str(caught.value)


def test_chat_without_a_template_or_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="chat_template: this model's tokenizer has none"):
        make_llm(None).chat(HELLO)
    with pytest.raises(ValueError, match="messages: this model has no tokenizer"):
        LLM(make_model("llama")).chat(HELLO)


def test_chat_of_nothing() -> None:
    assert make_llm().chat([]) == []


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
def test_progress_is_shown_on_a_terminal_for_many_prompts(
    asked: bool | None,
    terminal: bool,
    prompts: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm = LLM(make_model("llama"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    outputs = llm.generate([[1, 2, 3]] * prompts, GREEDY, use_tqdm=asked)
    assert len(outputs) == prompts
    captured = capsys.readouterr()
    assert captured.out == ""
    if asked or (asked is None and terminal and prompts > 1):
        assert f"{prompts}/{prompts}" in captured.err
    else:
        assert captured.err == ""


def test_repr_says_what_runs_where() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="fp8", v_cache_dtype="nvfp4", num_pages=9)
    assert repr(llm) == (
        "LLM(LlamaForCausalLM, kv_cache_dtype=fp8_e4m3+nvfp4, kv_recipe="
        f"{llm.recipe.name}, device=cpu, num_pages=9, max_model_len=256, max_num_seqs=64)"
    )
