"""How far a request is, told of all its pictures together."""

from __future__ import annotations

from diffserve.client import CompletedImage, LostImage, Progress


class Advance:
    """What is told of a request's pictures, as it comes."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._all_done_s: float | None = None

    def take(self, event: Progress | CompletedImage | LostImage, now_s: float) -> None:
        """An event that came at ``now_s``, of any clock that does not go back."""
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
        """How much of all steps of ``num_painted`` pictures is done, 0 to 1; it never shrinks."""
        return min(1.0, sum(self._shares.values()) / num_painted)

    def seconds_left(self, now_s: float) -> float | None:
        """Until the last picture is there; ``None`` where nothing is known."""
        return None if self._all_done_s is None else max(0.0, self._all_done_s - now_s)
