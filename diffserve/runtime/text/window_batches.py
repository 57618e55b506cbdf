"""How many windows of text one call may encode, where what becomes of a window must not depend on the others in it.

A library picks its kernels by shape, so it is found out as for the UNet (``unet.batch_invariance``): numbers of windows
are taken into use once random windows, forwards and backwards, were seen to get the bytes that each has alone. Until
then windows are encoded one by one.
"""

from __future__ import annotations

from typing import Final

from diffserve.runtime.unet.batch_invariance import SOLO, FactsOnDisk, GroupFacts, Study, Try, sizes_to_check, study

MOST_WINDOWS: Final = 16
"""In one call; of 77 tokens they fill every processor there is."""

NAME: Final = "windows of text"


class WindowBatches:
    """Numbers of windows for one call.

    attempt   encodes random windows, and gives all that the UNet is told of each, (len(rows), numbers)
    is_exact  whether bytes are promised; otherwise every number will do
    """

    def __init__(self, attempt: Try, disk: FactsOnDisk, *, is_exact: bool, most: int = MOST_WINDOWS) -> None:
        self.sizes: tuple[int, ...] = (SOLO,) if is_exact else tuple(range(1, most + 1))
        self._disk = disk
        self._study: Study | None = None
        facts = disk.read(NAME) if is_exact else None
        if facts is not None:
            self._take(facts)
        elif is_exact and most > 1:
            self._study = study(attempt, sizes_to_check(most), reference=SOLO)

    def cut(self, num_windows: int) -> list[range]:
        """``num_windows`` places in as few calls as may be."""
        calls, done = [], 0
        while done < num_windows:
            size = max(size for size in self.sizes if size <= num_windows - done)
            calls.append(range(done, done + size))
            done += size
        return calls

    def study(self) -> bool:
        """Make one call for what is still to be found out; False where there is nothing.

        After one that raised, as where pages are short, windows stay alone.
        """
        if self._study is None:
            return False
        try:
            next(self._study)
        except StopIteration as end:
            self._study = None
            self._take(end.value)
            self._disk.write(NAME, end.value)
        except Exception:
            self._study = None
            raise
        return True

    def _take(self, facts: GroupFacts) -> None:
        self.sizes = tuple(sorted({SOLO, *facts.buckets}))
