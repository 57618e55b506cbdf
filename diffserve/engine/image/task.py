"""The mutable records of the engine: a live request and its images on their way through the stages. No torch."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffserve.api.types import DenoisingRecipe, GenerationRequest, ImageResult, Priority
from diffserve.engine.records import FailureReason, Live, Stage
from diffserve.models.controlnets import WORK_SHARE
from schedulers import StepTable

if TYPE_CHECKING:
    from diffserve.engine.image.state import ImageState

PAINT_FROM = 128
"""Mask values from here up are repainted (diffusers binarises at one half)."""


class GroupKey(NamedTuple):
    """Rows that may share a UNet call: equal picture size, equal number of context tokens, the same way of computing.

    Where texts of different lengths share calls, ``num_tokens`` is that of one window for all of them. ``is_shallow``:
    only the UNet's shallow part runs, on kept features (DeepCache); an image's own group is never such.
    ``is_compiled``: a picture is painted by compiled calls from its first step to its last, or by none, for they round
    differently. ``lora_rank``: that the adapters of each row are padded to; 0: no row has any; ``WHOLE``: each row has
    a change without a low-rank form. ``is_refined``: by the refiner.
    ``is_controlled``: ControlNets add to every row; an image's own group is never such. ``control``: not calls of the
    UNet, but of the ControlNet of this digest.
    """

    height_px: int
    width_px: int
    num_tokens: int
    is_shallow: bool = False
    is_compiled: bool = False
    lora_rank: int = 0
    is_controlled: bool = False
    control: str = ""
    is_refined: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height and width of the picture in pixels, tokens of the text."""
        return self[:3]


class GenerationSettings(DenoisingRecipe, frozen=True, kw_only=True, eq=False, dict=True):
    """A request's recipe and its sampler, compiled.

    guided   bool (num_rows,): whether table row i also runs the unconditional row
    full     bool (num_rows,): whether table row i runs the whole UNet, not its shallow part on kept features
    kind     "text" | "image" | "inpaint"; an inpainting UNet always inpaints, at need everything on a grey picture
    row_cost work of a UNet row: its pixels over those of the model's native size
    skipped_steps  the first steps, which the table leaves out: it begins from latents of a similar prompt
    shorter  the same for each of ``latent_cache.SKIPS``, for a request that may begin so
    shallow_share  work of a shallow row over that of a full one
    lora_digest  of which adapters they are, and how much of each; empty where there are none
    control_digest  the same of ControlNets
    controlled   for each table row the places of the ControlNets that are at work; empty where there never are any
    switch_row   the first table row that the refiner's UNet evaluates, ``None`` where it evaluates none
    """

    width_px: int
    height_px: int
    kind: str
    table: StepTable
    guided: NDArray[np.bool_]
    full: NDArray[np.bool_]
    row_cost: float = 1.0
    shallow_share: float = 1.0
    skipped_steps: int = 0
    shorter: tuple[GenerationSettings, ...] = ()
    lora_digest: bytes = b""
    control_digest: bytes = b""
    controlled: tuple[tuple[int, ...], ...] = ()
    switch_row: int | None = None

    @cached_property
    def num_rows(self) -> int:
        """Of the table."""
        return self.table.num_rows

    @cached_property
    def full_at(self) -> tuple[bool, ...]:
        """``full``, for who asks of one row after the other."""
        return tuple(self.full.tolist())

    @cached_property
    def rows_at(self) -> tuple[int, ...]:
        """UNet rows of table row i: 2 where it is guided, else 1."""
        return tuple(1 + int(guided) for guided in self.guided)

    @cached_property
    def cost_of_row(self) -> tuple[float, ...]:
        """Work of table row i, in UNet rows of the native size: two rows where it is guided."""
        controlled = self.controlled or ((),) * len(self.full)
        rows = zip(self.full.tolist(), self.guided.tolist(), controlled, strict=True)
        return tuple(
            ((1.0 if full else self.shallow_share) + WORK_SHARE * len(controls)) * (1 + guided) * self.row_cost
            for full, guided, controls in rows
        )

    @cached_property
    def cost_left(self) -> tuple[float, ...]:
        """Work still to do before table row i, in the same unit; the last entry, behind the table, is 0."""
        return tuple(itertools.accumulate(reversed(self.cost_of_row), initial=0.0))[::-1]

    @cached_property
    def rows_left(self) -> tuple[int, ...]:
        """UNet rows still to run before table row i; the last entry, behind the table, is 0."""
        return tuple(itertools.accumulate(reversed(self.rows_at), initial=0))[::-1]


@dataclass(eq=False, slots=True)
class LiveRequest(Live):
    """A request from submit to its terminal event. ``submitted_tick`` is its place in the order of ageing.

    solo_s          seconds that it would take alone, as was thought when it came
    due_s           when it should be done, a reading of the engine's clock
    seconds_left    until all of it is done, as was thought when it came; ``None`` where that was not known
    line            where it queues: a client has one for each priority
    queue_position  others that begin before it, as its caller was last told, at ``position_sent_s``
    candidates      finished pictures with their scores, of a best-of
    reading         its adapters on their way from the disk, where it has some; it holds them until it is over
    mapping         its ControlNets on theirs, and its control maps; the same
    """

    request: GenerationRequest
    settings: GenerationSettings
    seed: int
    warnings: tuple[str, ...]
    submitted_s: float
    submitted_tick: int = 0
    solo_s: float = 0.0
    due_s: float = math.inf
    seconds_left: float | None = None
    queue_position: int = 0
    position_sent_s: float = -math.inf
    reading: Future[Any] | None = None
    mapping: Future[Any] | None = None
    line: tuple[str, Priority] = field(init=False)
    tasks: list[ImageTask] = field(default_factory=list)
    num_painted: int = 0
    num_failed: int = 0
    first_failure: FailureReason | None = None
    candidates: list[ImageResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.line = self.request.client, self.request.priority
        self.tasks = [ImageTask(self, index) for index in range(self.request.num_painted)]

    @property
    def client(self) -> str:
        """Whose request it is."""
        return self.request.client

    def wants_preview(self, num_steps: int) -> bool:
        """Whether a preview was asked for after ``num_steps`` steps."""
        every = self.request.preview_every
        return every > 0 and num_steps % every == 0

    @property
    def has_started(self) -> bool:
        """Whether any of its images has left the waiting room."""
        return any(task.stage is not Stage.WAITING for task in self.tasks)


@dataclass(slots=True)
class Clock:
    """Readings (seconds, monotonic) along an image's way; durations are differences of these.

    device_s  its share of the ticks so far
    """

    prepare_s: float = 0.0
    denoise_started_s: float | None = None
    denoise_ended_s: float = 0.0
    decode_s: float = 0.0
    device_s: float = 0.0


@dataclass(eq=False, slots=True)
class ImageTask:
    """One image on its way. The scheduler moves ``stage``, ``row_index`` and ``slot``; ``state`` is the runner's own.

    row_index        next row of the step table
    num_evaluations  UNet rows run so far (two a step under guidance)
    settings         the request's resolved settings; once it began from a similar picture, the shorter ones of that
    similarity       of the prompt that it began from, ``None`` where it begins from noise
    refined_group    its group from ``settings.switch_row`` on
    key              of its picture in the result cache, where it has one and paints it
    leader           who paints the same picture, and is waited for; it has this one among its ``followers``
    is_interrupted   whether it ends with its next step, and the denoised estimate of that is decoded
    """

    live: LiveRequest
    image_index: int
    settings: GenerationSettings = field(init=False)
    similarity: float | None = None
    stage: Stage = Stage.WAITING
    row_index: int = 0
    slot: int | None = None
    group: GroupKey | None = None
    refined_group: GroupKey | None = None
    state: ImageState | None = None
    num_evaluations: int = 0
    clock: Clock = field(default_factory=Clock)
    key: bytes | None = None
    leader: ImageTask | None = None
    followers: list[ImageTask] = field(default_factory=list)
    is_interrupted: bool = False

    def __post_init__(self) -> None:
        self.settings = self.live.settings

    @property
    def loaded_state(self) -> ImageState:
        """Its state, while it has one."""
        assert self.state is not None
        return self.state

    def switch(self) -> GroupKey:
        """The refiner's UNet goes on with it, in the group that is returned."""
        assert self.refined_group is not None
        self.loaded_state.switch()
        return self.refined_group

    @property
    def table(self) -> StepTable:
        """The compiled sampler."""
        return self.settings.table

    @property
    def seed(self) -> int:
        """Image i of a request is the picture that seed + i gives alone; of varied ones each has the same."""
        return self.live.seed + (self.image_index if self.settings.variation_seed is None else 0)

    @property
    def variation_seed(self) -> int | None:
        """Towards whose noise it is varied, where it is: image i of a request has the first one + i."""
        first = self.settings.variation_seed
        return None if first is None else first + self.image_index

    @property
    def step_index(self) -> int:
        """Whole steps done; ``num_steps`` once the last row has run."""
        table = self.table
        return table.num_steps if self.row_index >= table.num_rows else int(table.step_of_row[self.row_index])

    @property
    def is_guided_now(self) -> bool:
        """Whether the next row also runs the unconditional row."""
        return self.rows_now == 2

    @property
    def draws_now(self) -> bool:
        """Whether the next row adds fresh noise."""
        return bool(self.table.draws[self.row_index])

    @property
    def is_full_now(self) -> bool:
        """Whether the next row runs the whole UNet."""
        return self.settings.full_at[self.row_index]

    @property
    def keeps_features(self) -> bool:
        """Whether the row after the next one is a shallow one, which needs what the next one leaves."""
        return not self.is_last_row and not self.settings.full_at[self.row_index + 1]

    @property
    def controls_now(self) -> tuple[int, ...]:
        """The places of the ControlNets that add to the next row."""
        return self.settings.controlled[self.row_index] if self.settings.controlled else ()

    @property
    def group_now(self) -> GroupKey:
        """The group whose calls its next rows can join."""
        assert self.group is not None
        if self.settings.full_at[self.row_index] and not self.settings.controlled:
            return self.group
        return self.group._replace(is_shallow=not self.is_full_now, is_controlled=bool(self.controls_now))

    @property
    def rows_now(self) -> int:
        """UNet rows that the next tick of this image takes: 2 when guided, else 1."""
        return self.settings.rows_at[self.row_index]

    @property
    def cost_now(self) -> float:
        """Work of the next tick of this image, in UNet rows of the native size."""
        return self.settings.cost_of_row[self.row_index]

    @property
    def cost_left(self) -> float:
        """Work up to the finished latent, in UNet rows of the native size."""
        return self.settings.cost_left[self.row_index]

    @property
    def total_cost(self) -> float:
        """Work of the whole image, in UNet rows of the native size."""
        return self.settings.cost_left[0]

    @property
    def is_last_row(self) -> bool:
        """Whether the next row finishes the latent."""
        return self.row_index + 1 == self.settings.num_rows or self.stops_early

    @property
    def stops_early(self) -> bool:
        """Whether the image is interrupted, and the next row ends its step without finishing the latent."""
        if not self.is_interrupted or self.row_index + 1 >= self.settings.num_rows:
            return False
        steps = self.table.step_of_row
        return bool(steps[self.row_index + 1] != steps[self.row_index])

    @property
    def ends_step(self) -> bool:
        """Whether the next row completes a step (a step of heun takes two rows)."""
        steps = self.table.step_of_row
        return self.is_last_row or steps[self.row_index + 1] != steps[self.row_index]


@dataclass(frozen=True)
class TickPlan:
    """The work of one tick.

    prepare   newcomers with a fresh slot: encode their text and init image, draw the start latent
    rows      images of one ``group`` that advance by one table row, whole or shallow; a guided image takes two UNet
              rows, never split
    num_rows  UNet rows these take, before padding
    cost      their work, in UNet rows of the native size
    previews  those of ``rows`` whose denoised estimate is to be shown
    decode    latents to turn into pictures after the rows have run (some of ``rows`` finish in this very tick)
    """

    prepare: tuple[ImageTask, ...]
    group: GroupKey | None
    rows: tuple[ImageTask, ...]
    num_rows: int
    cost: float
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
    """One UNet call as it ran: the rows that mattered, how many padded it, its wall time, and whether it was shallow;
    or a call of the ControlNet named ``control``.

    On a device that works asynchronously ``wall_s`` is the time to launch; the tick's ``wall_s`` is the whole truth.
    """

    rows: tuple[RowLabel, ...]
    num_padded: int
    wall_s: float
    is_shallow: bool = False
    control: str = ""


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
        return tuple(row.request_id for call in self.calls if not call.control for row in call.rows)

    @property
    def num_rows(self) -> int:
        """UNet rows that mattered."""
        return sum(len(call.rows) for call in self.calls if not call.control)


class ShownPreview(NamedTuple):
    """A preview (height_px, width_px, 3) uint8 of an image as it was after ``num_steps``."""

    num_steps: int
    pixels: NDArray[np.uint8]


@dataclass
class TickOutcome:
    """What the runners report back; filled during the run, read by ``RequestScheduler.apply``.

    postponed            newcomers that have to wait for pages; they keep their place in the waiting room
    pictures             (height_px, width_px, 3) uint8
    previews             of this step or an earlier one, as they come from the device
    latents              (C, h, w) float32, for requests that asked for them
    named                by request and index, the images of ``calls`` when these began: another may take one over
    """

    groups: dict[ImageTask, GroupKey] = field(default_factory=dict)
    failures: dict[ImageTask, FailureReason] = field(default_factory=dict)
    postponed: list[ImageTask] = field(default_factory=list)
    previews: dict[ImageTask, ShownPreview] = field(default_factory=dict)
    pictures: dict[ImageTask, NDArray[np.uint8]] = field(default_factory=dict)
    latents: dict[ImageTask, NDArray[np.float32]] = field(default_factory=dict)
    prepare_s: dict[ImageTask, float] = field(default_factory=dict)
    decode_s: dict[ImageTask, float] = field(default_factory=dict)
    rows_started_s: float = 0.0
    rows_ended_s: float = 0.0
    calls: list[UNetCall] = field(default_factory=list)
    named: dict[tuple[str, int], ImageTask] = field(default_factory=dict)


def row_seconds(plan: TickPlan, outcome: TickOutcome) -> dict[ImageTask, float]:
    """Of each image of ``plan`` that advances, the seconds that its rows took: of each call an equal part for each."""
    seconds = dict.fromkeys(plan.rows, 0.0)
    for call in outcome.calls:
        for row in call.rows:
            seconds[outcome.named[row.request_id, row.image_index]] += call.wall_s / len(call.rows)
    return seconds
