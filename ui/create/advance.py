"""Progress of a request over all its images."""

from __future__ import annotations

from diffserve.client import CompletedImage, LostImage, Progress


class Advance:
    """Progress of all images of a request."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._all_done_s: float | None = None

    def take(self, event: Progress | CompletedImage | LostImage, now_s: float) -> None:
        """Record ``event``, received at ``now_s`` on a monotonic clock."""
        match event:
            case Progress(image_index=index, request_seconds_left=seconds_left):
                self._all_done_s = self._all_done_s if seconds_left is None else now_s + seconds_left
                if index is not None and event.steps:
                    self._reach(index, (event.step or 0) / event.steps)
            case CompletedImage() | LostImage():
                self._reach(event.image_index, 1.0)

    def _reach(self, index: int, share: float) -> None:
        self._shares[index] = max(share, self._shares.get(index, 0.0))

    def share(self, num_painted: int) -> float:
        """Return the finished share of all steps of ``num_painted`` images, 0 to 1; it never decreases."""
        return min(1.0, sum(self._shares.values()) / num_painted)

    def seconds_left(self, now_s: float) -> float | None:
        """Return the seconds until all images are done, or None if unknown."""
        return None if self._all_done_s is None else max(0.0, self._all_done_s - now_s)
