"""User prompts: texts, token ids, conversations."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from halfbyte.layouts.arguments import integer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts as a list; a single prompt becomes a list of one.

    Raises:
        ValueError: neither texts nor lists of token ids.
    """
    if hasattr(prompts, "tolist"):  # a tensor or an array of token ids
        prompts = prompts.tolist()
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(
            "prompts: expected texts or lists of token ids, got "
            f"{type(prompts).__name__} (of a tokenizer's result pass input_ids)"
        )
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if batch and isinstance(batch[0], Integral) else batch


def encode(tokenizer: Any, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ValueError: not a prompt, or a text without a tokenizer.
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise ValueError(
            f"prompt: expected a text or a list of token ids, got {type(prompt).__name__}"
        )
    if not isinstance(prompt, str):
        return [integer("prompt", token) for token in prompt]
    if tokenizer is None:
        raise ValueError("prompt: this model has no tokenizer; give token ids")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ValueError("prompt: is not valid text") from None
    ids: list[int] = tokenizer(prompt, add_special_tokens=add_special_tokens).input_ids
    return ids if prompt else []


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Any]]:
    """Conversations as a list; a single one becomes a list of one.

    Raises:
        ValueError: a message is not a mapping with a role.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(
            'messages: expected [{"role": "user", "content": "…"}, …], or a list of such, got '
            f"{type(messages).__name__}"
        )
    listed: list[Any] = list(messages)
    conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
    for conversation in conversations:
        if isinstance(conversation, str | Mapping) or not isinstance(conversation, Iterable):
            raise ValueError(f"messages: expected a list of messages, got {conversation!r:.80}")
        for message in conversation:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"messages: expected a role and a content, got {message!r:.80}")
    return [[_with_text(message) for message in conversation] for conversation in conversations]


def _with_text(message: Message) -> dict[str, Any]:
    """The message with text as content, which most templates expect, instead of a list of texts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    parts = content if isinstance(content, Iterable) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise ValueError(f"messages: expected text as content, got {content!r:.80}")
    return {**message, "content": "\n".join(known)}


def apply_chat_template(
    tokenizer: Any,
    conversation: Sequence[Message],
    *,
    chat_template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
) -> str:
    """The text of a conversation, by the tokenizer's chat template.

    Raises:
        ValueError: no tokenizer or no template, or the template rejects the conversation.
    """
    if tokenizer is None:
        raise ValueError("messages: this model has no tokenizer; give token ids to generate")
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "chat_template: this model's tokenizer has none; give one, or a text to generate"
        )
    if not conversation:
        raise ValueError("messages: a conversation is empty")
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "continue_final_message: goes with add_generation_prompt=False, which would begin "
            "another message"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            conversation,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if tools is None else list(tools),
            tokenize=False,
            **options,
        )
    except Exception as error:  # templates raise errors of any type to reject messages
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"messages: the chat template refused them: {reason:.300}") from error
    return text
