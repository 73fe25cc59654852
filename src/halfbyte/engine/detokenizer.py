"""Incremental detokenization."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from halfbyte.engine.stop_strings import StopStrings

_INCOMPLETE = "�"
_MAX_OPEN = 3
"""Max bytes of an incomplete UTF-8 character, hence max tokens that it can span so far."""
_CONTEXT = 5
"""Tokens decoded again with each new one, so that spaces and split characters come out right."""


class Detokenizer:
    """Text of a growing list of token ids, returned incrementally.

    Text is held back while it ends within a character, or while it may be the beginning of a stop
    string. The cost per token does not depend on the length of the text.

    Args:
        tokenizer: of transformers.
        stop: strings that end the text; it is cut before the first one found. Special tokens, which
            the text does not contain, match as well.
        prompt: ids of the prompt, so that the text continues the prompt's (spaces, characters).
        min_tokens: tokens before which stop strings are ignored.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._ids_to_text = _decoder(tokenizer)
        self._window = _Window(self._decode, prompt)
        self._stop = StopStrings(stop)
        self._chunks: list[str] = []
        self._count = 0
        self._min_tokens = min_tokens

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._chunks) > 1:
            self._chunks = ["".join(self._chunks)]
        return self._chunks[0] if self._chunks else ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.found

    def push(self, token: int) -> str:
        """Add a token and return the new text that cannot change any more."""
        self._count += 1
        new, is_special = self._window.push(token)
        if self._count <= self._min_tokens:
            return self._give(new)
        chunk = self._stop.push(new)
        if is_special:
            chunk += self._stop.push_hidden(self.token_text(token))
        return self._give(chunk)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._give(self._stop.push(self._window.rest()) + self._stop.rest())

    def token_text(self, token: int) -> str:
        """The text of a token alone, special ones included."""
        return self._ids_to_text([token], skip_special_tokens=False)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._ids_to_text(ids, skip_special_tokens=True)

    def _give(self, chunk: str) -> str:
        if chunk:
            self._chunks.append(chunk)
        return chunk


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """`tokenizer.decode`, of transformers' tokenizers without the search for tensors in its
    argument, which takes most of the time and is done for every token of every sequence."""
    own = getattr(type(tokenizer), "decode", None) is not PreTrainedTokenizerBase.decode
    decode: Callable[..., str] = tokenizer.decode if own else tokenizer._decode
    return decode


class _Window:
    """The last ids, decoded together.

    Args:
        decode: ids to text, without special tokens.
        before: preceding ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._ids, self._text = self._beginning(before)
        # Characters of `_text` already returned; one that the prompt splits belongs to the output.
        self._given = len(self._text.rstrip(_INCOMPLETE)) or max(0, len(self._text) - _MAX_OPEN)
        self._open = 0  # tokens since the text last ended with a character

    def push(self, token: int) -> tuple[str, bool]:
        """Add an id; returns the new final text, and whether the token is special."""
        text = self._decode([*self._ids, token])
        if text == self._text:
            is_special = not self._decode([token])
            if is_special or not text.endswith(_INCOMPLETE):
                return "", is_special  # no later text depends on it
        self._ids.append(token)
        self._text = text
        trailing = len(text) - len(text.rstrip(_INCOMPLETE))
        self._open = self._open + 1 if trailing else 0
        if self._open > _MAX_OPEN:  # too long for an incomplete character: invalid bytes
            trailing = min(trailing, _MAX_OPEN)
        certain = len(text) - trailing
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if len(self._ids) >= 2 * _CONTEXT and (not trailing or self._open > _MAX_OPEN):
            self._shorten()
        return new, False

    def rest(self) -> str:
        """The text not returned yet."""
        text, self._given = self._text[self._given :], len(self._text)
        return text

    def _beginning(self, before: Sequence[int]) -> tuple[list[int], str]:
        """The last ids of a prompt, starting at a character boundary, and their text."""
        ids, text = list(before[-_CONTEXT:]), ""
        for count in range(_CONTEXT, _CONTEXT + _MAX_OPEN + 1):
            ids = list(before[-count:])
            text = self._decode(ids) if ids else ""
            if not text.startswith(_INCOMPLETE):
                break
        return ids, text

    def _shorten(self) -> None:
        """Drop old ids, if the remaining ones decode to the end of the same text.

        The remaining text may begin within a character, whose bytes the comparison ignores.
        """
        open_length = len(self._text) - self._given
        for count in range(_CONTEXT, _CONTEXT + _MAX_OPEN + 1):
            text = self._decode(self._ids[-count:])
            known = text.lstrip(_INCOMPLETE) or text
            given = len(text) - open_length
            if known and self._text.endswith(known) and given >= len(text) - len(known):
                self._ids, self._text, self._given = self._ids[-count:], text, given
                return
