"""Token ids to text, as they come."""

from typing import Any

_INCOMPLETE = "�"


class Detokenizer:
    """Text of a growing list of token ids, given out piece by piece.

    A piece is held back while it ends in the middle of a character, or while it might be the
    beginning of a stop string.

    Args:
        tokenizer: of transformers.
        stop: strings that end the text; the first found is cut off with what follows.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        # Ids from `_context` on are decoded again with each token, those up to `_read` for the
        # sake of what follows them; the text of all ids up to `_read` is settled.
        self._ids: list[int] = []
        self._context = self._read = 0
        self._settled = ""
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; the piece of text that is certain by now."""
        self._ids.append(token)
        self._update()
        return self._give(self._certain_length())

    def finish(self) -> str:
        """What was held back."""
        return self._give(len(self.text))

    def _update(self) -> None:
        text = self._settled + self._new_text()
        if len(text) > len(self._settled) and not text.endswith(_INCOMPLETE):
            self._settled = text
            self._context, self._read = self._read, len(self._ids)
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        self.stopped = bool(ends)
        self.text = text[: min(ends)] if ends else text

    def _new_text(self) -> str:
        before, now = (
            self._tokenizer.decode(ids, skip_special_tokens=True)
            for ids in (self._ids[self._context : self._read], self._ids[self._context :])
        )
        return now[len(before) :]

    def _certain_length(self) -> int:
        if self.stopped:
            return len(self.text)
        length = len(self.text.rstrip(_INCOMPLETE))
        for stop in self._stop:
            for size in range(min(len(stop), length), 0, -1):
                if self.text[:length].endswith(stop[:size]):
                    length -= size
                    break
        return length

    def _give(self, length: int) -> str:
        piece = self.text[self._given : length]
        self._given = max(self._given, length)
        return piece
