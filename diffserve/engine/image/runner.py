"""ImageRunner: runs the plan of a tick on the tensors: prepares newcomers, advances the batch, decodes images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from diffserve.disk_cache import DiskCache
from diffserve.engine.base_engine import failure_of
from diffserve.engine.image.batch import ImageBatch, LatentPool, UNetRows
from diffserve.engine.image.buckets import RowCaps
from diffserve.engine.image.caches import LatentCache
from diffserve.engine.image.capture_format import CaptureError
from diffserve.engine.image.captures import Captures, log_refusal
from diffserve.engine.image.compiled_groups import is_deterministic
from diffserve.engine.image.decoder import ImageDecoder, LatentReader
from diffserve.engine.image.preparer import Preparer
from diffserve.engine.image.room import Room
from diffserve.engine.image.shape_groups import Groups, most_rows
from diffserve.engine.image.state import Health
from diffserve.engine.image.task import GroupKey, ImageTask, TickOutcome, TickPlan
from diffserve.engine.image.unet_calls import UNetCaller
from diffserve.engine.records import FailureReason
from diffserve.runtime import DiffusionModel
from diffserve.runtime.controlnet_store import ControlNetStore
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.kv import PagePool, PoolBusy
from diffserve.runtime.lora_store import LoRAStore
from diffserve.runtime.memory import without_frames
from diffserve.runtime.reference_store import ReferenceStore
from diffserve.runtime.text.conditioning import Conditioner, make_conditioner, make_pool, uses_pages
from diffserve.runtime.threads import Threads, make_threads
from diffserve.runtime.transfer import Fetched, fetch, send
from diffserve.runtime.unet.memory_format import set_memory_format
from diffserve.runtime.upscaling.store import UpscalerStore
from diffserve.runtime.vae.compiled import DecoderPackages
from diffserve.settings.config import EngineConfig
from schedulers.update import advance, guide, renoise, rescale_guided

SHAPES_KEPT = 8
LEAST_ROWS = 2
"""A guided image needs two rows in one tick, in one call or two."""

logger = logging.getLogger(__name__)


class Expert(NamedTuple):
    """A UNet (the base or the refiner) and the objects that make its calls."""

    conditioner: Conditioner
    room: Room
    groups: Groups
    caps: RowCaps
    caller: UNetCaller

    @classmethod
    def make(
        cls,
        model: DiffusionModel,
        config: EngineConfig,
        clock: Callable[[], float],
        pages: PagePool | None,
        threads: Threads,
        refiner: Expert | None = None,
        planned_bytes: int = 0,
    ) -> Expert:
        """Build the expert of ``model``; ``refiner`` is the refiner's, and ``planned_bytes`` is as in ``Room``."""
        conditioner = make_conditioner(model, config, is_exact=is_deterministic(model, config), pool=pages)
        room = Room(model, config, most_rows(model, config), clock, planned_bytes)
        groups = Groups(model, config, conditioner, room, threads, clock)
        caps = RowCaps(clock, room.rows)
        refiner_caller = None if refiner is None else refiner.caller
        return cls(conditioner, room, groups, caps, UNetCaller(model, conditioner, groups, caps, clock, refiner_caller))


class ImageRunner:
    """Runs plans and reports failures for the images they belong to, without raising for a single image.

    Args:
        model: The loaded model.
        config: The configuration.
        clock: In seconds.
        pages: A shared page pool; without one, a pool is made if ``config`` asks for it.
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        clock: Callable[[], float],
        pages: PagePool | None = None,
    ) -> None:
        threads = make_threads(config, model.device)  # later measurements hold for this number
        for each in (model, *filter(None, [model.refiner])):
            _store_weights(each, config)
        self.model = model
        self.clock = clock
        self.pool = LatentPool(model.device)
        self.captures = Captures(self.pool, model.info)
        self._num_slots = config.max_lanes
        self.controlnets = ControlNetStore(model, config.controlnet_bytes)
        self.refiner: Expert | None = None
        if model.refiner is not None:
            if pages is None and all(uses_pages(each, config) for each in (model, model.refiner)):
                pages = make_pool(model, config, is_exact=is_deterministic(model, config))
            its_config = replace(config, compile="off", cuda_graphs=False)
            self.refiner = Expert.make(model.refiner, its_config, clock, pages, Threads(threads.counts))
        self.references = ReferenceStore(model, config.reference_bytes, is_paged=uses_pages(model, config))
        planned_bytes = self.controlnets.planned_bytes + self.references.planned_bytes
        base = Expert.make(model, config, clock, pages, threads, self.refiner, planned_bytes)
        self.conditioner, self.room, self.groups, self.caps, self.caller = base
        self.groups.control = self.controlnets.of_digest
        if self.refiner is not None:
            self.refiner.room.recorded_bytes = self.room.recorded_bytes
        self._experts = (base,) if self.refiner is None else (base, self.refiner)
        self.latent_cache = LatentCache(config.latent_cache_bytes)
        self.loras = LoRAStore(model, config.lora_bytes)
        self.upscalers = UpscalerStore(model.info)
        refiner = None if self.refiner is None else self.refiner.conditioner
        self._preparer = Preparer(
            model,
            self.conditioner,
            self.pool,
            self.latent_cache,
            self.loras,
            self.controlnets,
            self.references,
            self.upscalers,
            refiner,
            self.room.encode_share,
        )
        if model.device.type == "cuda" and config.compile != "off" and not self.groups.is_deterministic:
            model.vae.compiled = DecoderPackages(model.vae, DiskCache.at(config.cache_dir))
        decoder_class = LatentReader if config.stage == "denoise" else ImageDecoder
        self.decoder = decoder_class(
            model,
            self.pool,
            clock,
            self.caller,
            self.room,
            self.latent_cache,
            is_alone=self.groups.is_deterministic or self.groups.on_cpu,  # on a CPU a shared call saves nothing
            tile_px=config.decode_tile_px,
        )

    def row_cap(self, group: GroupKey, *, may_probe: bool = True) -> int:
        """Return the rows that a tick of ``group`` may hold; see ``TickCosts``."""
        expert, group = self._expert(group)
        return min(expert.groups.row_cap(group, may_probe=may_probe), max(LEAST_ROWS, expert.caps.cap(group)))

    def check_room(
        self,
        width_px: int,
        height_px: int,
        is_encoded: bool,
        is_controlled: bool = False,
        is_refined: bool = False,
        tile_px: tuple[int, int] | None = None,
    ) -> None:
        """Raise ``InvalidRequest`` for an image that can never fit.

        Args:
            width_px: Width of the image.
            height_px: Height of the image.
            is_encoded: Whether it starts from an image.
            is_controlled: Whether it has ControlNets.
            is_refined: Whether the refiner runs.
            tile_px: Width and height of its tiles, if it has any.
        """
        for expert in self._experts[: 1 + is_refined] if self._has_unet else ():
            least_rows, is_base = (
                expert.groups.least_rows(*(tile_px or (width_px, height_px))),
                expert is self._experts[0],
            )
            expert.room.check(
                width_px,
                height_px,
                least_rows,
                is_encoded=is_encoded,
                is_controlled=is_controlled and is_base,
                tile_px=tile_px,
            )

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        """Return the seconds that ``num_rows`` rows of ``group`` take, estimated if it is not measured."""
        expert, group = self._expert(group)
        return expert.groups.call_s(group, num_rows)

    def is_unmeasured(self, group: GroupKey) -> bool:
        """Return whether ``group`` is still to be measured."""
        expert, group = self._expert(group)
        return expert.groups.is_unmeasured(group)

    def _expert(self, group: GroupKey) -> tuple[Expert, GroupKey]:
        """Return the expert that makes the calls of ``group``, and the group as that expert names it."""
        expert = self._experts[group.is_refined]
        return expert, group._replace(is_refined=False)

    @torch.inference_mode()
    def study(self, group: GroupKey | None = None, has_arrived: Callable[[], bool] | None = None) -> bool:
        """Make one measuring call and return whether there was one to make; see ``Groups.study``."""
        if group is not None:
            expert, group = self._expert(group)
            return expert.groups.study(group)
        if not self._has_unet:
            return False
        return any(expert.groups.study(has_arrived=has_arrived) for expert in self._experts) or self._study_texts()

    def _study_texts(self) -> bool:
        try:
            return any(expert.conditioner.study() for expert in self._experts)
        except Exception as error:
            raise_if_sticky(error)
            logger.warning("prompts are encoded one by one: %s", type(error).__name__, exc_info=error)
            return False

    def trim(self, in_flight: Iterable[ImageTask]) -> None:
        """Drop tensors stacked for images that are gone, and unused shapes beyond ``SHAPES_KEPT``."""
        for expert in self._experts:
            expert.caller.trim()
        self.decoder.trim()
        if self.pool.num_shapes > SHAPES_KEPT:
            self.pool.keep_only(task.loaded_state.shape for task in in_flight if task.state is not None)

    def close(self, kept_tenants: Collection[str]) -> None:
        """Release pages and the compiler process; see ``Engine.close``."""
        self.groups.compiled.close()
        for tenant in set(self.conditioner.tenants) - set(kept_tenants):
            assert self.conditioner.pool is not None
            self.conditioner.pool.retire(tenant)

    def check_integrity(self, in_flight: Iterable[ImageTask]) -> None:
        """Raise if a page is lost, or held for images that are not ``in_flight``."""
        active = [task for task in in_flight if task.state is not None]
        num_open = [0, 0]  # of the base model, then of the refiner
        for task in active:
            state = task.loaded_state
            num_open[task.group is not None and task.group.is_refined] += len(state.conditionings)
            num_open[1] += 0 if state.refined is None else len(state.refined.conditionings)
        self.conditioner.check_integrity(num_open[0])
        if self.refiner is not None:
            self.refiner.conditioner.check_integrity(num_open[1])

    def group_of_short_prompts(self, width_px: int, height_px: int) -> GroupKey:
        """Return the group of most images of this size: prompts of one window."""
        return GroupKey(height_px, width_px, self.model.text.window_tokens)

    @property
    def _has_unet(self) -> bool:
        """Whether this process has the UNet (see ``engine.stages``)."""
        return not self.model.unet.is_hollow

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Measure the group of short prompts at the first of ``sizes`` (width, height), and queue the others.

        Also encodes a text, decodes a latent, reserves all slots of that size, and chooses the number of threads.
        """
        if self.model.text.encodings is None:
            self._encode_trial_text(*sizes[0])
        if self._has_unet:
            self._measure_calls(sizes)
        if "vae" not in self.model.choice.hollow:
            info, (width_px, height_px) = self.model.info, sizes[0]
            cells = (height_px // info.vae_factor, width_px // info.vae_factor)
            self.decoder.pictures(torch.zeros((1, info.latent_channels, *cells))).picture(0)

    def _encode_trial_text(self, width_px: int, height_px: int) -> None:
        if self._has_unet:
            self.conditioner.condition("a", "", width_px=width_px, height_px=height_px).close()
            while self._study_texts():
                pass
        else:
            self.conditioner.export_encodings("a", "")

    def _measure_calls(self, sizes: Sequence[tuple[int, int]]) -> None:
        for expert in self._experts:
            expert.room.prepare()
        native, *other_groups = (self.group_of_short_prompts(*size) for size in sizes)
        self.groups.prepare_paths(native)
        best = self.groups.best(native)
        self.groups.learn(best)
        self.groups.choose_threads(best)
        if self.refiner is not None:
            self.refiner.groups.learn(native)
        for group in other_groups:
            self.groups.facts_of(group)  # else it is measured when there is time
        info = self.model.info
        cells = (native.height_px // info.vae_factor, native.width_px // info.vae_factor)
        self.pool.reserve((info.latent_channels, *cells), self._num_slots)

    @torch.inference_mode()
    def run(self, plan: TickPlan) -> TickOutcome:
        """Run ``plan``."""
        outcome = TickOutcome()
        self._run_upscaler(plan.prepare, outcome)
        ready = [task for task in plan.prepare if not task.awaits_upscaler and task not in outcome.failures]
        started_s = self.clock()
        with self._preparer.together(ready):
            together_s = self.clock() - started_s
            for task in ready:
                self._prepare(task, outcome, together_s)
        if plan.rows:
            self._advance(plan, outcome)
        done = [task for task in plan.decode if task not in outcome.failures]
        self.decoder.decode(done, outcome, may_wait=not (plan.rows or plan.prepare))
        return outcome

    def _run_upscaler(self, tasks: Iterable[ImageTask], outcome: TickOutcome) -> None:
        """Enlarge one tile of the first of ``tasks`` that awaits an upscaler network between its two passes."""
        task = next((task for task in tasks if task.awaits_upscaler), None)
        if task is None:
            return
        started_s = self.clock()
        try:
            self.caller.with_room(lambda: self._preparer.enlarge_tile(task))
        except Exception as error:
            outcome.failures[task] = failure_of(error, "upscaling this image")
        outcome.upscale_s[task] = self.clock() - started_s

    def _prepare(self, task: ImageTask, outcome: TickOutcome, together_s: float) -> None:
        """Prepare a newcomer, or postpone it if an earlier one lacked pages: small images do not overtake large ones.

        ``together_s`` is the time that preparing all newcomers together has taken.
        """
        if outcome.postponed:
            outcome.postponed.append(task)
            return
        started_s = self.clock()
        try:
            group = self._open(task)
            outcome.prepare_s[task] = together_s + self.clock() - started_s
            for row_group in filter(None, (group, task.refined_group, *control_groups(task, group))):
                expert, expert_group = self._expert(row_group)
                expert.groups.facts_of(expert_group)  # else it is measured when there is time
            outcome.groups[task] = group
        except PoolBusy:
            outcome.postponed.append(task)
        except Exception as error:
            outcome.failures[task] = failure_of(error, "generating this image")

    def _open(self, task: ImageTask) -> GroupKey:
        """Prepare an image and return its group; from its first step if it cannot continue from its capture."""
        group = self.caller.with_room(lambda: self._preparer.prepare(task))
        capture = task.resume_from
        # rows that neither a refiner nor ControlNets compute and that read no references
        is_own = not (group.is_refined or task.settings.controlnets or task.settings.references)
        stays_plain = capture is not None and capture.latents is not None and not capture.is_compiled
        if is_own and task.settings.full.all() and not stays_plain:
            group = self.groups.best(group)
        if capture is None:
            return group
        try:
            self.captures.restore(task, group)
        except CaptureError as reason:
            log_refusal(task.live.request_id, reason)
            task.restart()
            return self._open(task)
        return group

    def _advance(self, plan: TickPlan, outcome: TickOutcome) -> None:
        """Advance the rows of ``plan`` group by group, and in halves where memory runs out."""
        outcome.rows_started_s = self.clock()
        outcome.task_of_row = {(task.live.request_id, task.image_index): task for task in plan.rows}
        groups = sorted({task.group_now for task in plan.rows})
        pending = [tuple(task for task in plan.rows if task.group_now == group) for group in groups]
        has_freed_caches = False
        while pending:
            tasks = pending.pop(0)
            try:
                self._advance_together(tasks, plan, outcome)
            except torch.OutOfMemoryError as error:
                without_frames(error)
                if not has_freed_caches:
                    has_freed_caches = True
                    self.caller.free_caches()
                    pending.insert(0, tasks)
                elif len(tasks) > 1:
                    middle = len(tasks) // 2
                    pending[:0] = [tasks[:middle], tasks[middle:]]
                else:
                    outcome.failures[tasks[0]] = failure_of(error, "generating this image")
        outcome.rows_ended_s = self.clock()

    def _advance_together(self, tasks: Sequence[ImageTask], plan: TickPlan, outcome: TickOutcome) -> None:
        """Advance ``tasks``, all full or all shallow, by one step; if memory runs out, all are left as they were."""
        expert, group = self._expert(tasks[0].group_now)
        with expert.groups.between_calls(group):
            steps, errors = self._step(expert, group, tasks, outcome)
        for task, error in errors.items():
            outcome.failures.setdefault(task, failure_of(error, "generating this image"))
        for batch, denoised, finite in steps:
            for index, task in enumerate(batch.tasks):
                latest = Health(finite, index, task.step_index)
                previous = latest if finite.is_here else task.loaded_state.health
                task.loaded_state.health = latest
                if previous is not None and not previous.is_finite:
                    outcome.failures.setdefault(task, not_finite(task, previous.step_index))
            living = [task for task in batch.tasks if task not in outcome.failures]
            self._preview(living, batch.tasks, denoised, plan, outcome)

    def _step(
        self, expert: Expert, group: GroupKey, tasks: Sequence[ImageTask], outcome: TickOutcome
    ) -> tuple[list[tuple[ImageBatch, Tensor, Fetched]], dict[ImageTask, Exception]]:
        """Compute a step of ``tasks`` and write it to their slots.

        Returns:
            For each shape of latents its batch, the denoised estimates (B, C, h, w), and whether each image is finite;
            and the errors by image.

        Raises:
            torch.OutOfMemoryError: The slots and noise streams are as before.
        """
        by_shape: dict[tuple[int, int, int], list[ImageTask]] = {}
        for task in tasks:
            by_shape.setdefault(task.loaded_state.shape, []).append(task)
        batches = [ImageBatch.gather(of_shape, self.pool) for of_shape in by_shape.values()]
        draws = [(task.loaded_state, task.loaded_state.mark()) for task in tasks if task.draws_now]
        try:
            if not group.is_shallow:
                for task in tasks:
                    task.loaded_state.features.clear()
            rows = UNetRows(batches)
            output, errors = expert.caller.predict(rows, group, outcome.calls)
            steps = [
                (batch, *self._update(batch, of_batch))
                for batch, of_batch in zip(batches, rows.outputs(output), strict=True)
            ]
        except torch.OutOfMemoryError:
            for state, mark in draws:
                state.go_back(mark)
            for batch in batches:
                self.pool.scatter(batch.slots, batch.x, batch.history)
            raise
        return steps, {rows.task_of(row): error for row, error in errors.items()}

    def _update(self, batch: ImageBatch, output: Tensor) -> tuple[Tensor, Fetched]:
        """Advance the latents of ``batch`` by the outputs (num_rows, C, h, w) of its rows, and write them to the slots.

        Returns:
            The denoised estimates (B, C, h, w), and whether each image is finite.
        """
        guided = guided_output(batch, output)
        x_next, denoised, history = advance(batch.x, guided, batch.history, batch.noise, batch.rows)
        for index, task in enumerate(batch.tasks):
            if task.stops_early:
                x_next[index] = denoised[index] / task.table.out_scale
            if task.loaded_state.repaint is not None:
                x_next[index] = keep_outside(task, x_next[index], batch.rows[index])
        finite = fetch(torch.isfinite(x_next).flatten(1).all(dim=1))
        self.pool.scatter(batch.slots, x_next, history)
        return denoised, finite

    def _preview(
        self,
        living: Sequence[ImageTask],
        tasks: Sequence[ImageTask],
        denoised: Tensor,
        plan: TickPlan,
        outcome: TickOutcome,
    ) -> None:
        """Start previews of ``denoised`` (len(tasks), C, h, w) in one call; a failure only loses the previews."""
        try:
            shown = [task for task in living if task in plan.previews and not self.decoder.is_showing(task)]
            if shown:
                places = send(torch.tensor([tasks.index(task) for task in shown]), denoised.device)
                self.decoder.show(shown, denoised.index_select(0, places))
            self.decoder.collect_previews(living, outcome)
        except Exception as error:
            raise_if_sticky(error)
            logger.warning("no previews in this tick: decoding them raised %s", type(error).__name__, exc_info=error)


def guided_output(batch: ImageBatch, output: Tensor) -> Tensor:
    """Return the guided outputs (B, C, h, w) of the rows' outputs (num_rows, C, h, w).

    An image with the parts i of weights w_i has the conditional output uncond + sum of w_i (cond_i - uncond), as in Liu
    et al. 2022 (arXiv 2206.01714); a part with an area is added there only.
    """
    num_cond = batch.num_rows - len(batch.guided)
    cond = output[:num_cond]
    if not batch.guided:
        return cond
    is_composed = any(task.composition is not None for task in batch.tasks)
    parts = cond
    if is_composed:
        firsts = [row for row, (_, part, _) in enumerate(batch.unet_rows[:num_cond]) if part == 0]
        cond = parts.index_select(0, send(torch.tensor(firsts), parts.device))
    uncond = cond.clone()
    uncond.index_copy_(0, batch.owners[num_cond:], output[num_cond:])
    if is_composed:
        compose(batch, parts, cond, uncond)
    guided = guide(uncond, cond, batch.guidance)
    for place in batch.guided:
        share = batch.tasks[place].settings.guidance_rescale
        if share:
            guided[place] = rescale_guided(guided[place], cond[place], share)
    return guided


def compose(batch: ImageBatch, parts: Tensor, cond: Tensor, uncond: Tensor) -> None:
    """Write the composed outputs of images with several parts or areas to ``cond`` (B, C, h, w).

    Args:
        batch: The images.
        parts: Outputs (N, C, h, w) of all conditional rows.
        cond: Outputs of the first parts.
        uncond: Unconditional outputs (B, C, h, w).
    """
    rows_of_image: dict[int, list[int]] = {}
    for row, (image, _, _) in enumerate(batch.unet_rows[: len(parts)]):
        rows_of_image.setdefault(image, []).append(row)
    for image, rows in rows_of_image.items():
        prompts = batch.tasks[image].composition
        if prompts is not None:
            total = uncond[image].clone()
            for weight, area, row in zip(prompts.weights, prompts.areas, rows, strict=True):
                place = (slice(None), *area.slices(*total.shape[1:])) if area is not None else ...
                total[place] += weight * (parts[row][place] - uncond[image][place])
            cond[image] = total


def keep_outside(task: ImageTask, x: Tensor, row: Tensor) -> Tensor:
    """Return ``x`` (C, h, w) with the init image outside the mask, at the noise level after ``row``."""
    repaint = task.loaded_state.repaint
    assert repaint is not None
    if task.is_last_row:
        original = repaint.latents / task.table.out_scale
    else:
        original = renoise(repaint.latents[None], repaint.noise[None], row[None])[0]
    blended: Tensor = (1.0 - repaint.mask) * original + repaint.mask * x
    return blended


def _store_weights(model: DiffusionModel, config: EngineConfig) -> None:
    """Store the UNet in its memory format, which is not measured if all replicas must give the same bytes."""
    is_fixed = config.memory_format == "auto" and is_deterministic(model, config)
    name = "contiguous" if is_fixed else config.memory_format
    set_memory_format(model, name, DiskCache.at(config.cache_dir))


def control_groups(task: ImageTask, group: GroupKey) -> list[GroupKey]:
    """Return the groups of the extra calls of an image with ControlNets: its controlled rows and each ControlNet."""
    texts = task.loaded_state.texts
    if not texts:
        return []
    digests = dict.fromkeys(control.network.digest for control in task.loaded_state.controls)
    control_calls = [
        GroupKey(group.height_px, group.width_px, texts[0].num_tokens, control=digest) for digest in digests
    ]
    return [group._replace(is_controlled=True), *control_calls]


def not_finite(task: ImageTask, step_index: int) -> FailureReason:
    """Return the failure of an image whose latents are not finite after step ``step_index`` (0-based)."""
    return FailureReason(
        "numerical_error",
        f"the latents are not finite after step {step_index + 1} of {task.table.num_steps}; "
        "try another seed, a lower guidance_scale or a wider dtype.",
    )
