"""What one tick will do, what it did, and what the trace remembers of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffserve.engine.task import Failure, GroupKey, ImageTask


@dataclass(frozen=True)
class TickPlan:
    """The work of one tick.

    prepare   newcomers with a fresh lane: encode their text and init image, draw the start latent
    rows      images of one ``group`` that advance by one table row; a guided image takes two UNet rows, never split
    num_rows  UNet rows these take, before padding
    previews  those of ``rows`` whose denoised estimate is to be shown
    decode    latents to turn into pictures after the rows have run (some of ``rows`` finish in this very tick)
    """

    prepare: tuple[ImageTask, ...]
    group: GroupKey | None
    rows: tuple[ImageTask, ...]
    num_rows: int
    previews: tuple[ImageTask, ...]
    decode: tuple[ImageTask, ...]

    @property
    def tasks(self) -> tuple[ImageTask, ...]:
        """Everybody this tick touches, once."""
        return tuple(dict.fromkeys((*self.prepare, *self.rows, *self.decode)))


class RowLabel(NamedTuple):
    """Whose row it was: ``part`` is "cond" or "uncond"."""

    request_id: str
    image_index: int
    step_index: int
    part: str


@dataclass(frozen=True)
class UNetCall:
    """One UNet call as it ran: the rows that mattered, how many padded it, and its wall time.

    On a device that works asynchronously ``wall_s`` is the time to launch; the tick's ``wall_s`` is the whole truth.
    """

    rows: tuple[RowLabel, ...]
    num_padded: int
    wall_s: float


@dataclass(frozen=True)
class TickTrace:
    """What tick number ``tick`` ran, for tests and for eyes."""

    tick: int
    calls: tuple[UNetCall, ...]
    num_prepared: int
    num_decoded: int
    wall_s: float

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The request of every row, call after call."""
        return tuple(row.request_id for call in self.calls for row in call.rows)

    @property
    def num_rows(self) -> int:
        """UNet rows that mattered."""
        return sum(len(call.rows) for call in self.calls)


@dataclass
class TickOutcome:
    """What the runners report back; filled during the run, read by ``RequestScheduler.apply``.

    postponed            newcomers that have to wait for pages; they keep their place in the waiting room
    pictures, previews   (height_px, width_px, 3) uint8
    latents              (C, h, w) float32, for requests that asked for them
    """

    groups: dict[ImageTask, GroupKey] = field(default_factory=dict)
    failures: dict[ImageTask, Failure] = field(default_factory=dict)
    postponed: list[ImageTask] = field(default_factory=list)
    previews: dict[ImageTask, NDArray[np.uint8]] = field(default_factory=dict)
    pictures: dict[ImageTask, NDArray[np.uint8]] = field(default_factory=dict)
    latents: dict[ImageTask, NDArray[np.float32]] = field(default_factory=dict)
    prepare_s: dict[ImageTask, float] = field(default_factory=dict)
    decode_s: dict[ImageTask, float] = field(default_factory=dict)
    rows_started_s: float = 0.0
    rows_ended_s: float = 0.0
    calls: list[UNetCall] = field(default_factory=list)
