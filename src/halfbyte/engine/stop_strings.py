"""Strings that end a text, found while it comes."""

from collections.abc import Sequence


class StopStrings:
    """Gives text on as soon as it cannot be the beginning of a stop string.

    Args:
        stop: not empty strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self.found = False
        # What might begin a stop string: texts, and whether they are given out.
        self._held: list[tuple[str, bool]] = []

    def push(self, text: str) -> str:
        """Add text; what of it, and of what was held, is certain not to belong to a stop string."""
        return self._push(text, True)

    def push_hidden(self, text: str) -> str:
        """Add a special token, which is not given out and matters where a stop string has it."""
        return self._push(text, False) if any(text in stop for stop in self._stop) else ""

    def rest(self) -> str:
        """What was held back."""
        return "" if self.found else self._take(sum(len(text) for text, _ in self._held))

    def _push(self, text: str, shown: bool) -> str:
        if self.found or not text:
            return ""
        self._held.append((text, shown))
        held = "".join(text for text, _ in self._held)
        starts = [at for at in map(held.find, self._stop) if at >= 0]
        self.found = bool(starts)
        return self._take(min(starts) if starts else len(held) - self._possible(held))

    def _possible(self, text: str) -> int:
        """Length of the longest end of a text that begins a stop string."""
        longest = max(map(len, self._stop), default=1)
        return next(
            (
                size
                for size in range(min(longest - 1, len(text)), 0, -1)
                if any(stop.startswith(text[-size:]) for stop in self._stop)
            ),
            0,
        )

    def _take(self, length: int) -> str:
        """Remove the first characters, and return those of them that are given out."""
        out, kept = [], []
        for text, shown in self._held:
            if shown:
                out.append(text[:length])
            if text[length:]:
                kept.append((text[length:], shown))
            length = max(0, length - len(text))
        self._held = kept
        return "".join(out)
