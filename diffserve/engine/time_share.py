"""TimeShare: divides the device time between image steps and language-model calls. No torch.

Deficit round robin (Shreedhar and Varghese 1995) between two sides, counted in seconds. Every step of the images earns
the texts ``share / (1 - share)`` times what it took. They save that up for a burst of calls, worth ``BURST_STEPS``
steps, and go on until it is spent; what the last call took too much is taken off what is earned next::

    share 1/4     two steps of the images, 90 ms each     a burst of calls, 12 ms each      two steps
    credit      0 -------------> +30 -------------> +60 -> 48 -> 36 -> 24 -> 12 -> 0 --> ...

New texts start during the first half of a burst, so that most texts finish within one burst, without image steps
between their tokens. Short texts, such as rewritten prompts, are as fast as if all texts shared every burst; longer
ones continue in the next. (Processor sharing delays all requests; images run shortest first for the same reason.)
"""

from __future__ import annotations

from typing import Final

from diffserve.api.engine_stats import ShareStats

BURST_STEPS: Final = 2.0
"""Length of a burst in image steps: shorter bursts leave texts unfinished, longer ones delay images."""
FULL: Final = 0.9
"""Share of a burst's credit at which it begins, as steps differ a little."""
ADMISSION_SHARE: Final = 0.5
"""Share of a burst that must be left for a new text to start."""

MEMORY: Final = 0.8
"""Weight of what was known of a turn's time, for each new turn."""
LONGEST_STEP: Final = 4.0
LONGEST_CALL: Final = 32.0
"""Times the usual: a turn that took even longer (the machine was asleep) counts as no more. Prompts differ by much."""
MOST_DEBT_S: Final = 5.0
"""Largest debt of one call: an extremely long call does not block its side for as long."""


class TimeShare:
    """Divides device time; ``share``, between 0 and 1, is the part of the texts when both sides have work.

    Attributes:
        image_s: Seconds of image steps while texts waited.
        text_s: Seconds of text calls while images waited.
    """

    def __init__(self, share: float) -> None:
        if not 0.0 < share < 1.0:
            raise ValueError(f"share is {share}; it must lie between 0 and 1.")
        self.share = share
        self.image_s = 0.0
        self.text_s = 0.0
        self._rate = share / (1.0 - share)
        self._step_s: float | None = None
        self._text_call_s: float | None = None
        self._credit_s = 0.0
        self._is_saving = True

    @property
    def is_texts_turn(self) -> bool:
        """Return whether a language-model call comes before the next image step."""
        return not self._is_saving

    @property
    def admits_texts(self) -> bool:
        """Return whether new texts may start with the next call."""
        return self._credit_s >= ADMISSION_SHARE * self._burst_s

    @property
    def call_s(self) -> float | None:
        """Longest time of a language-model call in seconds, the credit of one image step; None when unknown."""
        return None if self._step_s is None else self._rate * self._step_s

    def stats(self) -> ShareStats:
        """For the metrics."""
        return ShareStats(share=self.share, image_s=self.image_s, text_s=self.text_s)

    def record_image_step(self, wall_s: float, *, has_moved: bool, is_shared: bool) -> None:
        """Record an image step of ``wall_s`` seconds.

        Args:
            wall_s: Seconds of the step.
            has_moved: Whether any image advanced; images that wait for pages advance when texts do, which are then
                next.
            is_shared: Whether texts were waiting for their turn.
        """
        if not has_moved:
            self._credit_s = max(self._credit_s, 0.0)
            self._is_saving = False
            return
        counted_s, self._step_s = _learn(self._step_s, wall_s, LONGEST_STEP)
        most_s = self._burst_s * (1.0 + 1.0 / BURST_STEPS)  # limit of unused credit
        self._credit_s = min(self._credit_s + self._rate * counted_s, most_s)
        self._is_saving = self._is_saving and self._credit_s < FULL * self._burst_s
        if is_shared:
            self.image_s += wall_s

    def record_text_call(self, wall_s: float, *, has_moved: bool) -> None:
        """Record a language-model call of ``wall_s`` seconds while images waited.

        Args:
            wall_s: Seconds of the call.
            has_moved: Whether any text advanced; texts that wait for pages or admission advance when images do.
        """
        if not has_moved:
            self._is_saving = True
            return
        counted_s, self._text_call_s = _learn(self._text_call_s, wall_s, LONGEST_CALL)
        self._credit_s = max(self._credit_s - counted_s, -MOST_DEBT_S)
        self._is_saving = self._credit_s <= 0.0
        self.text_s += wall_s

    @property
    def _burst_s(self) -> float:
        return BURST_STEPS * (self.call_s or 0.0)


def _learn(average_s: float | None, wall_s: float, longest: float) -> tuple[float, float]:
    """Return the seconds a turn of ``wall_s`` counts as, and the new average."""
    if average_s is None:
        return wall_s, wall_s
    counted_s = min(wall_s, longest * average_s)
    return counted_s, MEMORY * average_s + (1.0 - MEMORY) * counted_s
