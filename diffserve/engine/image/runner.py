"""One tick's work on the tensors: newcomers are prepared, the mixed batch advances, pictures are decoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from diffserve.config import EngineConfig
from diffserve.engine.engine import failure_of
from diffserve.engine.image.batch import ImageBatch, LanePool
from diffserve.engine.image.buckets import RowCaps
from diffserve.engine.image.decoder import PictureDecoder
from diffserve.engine.image.latent_cache import LatentCache
from diffserve.engine.image.preparer import Preparer
from diffserve.engine.image.room import Room
from diffserve.engine.image.shape_groups import Groups, is_deterministic, most_rows
from diffserve.engine.image.state import Health
from diffserve.engine.image.task import GroupKey, ImageTask, TickOutcome, TickPlan
from diffserve.engine.image.unet_calls import UNetCaller
from diffserve.engine.records import FailureReason
from diffserve.runtime import DiffusionModel
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.kv import PagePool, PoolBusy
from diffserve.runtime.memory import without_frames
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.threads import make_threads
from diffserve.runtime.transfer import fetch, send
from schedulers.update import advance, guide, renoise

SHAPES_KEPT = 8
LEAST_ROWS = 2
"""A guided image needs two rows in one tick, in one call or in two."""

logger = logging.getLogger(__name__)


class ImageRunner:
    """Runs plans. Whatever fails is reported for the image it belongs to; nothing is raised for one image's sake.

    pages: a page pool that others use too; where there is none, one is made if ``config`` asks for it
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        clock: Callable[[], float],
        pages: PagePool | None = None,
    ) -> None:
        self.model = model
        self.clock = clock
        self.pool = LanePool(model.device)
        self._num_lanes = config.max_lanes
        self.conditioner = make_conditioner(model, config, is_exact=is_deterministic(model, config), pool=pages)
        self.room = Room(model, config, most_rows(model, config), clock)
        self.groups = Groups(model, config, self.conditioner, self.room, make_threads(config, model.device), clock)
        self.caps = RowCaps(clock, self.room.rows)
        self.caller = UNetCaller(model, self.conditioner, self.groups, self.caps, clock)
        self.kept = LatentCache(config.latent_cache_bytes)
        self._preparer = Preparer(model, self.conditioner, self.pool, self.kept)
        self._decoder = PictureDecoder(
            model,
            self.pool,
            clock,
            self.caller,
            self.room,
            self.kept,
            is_alone=self.groups.is_deterministic or self.groups.on_cpu,  # where a call of several saves nothing
            tile_px=config.decode_tile_px,
        )

    def row_cap(self, group: GroupKey) -> int:
        """Rows that a tick of ``group`` may hold."""
        return min(self.groups.row_cap(group), max(LEAST_ROWS, self.caps.cap(group)))

    def check_room(self, width_px: int, height_px: int, is_encoded: bool) -> None:
        """InvalidRequest for a picture that the memory can never hold; ``is_encoded``: it begins with a picture."""
        least_rows = self.groups.least_rows(width_px, height_px)
        self.room.check(width_px, height_px, least_rows, is_encoded=is_encoded)

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        """Seconds that ``num_rows`` rows of ``group`` take; an estimate where the group was never seen."""
        return self.groups.call_s(group, num_rows)

    @torch.inference_mode()
    def study(self, group: GroupKey | None = None) -> bool:
        """Make one call for what is still to be measured; False where there is nothing."""
        return self.groups.study(group) or (group is None and self._study_texts())

    def _study_texts(self) -> bool:
        try:
            return self.conditioner.study()
        except Exception as error:
            raise_if_sticky(error)
            logger.warning("texts are encoded one by one: %s", type(error).__name__, exc_info=error)
            return False

    def trim(self, in_flight: Iterable[ImageTask]) -> None:
        """Drop what was stacked for images that have left, and shapes nobody paints beyond ``SHAPES_KEPT``."""
        self.caller.trim()
        self._decoder.trim()
        if self.pool.num_shapes > SHAPES_KEPT:
            self.pool.keep_only(task.held.shape for task in in_flight if task.state is not None)

    def check_integrity(self, in_flight: Iterable[ImageTask]) -> None:
        """Raises when a page is lost, or held for other images than those ``in_flight``."""
        self.conditioner.check_integrity(sum(task.state is not None for task in in_flight))

    @torch.inference_mode()
    def group_of_short_prompts(self, width_px: int, height_px: int) -> GroupKey:
        """Where most images of this size are painted."""
        conditioning = self.conditioner.condition("a", "", width_px=width_px, height_px=height_px)
        num_tokens = conditioning.num_tokens
        conditioning.close()
        return GroupKey(height_px, width_px, num_tokens)

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Know the group of short prompts at the first of ``sizes`` (width, height), and want to know the others'.

        Encodes a text and decodes a latent once, has room for all lanes of that size, and finds out on how many threads
        to begin.
        """
        self.room.know()
        while self._study_texts():
            pass
        native, *others = (self.group_of_short_prompts(*size) for size in sizes)
        self.groups.learn(native)
        self.groups.choose_threads(self.groups.best(native))
        for group in others:
            self.groups.known(group)  # else it is measured when there is time
        info = self.model.info
        cells = (native.height_px // info.vae_factor, native.width_px // info.vae_factor)
        self.pool.reserve((info.latent_channels, *cells), self._num_lanes)
        self._decoder.try_once(torch.zeros((info.latent_channels, *cells)))

    @torch.inference_mode()
    def run(self, plan: TickPlan) -> TickOutcome:
        """Do what ``plan`` says."""
        outcome = TickOutcome()
        started_s = self.clock()
        with self._preparer.together(plan.prepare):
            together_s = self.clock() - started_s
            for task in plan.prepare:
                self._prepare(task, outcome, together_s)
        if plan.rows:
            self._advance(plan, outcome)
        done = [task for task in plan.decode if task not in outcome.failures]
        self._decoder.decode(done, outcome, may_wait=not (plan.rows or plan.prepare))
        return outcome

    def _prepare(self, task: ImageTask, outcome: TickOutcome, together_s: float) -> None:
        """Prepare a newcomer, ``together_s`` having gone into all of them. Once one has to wait for pages, those behind
        it wait too: nobody overtakes by size."""
        if outcome.postponed:
            outcome.postponed.append(task)
            return
        started_s = self.clock()
        try:
            group = self.caller.with_room(lambda: self._preparer.prepare(task))
            if task.settings.full.all() and not group.merged_share:  # both are the network's own calls
                group = self.groups.best(group)
            outcome.prepare_s[task] = together_s + self.clock() - started_s
            self.groups.known(group)  # else it is measured when there is time
            outcome.groups[task] = group
        except PoolBusy:
            outcome.postponed.append(task)
        except Exception as error:
            outcome.failures[task] = failure_of(error, "painting this image")

    def _advance(self, plan: TickPlan, outcome: TickOutcome) -> None:
        """Advance all rows of ``plan`` together, the shallow ones after the others; where there is no memory for that,
        in halves."""
        outcome.rows_started_s = self.clock()
        parts = (tuple(task for task in plan.rows if task.is_full_now is is_full) for is_full in (True, False))
        pending = [tasks for tasks in parts if tasks]
        has_eased = False
        while pending:
            tasks = pending.pop(0)
            try:
                self._advance_together(tasks, plan, outcome)
            except torch.OutOfMemoryError as error:
                without_frames(error)
                if not has_eased:
                    has_eased = True
                    self.caller.ease()
                    pending.insert(0, tasks)
                elif len(tasks) > 1:
                    middle = len(tasks) // 2
                    pending[:0] = [tasks[:middle], tasks[middle:]]
                else:
                    outcome.failures[tasks[0]] = failure_of(error, "painting this image")
        outcome.rows_ended_s = self.clock()

    def _advance_together(self, tasks: Sequence[ImageTask], plan: TickPlan, outcome: TickOutcome) -> None:
        """One step of ``tasks``, all full or all shallow: of everyone, or, where memory runs out, of none, their draws
        taken back."""
        group = tasks[0].group_now
        batch = ImageBatch.gather(tasks, self.pool)
        draws = [(task.held, task.held.mark()) for task in tasks if task.draws_now]
        try:
            if not group.is_shallow:
                for task in tasks:
                    task.held.features.clear()
            output, errors = self.caller.predict(batch, group, outcome.calls)
            guided = guided_output(batch, output)
            x_next, denoised, history = advance(batch.x, guided, batch.history, batch.noise, batch.rows)
            for index, task in enumerate(tasks):
                if task.held.repaint is not None:
                    x_next[index] = keep_outside(task, x_next[index], batch.rows[index])
            finite = fetch(torch.isfinite(x_next).flatten(1).all(dim=1))
            self.pool.scatter(batch.lanes, x_next, history)
        except torch.OutOfMemoryError:
            for state, mark in draws:
                state.go_back(mark)
            self.pool.scatter(batch.lanes, batch.x, batch.history)
            raise
        for row, error in errors.items():
            outcome.failures.setdefault(tasks[batch.image_of_row[row]], failure_of(error, "painting this image"))
        for index, task in enumerate(tasks):
            latest = Health(finite, index, task.step_index)
            known = latest if finite.is_here else task.held.health
            task.held.health = latest
            if known is not None and not known.is_finite:
                outcome.failures.setdefault(task, not_finite(task, known.step_index))
        self._preview([task for task in tasks if task not in outcome.failures], tasks, denoised, plan, outcome)

    def _preview(
        self,
        living: Sequence[ImageTask],
        tasks: Sequence[ImageTask],
        denoised: Tensor,
        plan: TickPlan,
        outcome: TickOutcome,
    ) -> None:
        """Previews of those of ``denoised`` (len(tasks), C, h, w) who want one and live, in one call; where it fails,
        the images go on unseen."""
        try:
            shown = [task for task in living if task in plan.previews and not self._decoder.is_showing(task)]
            if shown:
                places = send(torch.tensor([tasks.index(task) for task in shown]), denoised.device)
                self._decoder.show(shown, denoised.index_select(0, places))
            self._decoder.tell_previews(living, outcome)
        except Exception as error:
            raise_if_sticky(error)
            logger.warning("no previews in this tick: they raised %s", type(error).__name__, exc_info=error)


def guided_output(batch: ImageBatch, output: Tensor) -> Tensor:
    """(B, C, h, w) from the rows' outputs (num_rows, C, h, w); an image without an unconditional row keeps its own."""
    cond = output[: len(batch.tasks)]
    if not batch.guided:
        return cond
    uncond = cond.clone()
    uncond.index_copy_(0, batch.owners[len(batch.tasks) :], output[len(batch.tasks) :])
    return guide(uncond, cond, batch.guidance)


def keep_outside(task: ImageTask, x: Tensor, row: Tensor) -> Tensor:
    """(C, h, w): outside the mask the init image at the noise level this row leaves; clean after the last row."""
    repaint = task.held.repaint
    assert repaint is not None
    if task.is_last_row:
        known = repaint.latents / task.table.out_scale
    else:
        known = renoise(repaint.latents[None], repaint.noise[None], row[None])[0]
    blended: Tensor = (1.0 - repaint.mask) * known + repaint.mask * x
    return blended


def not_finite(task: ImageTask, step_index: int) -> FailureReason:
    """The network gave infinities or NaN for this image in the step ``step_index`` (0-based)."""
    return FailureReason(
        "numerical_error",
        f"the latents are not finite after step {step_index + 1} of {task.table.num_steps}; "
        "try another seed, a lower guidance_scale or a wider dtype.",
    )
