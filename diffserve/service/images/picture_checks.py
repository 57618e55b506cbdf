"""What pictures pass on their way in and out: fetched, judged, marked. Made once for all doors."""

from __future__ import annotations

from typing import NamedTuple

from diffserve.media.provenance import Marks
from diffserve.service.images.fetching import Fetcher
from diffserve.service.safety import Safety
from diffserve.service.stored.file_pictures import FilePictures
from diffserve.settings.config import Settings


class PictureChecks(NamedTuple):
    """``fetcher`` brings those that are given by their addresses, ``safety`` judges what was painted (``None``: nobody
    does), ``marks`` are what pictures bear, ``files`` finds those that are named by files kept here.
    """

    fetcher: Fetcher
    marks: Marks
    safety: Safety | None = None
    files: FilePictures = FilePictures(None, None)

    @classmethod
    def of(cls, settings: Settings) -> PictureChecks:
        """As ``settings`` say. Takes as long as a filter takes to load. Raises ConfigError for what cannot be used."""
        return cls(Fetcher(settings.serve.fetch_hosts), Marks.of(settings.serve), Safety.of(settings))

    def stop(self) -> None:
        """End what was started for it."""
        if self.safety is not None:
            self.safety.stop()
