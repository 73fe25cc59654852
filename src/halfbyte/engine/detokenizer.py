"""Token ids to text, as they come."""

from collections.abc import Callable, Sequence
from typing import Any

from halfbyte.engine.stop_strings import StopStrings

_INCOMPLETE = "�"
_MAX_OPEN = 3
"""Bytes of a character that is not complete, and so the tokens that can have brought them."""
_CONTEXT = 5
"""Tokens that are decoded again with each one, for the sake of spaces and half characters."""


class Detokenizer:
    """Text of a growing list of token ids, given out piece by piece.

    A piece is held back while it ends in the middle of a character, or while it might be the
    beginning of a stop string. Every token costs the same, whatever came before.

    Args:
        tokenizer: of transformers.
        stop: strings that end the text; the first found is cut off with what follows. Special
            tokens, which the text does not have, are found as well.
        prompt: ids before the first one, so that the text begins as it goes on from theirs.
        min_tokens: tokens in which no stop string is looked for.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._window = _Window(self._decode, prompt)
        self._stop = StopStrings(stop)
        self._pieces: list[str] = []
        self._count = 0
        self._min_tokens = min_tokens

    @property
    def text(self) -> str:
        """All text so far that is certain."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.found

    def push(self, token: int) -> str:
        """Add a token; the piece of text that is certain by now."""
        self._count += 1
        new, is_special = self._window.push(token)
        if self._count <= self._min_tokens:
            return self._give(new)
        piece = self._stop.push(new)
        if is_special:
            piece += self._stop.push_hidden(self.token_text(token))
        return self._give(piece)

    def finish(self) -> str:
        """What was held back."""
        return self._give(self._stop.push(self._window.rest()) + self._stop.rest())

    def token_text(self, token: int) -> str:
        """The text of a token alone, special ones included."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _give(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class _Window:
    """The last few ids, decoded together.

    Args:
        decode: ids to text, without special tokens.
        before: ids that come before.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._ids, self._text = self._beginning(before)
        # Characters of `_text` that were given out; half a one of the prompt is the output's.
        self._given = len(self._text.rstrip(_INCOMPLETE)) or max(0, len(self._text) - _MAX_OPEN)
        self._open = 0  # tokens since the text last ended with a character

    def push(self, token: int) -> tuple[str, bool]:
        """Add an id; the new text that is certain, and whether the token is special."""
        text = self._decode([*self._ids, token])
        if text == self._text:
            is_special = not self._decode([token])
            if is_special or not text.endswith(_INCOMPLETE):
                return "", is_special  # nothing that a later one could depend on
        self._ids.append(token)
        self._text = text
        trailing = len(text) - len(text.rstrip(_INCOMPLETE))
        self._open = self._open + 1 if trailing else 0
        if self._open > _MAX_OPEN:  # what is open for longer is no beginning of a character
            trailing = min(trailing, _MAX_OPEN)
        certain = len(text) - trailing
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if len(self._ids) >= 2 * _CONTEXT and (not trailing or self._open > _MAX_OPEN):
            self._shorten()
        return new, False

    def rest(self) -> str:
        """The text that was not certain."""
        text, self._given = self._text[self._given :], len(self._text)
        return text

    def _beginning(self, before: Sequence[int]) -> tuple[list[int], str]:
        """The last ids of a prompt, from the beginning of a character on, and their text."""
        ids, text = list(before[-_CONTEXT:]), ""
        for count in range(_CONTEXT, _CONTEXT + _MAX_OPEN + 1):
            ids = list(before[-count:])
            text = self._decode(ids) if ids else ""
            if not text.startswith(_INCOMPLETE):
                break
        return ids, text

    def _shorten(self) -> None:
        """Keep the last ids, where they decode to the end of the same text.

        It may begin within a character, whose remains are then left out of the comparison.
        """
        open_length = len(self._text) - self._given
        for count in range(_CONTEXT, _CONTEXT + _MAX_OPEN + 1):
            text = self._decode(self._ids[-count:])
            known = text.lstrip(_INCOMPLETE) or text
            given = len(text) - open_length
            if known and self._text.endswith(known) and given >= len(text) - len(known):
                self._ids, self._text, self._given = self._ids[-count:], text, given
                return
