"""Records of the image engine: live requests, their images, and the plan and outcome of a tick (no torch)."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffserve.api.sizes import step_cost
from diffserve.api.tiles import TileLayout
from diffserve.api.types import FILTERS, DenoisingRecipe, GenerationRequest, ImageResult, Picture, Priority
from diffserve.engine.image.prompt_steps import PromptSchedule, TextPair
from diffserve.engine.records import FailureReason, Live, Stage
from schedulers import StepTable

if TYPE_CHECKING:
    from diffserve.engine.image.capture_format import ImageCapture, PendingImage
    from diffserve.engine.image.state import ImageState
    from diffserve.runtime.upscaling.store import Enlargement

PAINT_FROM = 128
"""Smallest mask value that is repainted (diffusers binarizes at one half)."""


UNCOND: Final = -1
"""Part number of the unconditional row; conditional rows count from 0."""


class GroupKey(NamedTuple):
    """Key of rows that may share a UNet call: equal size, context length, and way of computing.

    The group of an image is never shallow or controlled; that of its next row may be (``ImageTask.group_now``).

    Attributes:
        height_px: Height of the image, or of its tiles.
        width_px: Width of the image, or of its tiles.
        num_tokens: Context tokens; those of one window where texts of different lengths share calls.
        is_shallow: Whether only the UNet's shallow part runs, on cached features (DeepCache).
        is_compiled: Whether compiled calls run all steps of the image; they round differently.
        lora_rank: Rank to which the adapters of each row are padded; 0 without adapters, ``WHOLE`` for changes without
            a low-rank form.
        is_controlled: Whether ControlNets add to every row.
        control: Digest of the ControlNet whose calls these are; empty for calls of the UNet.
        is_refined: Whether the refiner runs.
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
        """Height and width of the image in pixels, and the number of context tokens."""
        return self[:3]


class GenerationSettings(DenoisingRecipe, frozen=True, kw_only=True, eq=False, dict=True):
    """Resolved settings of a request, with the compiled sampler.

    Attributes:
        kind: "text", "image" or "inpaint"; an inpainting UNet always inpaints, without a mask the entire image.
        table: The compiled sampler.
        guided: Bool (num_rows,): whether table row i also runs the unconditional row.
        full: Bool (num_rows,): whether table row i runs the full UNet instead of its shallow part.
        row_cost: Work of a UNet row: its pixels (those of a tile) over those of the native size.
        shallow_share: Work of a shallow row over that of a full one.
        skipped_steps: First steps that the table omits because the image starts from latents of a similar prompt.
        shorter: Settings for each of ``caches.SKIPS``, for a request that may start from similar latents.
        lora_digest: Digest of the adapters and their scales; empty without adapters.
        control_digest: Digest of the ControlNets; empty without any.
        reference_digest: Digest of the IP-Adapters of the references; empty without any.
        sampler_digest: Digest of the file of a learned sampler; empty for a built-in one.
        upscaler_digest: Digest of the upscaler network between the passes of hires fix; empty for a filter.
        controlled: Indices of the active ControlNets for each table row; empty without any.
        referenced: Indices of the active references for each table row; empty without any.
        switch_row: First table row of the refiner; ``None`` without a refiner.
        prompts: Texts by step, for prompts with editing, alternation or AND; ``None`` for others.
        guidance_at: Guidance scale of each table row, for a prompt with AND, whose rows are all guided; empty for
            others.
        tiles: Tiles on which the UNet runs; ``None``: on the entire latent.
        second: Settings of the second pass of hires fix, for the first pass of an image that has one.
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
    reference_digest: bytes = b""
    sampler_digest: str = ""
    upscaler_digest: bytes = b""
    controlled: tuple[tuple[int, ...], ...] = ()
    referenced: tuple[tuple[int, ...], ...] = ()
    switch_row: int | None = None
    prompts: PromptSchedule | None = None
    guidance_at: tuple[float, ...] = ()
    tiles: TileLayout | None = None
    second: GenerationSettings | None = None

    @property
    def call_px(self) -> tuple[int, int]:
        """Width and height in pixels of what a UNet row evaluates: the image, or a tile of it."""
        return (self.width_px, self.height_px) if self.tiles is None else self.tiles.tile_px

    @property
    def num_views(self) -> int:
        """Tiles of the image, or 1."""
        return 1 if self.tiles is None else self.tiles.num_tiles

    @property
    def passes(self) -> tuple[GenerationSettings, ...]:
        """These settings, and those of the second pass if there is one."""
        return (self,) if self.second is None else (self, self.second)

    @cached_property
    def num_rows(self) -> int:
        """Rows of the step table."""
        return self.table.num_rows

    @cached_property
    def full_at(self) -> tuple[bool, ...]:
        """``full`` as a tuple, for fast access to single rows."""
        return tuple(self.full.tolist())

    @cached_property
    def parts_at(self) -> tuple[tuple[int, ...], ...]:
        """Parts of the conditioning that table row i evaluates: conditional ones from 0, and ``UNCOND`` if guided."""
        parts = (0,) if self.prompts is None else tuple(range(len(self.prompts.weights)))
        return tuple((*parts, UNCOND) if guided else parts for guided in self.guided.tolist())

    @cached_property
    def rows_at(self) -> tuple[int, ...]:
        """UNet rows of table row i: one for each part of the conditioning and each tile."""
        return tuple(len(parts) * self.num_views for parts in self.parts_at)

    @cached_property
    def cost_of_row(self) -> tuple[float, ...]:
        """Work of table row i, in UNet rows of the native size."""
        none_active = ((),) * len(self.full)
        controlled, referenced = self.controlled or none_active, self.referenced or none_active
        rows = zip(self.full.tolist(), self.rows_at, controlled, referenced, strict=True)
        return tuple(
            step_cost(
                1.0 if full else self.shallow_share,
                len(controls),
                num_references=len(references),
                num_rows=num_rows,
                row_cost=self.row_cost,
            )
            for full, num_rows, controls, references in rows
        )

    @cached_property
    def cost_left(self) -> tuple[float, ...]:
        """Remaining work from table row i on, in UNet rows of the native size; at the end that of later passes."""
        later = 0.0 if self.second is None else self.second.cost_left[0]
        return tuple(itertools.accumulate(reversed(self.cost_of_row), initial=later))[::-1]

    @cached_property
    def rows_left(self) -> tuple[int, ...]:
        """Remaining UNet rows from table row i on; the last entry, after the table, is 0."""
        return tuple(itertools.accumulate(reversed(self.rows_at), initial=0))[::-1]


@dataclass(eq=False, slots=True)
class LiveRequest(Live):
    """A request from its submission to its terminal event.

    Attributes:
        submitted_tick: The tick of submission, for ageing.
        solo_s: Estimated seconds that it takes alone, at submission.
        due_s: When it should be done, as a reading of the engine's clock.
        seconds_left: Forecast at submission; ``None`` if no pace was known.
        queue_position: Position in the queue that was last sent to the client, at ``position_sent_s``.
        lora_loading: Loading of its adapters, which holds them until the request is over.
        control_loading: Loading of its ControlNets and control images, likewise.
        reference_loading: Loading of its IP-Adapters and encoding of its reference images, likewise.
        line: Its queue: client and priority.
        candidates: Scored images of a best-of request.
        image_settings: Settings of each image, if their prompts differ; ``settings`` are those of the first.
        captured_s: When its images were last captured; at first when they began.
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
    lora_loading: Future[Any] | None = None
    control_loading: Future[Any] | None = None
    reference_loading: Future[Any] | None = None
    line: tuple[str, Priority] = field(init=False)
    tasks: list[ImageTask] = field(default_factory=list)
    num_painted: int = 0
    num_failed: int = 0
    first_failure: FailureReason | None = None
    candidates: list[ImageResult] = field(default_factory=list)
    image_settings: tuple[GenerationSettings, ...] = ()
    captured_s: float | None = None

    def __post_init__(self) -> None:
        self.line = self.request.client, self.request.priority
        self.tasks = [ImageTask(self, index) for index in range(self.request.num_painted)]

    @property
    def client(self) -> str:
        """The client that sent the request."""
        return self.request.client

    def wants_preview(self, num_steps: int) -> bool:
        """Return whether the request wants a preview after ``num_steps`` steps."""
        every = self.request.preview_every
        return every > 0 and num_steps % every == 0

    @property
    def has_started(self) -> bool:
        """Whether any image has left the waiting queue."""
        return any(task.stage is not Stage.WAITING for task in self.tasks)


@dataclass(slots=True)
class Clock:
    """Times of an image: readings of the engine's clock, and durations in seconds.

    Attributes:
        device_s: Its share of the ticks so far.
    """

    prepare_s: float = 0.0
    denoise_started_s: float | None = None
    denoise_ended_s: float = 0.0
    decode_s: float = 0.0
    device_s: float = 0.0


@dataclass(eq=False, slots=True)
class ImageTask:
    """One image of a request. The scheduler changes ``stage``, ``row_index`` and ``slot``; the runner owns ``state``.

    Attributes:
        settings: The request's settings, or shorter ones if the image starts from similar latents.
        similarity: Similarity of the prompt whose latents it starts from; ``None`` if it starts from noise.
        row_index: Next row of the step table.
        refined_group: Its group from ``settings.switch_row`` on.
        num_evaluations: UNet rows run so far (two per step under guidance).
        key: Key in the result cache, if this image is the leader of its key.
        leader: The equal image that it waits for, if it follows one.
        followers: Equal images that wait for this one.
        is_interrupted: Whether it ends with its next step, whose denoised estimate is decoded.
        first_pass: Image of the finished first pass of hires fix; ``None`` before.
        first_settings: Settings of that pass.
        resume_from: State that it continues from once it is prepared.
        capture_key: Digest that names the image in its captures, once it is computed.
        final_capture: Its final latents, if other images of its request are captured.
        enlargement: Tiles of that image, while an upscaler network enlarges it.
        enlarged: That image as an upscaler network has enlarged it.
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
    first_pass: Picture | None = None
    first_settings: GenerationSettings | None = None
    resume_from: ImageCapture | None = None
    capture_key: bytes | None = None
    final_capture: PendingImage | None = None
    enlargement: Enlargement | None = None
    enlarged: Picture | None = None

    def __post_init__(self) -> None:
        settings = self.live.image_settings
        self.settings = settings[self.image_index] if settings else self.live.settings

    def resume(self, capture: ImageCapture) -> None:
        """Set steps and settings of a waiting image to those of ``capture``, a state in which it was stored earlier."""
        if capture.skipped_steps:
            shorter = self.settings.shorter
            self.settings = next(each for each in shorter if each.skipped_steps == capture.skipped_steps)
        if capture.first_pass is not None:
            assert self.settings.second is not None
            self.first_pass, self.first_settings, self.settings = (
                capture.first_pass,
                self.settings,
                self.settings.second,
            )
        self.similarity, self.resume_from = capture.similarity, capture
        self.row_index, self.num_evaluations = capture.row_index, capture.num_evaluations

    def restart(self) -> None:
        """Go back to the first step, from which the image starts when it is prepared again."""
        if self.state is not None:
            self.loaded_state.close()
        self.state = self.group = self.refined_group = None
        self.first_pass = self.first_settings = self.similarity = self.resume_from = None
        self.enlargement = self.enlarged = None
        self.row_index = self.num_evaluations = 0
        self.__post_init__()

    @property
    def prompt(self) -> str:
        """The prompt of the image."""
        return self.live.request.prompt_of(self.image_index)

    @property
    def is_second(self) -> bool:
        """Whether the image is in the second pass of hires fix."""
        return self.first_pass is not None

    @property
    def awaits_upscaler(self) -> bool:
        """Whether an upscaler network has to enlarge the image of the first pass before the second can begin."""
        is_enlarged = self.first_pass is None or self.enlarged is not None or self.is_interrupted
        return not is_enlarged and self.live.settings.hires_upscaler not in FILTERS

    def begin_second(self, first_pass: Picture) -> None:
        """Go on to the second pass of hires fix, which starts from the image of the first."""
        assert self.settings.second is not None
        if self.state is not None:
            self.loaded_state.close()
        self.state = self.group = self.refined_group = None
        self.first_pass, self.first_settings = first_pass, self.settings
        self.settings, self.row_index = self.settings.second, 0
        self.stage = Stage.ENLARGING

    @property
    def loaded_state(self) -> ImageState:
        """The state of a prepared image."""
        assert self.state is not None
        return self.state

    def switch(self) -> GroupKey:
        """Hand the image over to the refiner and return its new group."""
        assert self.refined_group is not None
        self.loaded_state.switch()
        return self.refined_group

    @property
    def table(self) -> StepTable:
        """The compiled sampler."""
        return self.settings.table

    @property
    def seed(self) -> int:
        """Seed of the image: the request's seed plus the image index, or the same for all variations."""
        return self.live.seed + (self.image_index if self.settings.variation_seed is None else 0)

    @property
    def variation_seed(self) -> int | None:
        """Seed of the variation: the request's variation seed plus the image index; ``None`` without variation."""
        first = self.settings.variation_seed
        return None if first is None else first + self.image_index

    @property
    def step_index(self) -> int:
        """Completed steps; ``num_steps`` once the last row has run."""
        table = self.table
        return table.num_steps if self.row_index >= table.num_rows else int(table.step_of_row[self.row_index])

    @property
    def total_steps(self) -> int:
        """Steps of all passes."""
        return sum(each.table.num_steps for each in self.initial_settings.passes)

    @property
    def steps_done(self) -> int:
        """Completed steps of all passes."""
        return (self.initial_settings.table.num_steps if self.is_second else 0) + self.step_index

    @property
    def initial_settings(self) -> GenerationSettings:
        """Settings of the first pass, or of the only one."""
        return self.first_settings or self.settings

    @property
    def ticks_left(self) -> int:
        """Remaining rows of the step tables of all passes, at least 1."""
        return max(1, sum(each.num_rows for each in self.settings.passes) - self.row_index)

    @property
    def draws_now(self) -> bool:
        """Whether the next row adds fresh noise."""
        return bool(self.table.draws[self.row_index])

    @property
    def is_full_now(self) -> bool:
        """Whether the next row runs the full UNet."""
        return self.settings.full_at[self.row_index]

    @property
    def keeps_features(self) -> bool:
        """Whether the row after the next one is shallow and needs the features of the next one."""
        return not self.is_last_row and not self.settings.full_at[self.row_index + 1]

    @property
    def controls_now(self) -> tuple[int, ...]:
        """Indices of the ControlNets that add to the next row."""
        return self.settings.controlled[self.row_index] if self.settings.controlled else ()

    @property
    def references_now(self) -> tuple[int, ...]:
        """Indices of the references that the next row reads."""
        return self.settings.referenced[self.row_index] if self.settings.referenced else ()

    @property
    def group_now(self) -> GroupKey:
        """The group of its next rows."""
        assert self.group is not None
        if self.settings.full_at[self.row_index] and not self.settings.controlled:
            return self.group
        return self.group._replace(is_shallow=not self.is_full_now, is_controlled=bool(self.controls_now))

    @property
    def parts_now(self) -> tuple[int, ...]:
        """Parts of the conditioning that the next tick evaluates; see ``GenerationSettings.parts_at``."""
        return self.settings.parts_at[self.row_index]

    @property
    def composition(self) -> PromptSchedule | None:
        """The prompt, with the weights and areas of its parts; ``None`` for one without AND and MASK."""
        prompts = self.settings.prompts
        return prompts if prompts is not None and prompts.is_composed else None

    @property
    def guidance_now(self) -> float:
        """Guidance scale of the next row."""
        settings = self.settings
        return settings.guidance_at[self.row_index] if settings.guidance_at else settings.guidance_scale

    def text_of(self, part: int) -> int:
        """Return the index in ``texts`` of the text that ``part`` reads in the next row."""
        prompts = self.settings.prompts
        if prompts is None:
            return 0
        return prompts.uncond_at[self.row_index] if part == UNCOND else prompts.cond_at[self.row_index][part]

    @property
    def rows_now(self) -> int:
        """UNet rows of the next tick of this image, one for each part and tile."""
        return self.settings.rows_at[self.row_index]

    @property
    def cost_now(self) -> float:
        """Work of the next tick of this image, in UNet rows of the native size."""
        return self.settings.cost_of_row[self.row_index]

    @property
    def cost_left(self) -> float:
        """Remaining work, in UNet rows of the native size."""
        return self.settings.cost_left[self.row_index]

    @property
    def total_cost(self) -> float:
        """Work of the entire image, in UNet rows of the native size."""
        return self.initial_settings.cost_left[0]

    @property
    def is_last_row(self) -> bool:
        """Whether the next row finishes the latent."""
        return self.row_index + 1 == self.settings.num_rows or self.stops_early

    @property
    def stops_early(self) -> bool:
        """Whether the image is interrupted and ends with the next row, before its last step."""
        if not self.is_interrupted or self.row_index + 1 >= self.settings.num_rows:
            return False
        steps = self.table.step_of_row
        return bool(steps[self.row_index + 1] != steps[self.row_index])

    @property
    def ends_step(self) -> bool:
        """Whether the next row completes a step (a step of heun takes two rows)."""
        steps = self.table.step_of_row
        return self.is_last_row or steps[self.row_index + 1] != steps[self.row_index]


def texts_of(
    request: GenerationRequest, image_index: int, settings: GenerationSettings, *, is_second: bool = False
) -> tuple[TextPair, ...]:
    """Return all texts that an image reads in one pass: pairs of prompt and negative prompt.

    Args:
        request: The request of the image.
        image_index: Index of the image in the request.
        settings: The settings of the pass.
        is_second: Whether it is the second pass of hires fix.
    """
    if settings.prompts is not None:
        return settings.prompts.pairs
    negative = request.negative_of(is_second=is_second) if settings.guided.any() else None
    return ((request.prompt_of(image_index, is_second=is_second), negative),)


@dataclass(frozen=True)
class TickPlan:
    """The work of one tick.

    Attributes:
        prepare: Newcomers with a new slot, and images that begin their second pass: encode their prompt and init image,
            and draw the start latent.
        group: The group of ``rows``.
        rows: Images that advance by one table row; the UNet rows of an image are never split.
        num_rows: UNet rows of ``rows``, before padding.
        cost: Work of ``rows``, in UNet rows of the native size.
        previews: Images of ``rows`` whose denoised estimate is decoded.
        decode: Images to decode after the rows have run, including those that ``rows`` finishes.
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
        """All images of the tick, without duplicates."""
        return tuple(dict.fromkeys((*self.prepare, *self.rows, *self.decode)))


class RowLabel(NamedTuple):
    """The image and the step of a row; ``part`` is "cond", "uncond", or "cond 2" for the second part of a prompt."""

    request_id: str
    image_index: int
    step_index: int
    part: str


@dataclass(frozen=True)
class UNetCall:
    """One call of the UNet, or of the ControlNet named ``control``, as it ran.

    On an asynchronous device ``wall_s`` is only the time to launch the call; the tick's ``wall_s`` includes the work.
    """

    rows: tuple[RowLabel, ...]
    num_padded: int
    wall_s: float
    is_shallow: bool = False
    control: str = ""


@dataclass(frozen=True)
class TickTrace:
    """Record of tick number ``tick``, for tests and inspection."""

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
        """UNet rows, without padding."""
        return sum(len(call.rows) for call in self.calls if not call.control)


class StepPreview(NamedTuple):
    """A preview (height_px, width_px, 3) uint8 of an image after ``num_steps`` steps."""

    num_steps: int
    pixels: NDArray[np.uint8]


@dataclass
class TickOutcome:
    """Results of a tick; filled by the runner and read by ``RequestScheduler.apply``.

    Attributes:
        postponed: Newcomers that lack pages; they keep their position in the queue.
        pictures: Decoded images, (height_px, width_px, 3) uint8.
        previews: Previews of this step or an earlier one, as the device delivers them.
        latents: (C, h, w) float32, for requests that want them.
        upscale_s: Seconds that an upscaler network took for a tile of an image between its two passes.
        task_of_row: Images of ``calls`` by request id and index at the start of the calls; another image may take one
            over meanwhile.
    """

    groups: dict[ImageTask, GroupKey] = field(default_factory=dict)
    failures: dict[ImageTask, FailureReason] = field(default_factory=dict)
    postponed: list[ImageTask] = field(default_factory=list)
    previews: dict[ImageTask, StepPreview] = field(default_factory=dict)
    pictures: dict[ImageTask, NDArray[np.uint8]] = field(default_factory=dict)
    latents: dict[ImageTask, NDArray[np.float32]] = field(default_factory=dict)
    prepare_s: dict[ImageTask, float] = field(default_factory=dict)
    upscale_s: dict[ImageTask, float] = field(default_factory=dict)
    decode_s: dict[ImageTask, float] = field(default_factory=dict)
    rows_started_s: float = 0.0
    rows_ended_s: float = 0.0
    calls: list[UNetCall] = field(default_factory=list)
    task_of_row: dict[tuple[str, int], ImageTask] = field(default_factory=dict)


def row_seconds(plan: TickPlan, outcome: TickOutcome) -> dict[ImageTask, float]:
    """Return the seconds of each image that advances: each row counts an equal part of its call."""
    seconds = dict.fromkeys(plan.rows, 0.0)
    for call in outcome.calls:
        for row in call.rows:
            seconds[outcome.task_of_row[row.request_id, row.image_index]] += call.wall_s / len(call.rows)
    return seconds
