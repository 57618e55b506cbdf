"""The mutable records of the engine: a live request and its images on their way through the stages. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffserve.types import GenerationRequest
from schedulers import StepTable

PAINT_FROM = 128
"""Mask values from here up are repainted (diffusers binarises at one half)."""


class Stage(enum.Enum):
    """Where an image stands. ``WAITING -> DENOISING -> DECODING -> DONE``; every stage may jump to ``DONE``."""

    WAITING = "waiting"
    DENOISING = "denoising"
    DECODING = "decoding"
    DONE = "done"


class GroupKey(NamedTuple):
    """Rows that may share a UNet call: equal picture size and equal number of context tokens.

    Where texts of different lengths share calls, ``num_tokens`` is that of one window for all of them.
    """

    height_px: int
    width_px: int
    num_tokens: int


class Failure(NamedTuple):
    """Why an image was given up: a stable ``code``, a sentence, and the request field to blame, if one is."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True)
class PaintSettings:
    """A request's parameters with every default filled in and the sampler compiled.

    guided   bool (num_rows,): whether table row i also runs the unconditional row
    kind     "text" | "image" | "inpaint"; an inpainting UNet always inpaints, at need everything on a grey picture
    strength 1 where there is no init image
    row_cost work of a UNet row: its pixels over those of the model's native size
    """

    width_px: int
    height_px: int
    sampler: str
    spacing: str
    sigma_schedule: str | None
    eta: float
    guidance_scale: float
    num_steps: int
    kind: str
    strength: float
    table: StepTable
    guided: NDArray[np.bool_]
    row_cost: float = 1.0

    @cached_property
    def rows_left(self) -> NDArray[np.int64]:
        """UNet rows still to run before table row i, (num_rows + 1,); the last entry is 0."""
        rows = 1 + self.guided.astype(np.int64)
        return np.concatenate([np.cumsum(rows[::-1])[::-1], [0]])


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request from submit to its terminal event. ``submitted_tick`` is its place in the order of ageing.

    queue_position  others that begin before it, as its caller was last told
    """

    request: GenerationRequest
    settings: PaintSettings
    seed: int
    warnings: tuple[str, ...]
    submitted_s: float
    submitted_tick: int = 0
    queue_position: int = 0
    tasks: list[ImageTask] = field(default_factory=list)
    num_painted: int = 0
    num_failed: int = 0
    first_failure: Failure | None = None

    def __post_init__(self) -> None:
        self.tasks = [ImageTask(self, index) for index in range(self.request.num_images)]

    @property
    def request_id(self) -> str:
        """The id the caller knows it by."""
        return self.request.request_id

    @property
    def client(self) -> str:
        """Whose request it is."""
        return self.request.client

    @property
    def has_started(self) -> bool:
        """Whether any of its images has left the waiting room."""
        return any(task.stage is not Stage.WAITING for task in self.tasks)

    @property
    def is_over(self) -> bool:
        """Whether all of its images are painted, failed or cancelled."""
        return all(task.stage is Stage.DONE for task in self.tasks)

    @property
    def deadline_at_s(self) -> float | None:
        """The clock reading at which the work is given up."""
        return None if self.request.deadline_s is None else self.submitted_s + self.request.deadline_s


@dataclass(slots=True)
class Clock:
    """Readings (seconds, monotonic) along an image's way; durations are differences of these."""

    prepare_s: float = 0.0
    denoise_started_s: float | None = None
    denoise_ended_s: float = 0.0
    decode_s: float = 0.0


@dataclass(eq=False, slots=True)
class ImageTask:
    """One image on its way. The scheduler moves ``stage``, ``row_index`` and ``lane``; ``canvas`` is the runners' own.

    row_index        next row of the step table
    num_evaluations  UNet rows run so far (two a step under guidance)
    """

    live: LiveRequest
    image_index: int
    stage: Stage = Stage.WAITING
    row_index: int = 0
    lane: int | None = None
    group: GroupKey | None = None
    canvas: Any = None
    num_evaluations: int = 0
    clock: Clock = field(default_factory=Clock)

    @property
    def settings(self) -> PaintSettings:
        """The request's resolved settings."""
        return self.live.settings

    @property
    def table(self) -> StepTable:
        """The compiled sampler."""
        return self.live.settings.table

    @property
    def seed(self) -> int:
        """Image i of a request is the picture that seed + i gives alone."""
        return self.live.seed + self.image_index

    @property
    def step_index(self) -> int:
        """Whole steps done; ``num_steps`` once the last row has run."""
        table = self.table
        return table.num_steps if self.row_index >= table.num_rows else int(table.step_of_row[self.row_index])

    @property
    def is_guided_now(self) -> bool:
        """Whether the next row also runs the unconditional row."""
        return bool(self.settings.guided[self.row_index])

    @property
    def rows_now(self) -> int:
        """UNet rows that the next tick of this image takes: 2 when guided, else 1."""
        return 2 if self.is_guided_now else 1

    @property
    def rows_left(self) -> int:
        """UNet rows up to the finished latent."""
        return int(self.settings.rows_left[self.row_index])

    @property
    def cost_now(self) -> float:
        """Work of the next tick of this image, in UNet rows of the native size."""
        return self.rows_now * self.settings.row_cost

    @property
    def cost_left(self) -> float:
        """Work up to the finished latent, in UNet rows of the native size."""
        return self.rows_left * self.settings.row_cost

    @property
    def is_last_row(self) -> bool:
        """Whether the next row finishes the latent."""
        return self.row_index + 1 == self.table.num_rows

    @property
    def ends_step(self) -> bool:
        """Whether the next row completes a step (a step of heun takes two rows)."""
        steps = self.table.step_of_row
        return self.is_last_row or steps[self.row_index + 1] != steps[self.row_index]
