"""StopStrings: text that passes, until a stop text has come; what may be the beginning of one waits."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for ``stops`` in a text that arrives in pieces, and cuts it before the one that is complete first.

    Of several that are complete at the same character, before the longest: how the text was cut into pieces does not
    matter.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop text that ended the text; None so far."""

    def feed(self, piece: str) -> str:
        """What may be shown now that ``piece`` has come; nothing after a stop text was found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            _, at, self.found = min(places)
            self._held = ""
            return text[:at]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def release(self) -> str:
        """The text that waited: nothing more will come, so it begins no stop text."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of ``text`` may be the beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
