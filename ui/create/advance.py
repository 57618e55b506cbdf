"""How far a request is, told of all its pictures together."""

from __future__ import annotations

from diffserve.client import CompletedImage, LostImage, Progress


class Advance:
    """What is told of a request's pictures, as it comes; ``num_painted``: how many there are to be in all."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._done_s: dict[int, float] = {}  # when each that has begun will be there
        self._all_done_s: float | None = None  # as was told while it waited
        self._begun: tuple[float, float] | None = None  # when all that began together had told of a step, and the share
        self._is_going = False  # whether any of them has told of another one

    def take(self, event: Progress | CompletedImage | LostImage, now_s: float) -> None:
        """An event that came at ``now_s``, of any clock that does not go back."""
        match event:
            case Progress(image_index=None, seconds_left=seconds_left):
                self._all_done_s = self._all_done_s if seconds_left is None else now_s + seconds_left
            case Progress(image_index=int(index), seconds_left=seconds_left):
                if seconds_left is not None:
                    self._done_s[index] = now_s + seconds_left
                self._reach(index, (event.step or 0) / event.steps if event.steps else 0.0, now_s)
            case CompletedImage() | LostImage():
                self._done_s.pop(event.image_index, None)
                self._reach(event.image_index, 1.0, now_s)

    def _reach(self, index: int, share: float, now_s: float) -> None:
        self._is_going = self._is_going or index in self._shares
        self._shares[index] = max(share, self._shares.get(index, 0.0))
        if not self._is_going:
            self._begun = (now_s, sum(self._shares.values()))

    def share(self, num_painted: int) -> float:
        """How much of all steps is done, 0 to 1; it never shrinks."""
        return min(1.0, sum(self._shares.values()) / num_painted)

    def seconds_left(self, num_painted: int, now_s: float) -> float | None:
        """Until the last picture is there; ``None`` where nothing is known. Of those that wait for a free place the
        server tells nothing by itself: they are taken to come at the pace of all so far."""
        found = list(self._done_s.values())
        if len(self._shares) < num_painted:
            by_pace_s = self._by_pace_s(num_painted, now_s)
            found += [] if by_pace_s is None else [by_pace_s]
        return max(0.0, max(found) - now_s) if found else None

    def _by_pace_s(self, num_painted: int, now_s: float) -> float | None:
        """When all will be there if they go on as since the first step; at first as was told while it waited."""
        if self._begun is None:
            return self._all_done_s
        begun_s, begun_share = self._begun
        done = sum(self._shares.values())
        if done <= begun_share or now_s <= begun_s:
            return self._all_done_s
        return now_s + (num_painted - done) * (now_s - begun_s) / (done - begun_share)
