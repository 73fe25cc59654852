"""Incremental search for stop strings."""

from collections.abc import Sequence


class StopStrings:
    """Returns text as soon as it cannot be part of a stop string.

    Args:
        stop: non-empty strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self.found = False
        # May begin a stop string: texts, and whether they belong to the output.
        self._held: list[tuple[str, bool]] = []

    def push(self, text: str) -> str:
        """Add text; returns the held and new text that cannot be part of a stop string."""
        return self._push(text, True)

    def push_hidden(self, text: str) -> str:
        """Add a special token, which stop strings can contain but which is never returned."""
        return self._push(text, False) if any(text in stop for stop in self._stop) else ""

    def rest(self) -> str:
        """The text held back."""
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
        """Length of the longest suffix of a text that is a prefix of a stop string."""
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
        """Remove the first characters, and return those that belong to the output."""
        out, kept = [], []
        for text, shown in self._held:
            if shown:
                out.append(text[:length])
            if text[length:]:
                kept.append((text[length:], shown))
            length = max(0, length - len(text))
        self._held = kept
        return "".join(out)
