"""UNet calls for the rows of a mixed batch: assign rows to buckets, pad, time, and split calls that fail.

Rows with ControlNets are evaluated in separate UNet calls, after one call of each ControlNet for its rows. Both use
sizes that were measured to give a row the same bytes. Residuals are added row by row in the order of the ControlNets'
digests, so that the bytes of a row do not depend on the ControlNets of other rows.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from cachetools import LRUCache
from torch import Tensor

from diffserve.engine.image.batch import UNetRows
from diffserve.engine.image.buckets import CostCurve, RowCaps
from diffserve.engine.image.shape_groups import Groups
from diffserve.engine.image.state import ActiveControl
from diffserve.engine.image.task import UNCOND, GroupKey, ImageTask, UNetCall
from diffserve.runtime import DiffusionModel
from diffserve.runtime.accelerators import Stopwatch, TimeSpan
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.low_rank import RowLoRAs
from diffserve.runtime.memory import give_memory_back, without_frames
from diffserve.runtime.text.conditioning import Conditioner, ConditioningRow
from diffserve.runtime.threads import computing_on
from diffserve.runtime.transfer import send
from diffserve.runtime.unet.controlnet import Residuals, residual_shapes
from diffserve.runtime.unet.cross_attention import Contexts, ImagePart, KeysValues
from schedulers import COLUMNS

STACKS_KEPT = 16
STACK_BYTES_KEPT = 1 << 29
"""Limit of all cached stacks; the newest stays in any case. SDXL's keys and values take 26 MB a row in 16 bits."""
SPARE_BYTES = 1 << 26
"""Largest buffer of stacked adapters that is kept for the next images: allocating one takes longer than filling it."""

Result = TypeVar("Result")

TIMESTEP = COLUMNS.index("timestep")


class RowInputs(NamedTuple):
    """An image, the part and view of one of its UNet rows (``BatchRow``), and the index of the text that it reads."""

    task: ImageTask
    part: int
    view: int = 0
    text: int = 0


ReferencedRow = tuple[RowInputs, tuple[int, ...]]
"""A row, and the places of the references that are active in this step."""

Images = tuple[ImagePart, ...]


def bytes_of_images(images: Images) -> int:
    """Return the size of the keys and values of ``images`` in bytes."""
    return sum(part.num_bytes for part in images)


class Stack(NamedTuple):
    """Conditioning of the rows of one UNet call.

    Attributes:
        contexts: Text states, or keys and values, of each row.
        pooled: (R, P) pooled text embeddings, for UNets that use them.
        time_ids: (R, 6) size conditioning, for UNets that use it.
        extra: (R, 1 + C, h, w) additional input channels of inpainting UNets.
        guidance: (R,) guidance scales, for UNets that take them as input.
        loras: Adapter weights of each row, ``None`` if no row has any.
    """

    contexts: Contexts
    pooled: Tensor | None
    time_ids: Tensor | None
    extra: Tensor | None
    guidance: Tensor | None
    loras: RowLoRAs | None

    @property
    def conditions(self) -> dict[str, Tensor | None]:
        """Conditioning other than contexts and adapters, by parameter name of ``UNetRunner``."""
        conditions = {"pooled": self.pooled, "time_ids": self.time_ids, "extra": self.extra}
        return {**conditions, "guidance": self.guidance}

    @property
    def num_bytes(self) -> int:
        """Bytes of contexts and adapters; the other tensors are small."""
        contexts = self.contexts.num_bytes if isinstance(self.contexts, KeysValues) else self.contexts.nbytes
        return contexts + (self.loras.num_bytes if self.loras else 0)


class UNetCaller:
    """Runs rows through the model's UNet, in call sizes from ``groups`` and within the limits of ``caps``.

    Args:
        clock: Returns seconds.
        refiner_caller: The caller of the refiner on the same device, whose caches ``free_caches`` frees as well.

    Attributes:
        stopwatch: Times calls on the device; a reading may become available some calls later.
    """

    def __init__(
        self,
        model: DiffusionModel,
        conditioner: Conditioner,
        groups: Groups,
        caps: RowCaps,
        clock: Callable[[], float] = time.perf_counter,
        refiner_caller: UNetCaller | None = None,
    ) -> None:
        self.refiner_caller = refiner_caller
        self.model = model
        self.conditioner = conditioner
        self.groups = groups
        self.caps = caps
        self.stopwatch = Stopwatch(model.device, clock)
        self._clock = clock
        self._timed: deque[tuple[CostCurve, int, TimeSpan]] = deque()
        self._stacks: OrderedDict[tuple[RowInputs, ...], Stack] = OrderedDict()
        self._images: LRUCache[tuple[ReferencedRow, ...], Images] = LRUCache(STACK_BYTES_KEPT, bytes_of_images)
        self._spare: Tensor | None = None

    def predict(
        self, batch: UNetRows, group: GroupKey, calls: list[UNetCall], part: range | None = None
    ) -> tuple[Tensor, dict[int, Exception]]:
        """Run the UNet on the rows of ``batch``.

        A call that raises is halved until the failing rows are alone; all other rows get their results. After an
        out-of-memory error caches are freed and the call is tried once more before it is halved.

        Args:
            batch: The rows.
            group: The shape group of all rows.
            calls: Gets an entry for each call that was made.
            part: The rows to run; by default all. The output of the others is 0.

        Returns:
            Output (rows, C, h, w) float32, and exceptions by row.
        """
        part = range(batch.num_rows) if part is None else part
        output = torch.zeros((batch.num_rows, *batch.scaled.shape[1:]), device=batch.scaled.device)
        failed: dict[int, Exception] = {}
        residuals = self._residuals(batch, part, group, calls, failed) if group.is_controlled else None

        def call(rows: range, bucket: int) -> None:
            output[rows.start : rows.stop] = self._call(batch, rows, bucket, group, calls, residuals)

        return output, self._make(part, group, call) | failed

    def _make(self, rows: range, group: GroupKey, call: Callable[[range, int], None]) -> dict[int, Exception]:
        """Run ``call`` for all ``rows``, in bucket-sized parts, and return exceptions by row."""
        failed: dict[int, Exception] = {}
        pending = self._layout(rows, group)
        has_freed_caches = False
        while pending:
            rows, bucket = pending.pop(0)
            try:
                call(rows, bucket)
                self.caps.record_call(group, bucket, self.groups.most_rows)
            except Exception as error:
                raise_if_sticky(error)
                if isinstance(error, torch.OutOfMemoryError):
                    without_frames(error)
                    if not has_freed_caches:
                        has_freed_caches = True
                        self.free_caches()
                        pending.insert(0, (rows, bucket))
                        continue
                    self.caps.record_out_of_memory(group, bucket)
                if len(rows) == 1:
                    failed[rows.start] = error
                else:
                    middle = len(rows) // 2
                    pending[:0] = [*self._layout(rows[:middle], group), *self._layout(rows[middle:], group)]
        return failed

    def _residuals(
        self, batch: UNetRows, part: range, group: GroupKey, calls: list[UNetCall], failed: dict[int, Exception]
    ) -> Residuals:
        """Compute the ControlNet residuals of ``part`` of ``batch``, and add exceptions by row to ``failed``.

        Returns:
            Tensors (num_rows, C, h, w), one for each skip connection and the middle block.
        """
        height, width = batch.scaled.shape[-2:]
        shapes = residual_shapes(self.model.unet.network, height, width)
        residuals = tuple(
            torch.zeros((batch.num_rows, *shape), device=batch.scaled.device, dtype=self.model.dtype)
            for shape in shapes
        )
        of_part = ([row for row in rows if row.row in part] for rows in control_calls(batch))
        for rows in filter(None, of_part):
            num_tokens = rows[0].contexts.shape[0]
            control_group = GroupKey(
                group.height_px, group.width_px, num_tokens, control=rows[0].control.network.digest
            )
            added = tuple(tensor.new_zeros((len(rows), *tensor.shape[1:])) for tensor in residuals)
            errors = self._make(
                range(len(rows)), control_group, partial(self._call_control, batch, rows, added, control_group, calls)
            )
            failed |= {rows[place].row: error for place, error in errors.items()}
            numbers = send(torch.tensor([row.row for row in rows]), batch.scaled.device)
            for total, residual in zip(residuals, added, strict=True):
                total.index_add_(0, numbers, residual)
        return residuals

    def _call_control(
        self,
        batch: UNetRows,
        rows: Sequence[ControlledRow],
        outputs: Residuals,
        group: GroupKey,
        calls: list[UNetCall],
        places: range,
        bucket: int,
    ) -> None:
        """Make one ControlNet call of exactly ``bucket`` rows; write the residuals of ``places`` to ``outputs``."""
        real_rows = [rows[place] for place in places]
        padded = [*real_rows, *real_rows[-1:] * (bucket - len(real_rows))]
        network, device = real_rows[0].control.network, batch.scaled.device
        started_s, stop = self._clock(), self.stopwatch.start()
        owners = send(torch.tensor([row.latent for row in padded]), device)
        with self._measured(group, bucket, stop):
            residuals = network.predict(
                batch.scaled.index_select(0, owners),
                batch.rows.index_select(0, owners)[:, TIMESTEP],
                torch.stack([row.contexts for row in padded]),
                torch.stack([row.hint for row in padded]),
                send(torch.tensor([row.control.scale for row in padded]), device),
                pooled=stack_all([row.pooled for row in padded]),
                time_ids=stack_all([row.time_ids for row in padded]),
            )
        for output, residual in zip(outputs, residuals, strict=True):
            output[places.start : places.stop] = residual[: len(real_rows)]
        labels = tuple(batch.label(row.row) for row in real_rows)
        calls.append(UNetCall(labels, bucket - len(real_rows), self._clock() - started_s, control=network.name))

    def _layout(self, rows: range, group: GroupKey) -> list[tuple[range, int]]:
        """Split ``rows`` into calls, each with its bucket size."""
        calls = self.groups.calls(group, len(rows), self.caps.cap(group))
        return [(rows[start:stop], bucket) for start, stop, bucket in calls]

    def free_caches(self) -> None:
        """Free all memory that is only kept to save time."""
        self._stacks.clear()
        self._images.clear()
        self._spare = None
        if self.refiner_caller is not None:
            self.refiner_caller.free_caches()
        if self.groups.compiled.graphs is not None:
            self.groups.compiled.graphs.clear()
        give_memory_back(self.model.device)

    def with_room(self, run: Callable[[], Result]) -> Result:
        """Return the result of ``run``, tried once more with caches freed if memory ran out."""
        try:
            return run()
        except torch.OutOfMemoryError as error:
            without_frames(error)
        self.free_caches()
        return run()

    def _call(
        self,
        batch: UNetRows,
        rows: range,
        bucket: int,
        group: GroupKey,
        calls: list[UNetCall],
        residuals: Residuals | None,
    ) -> Tensor:
        """Make one UNet call of exactly ``bucket`` rows; the last row is repeated as padding."""
        started_s, stop = self._clock(), self.stopwatch.start()
        owners, stack = self._conditioning_of(batch, rows, bucket)
        inputs = [row_inputs(batch, row) for row in rows]
        features = None
        if group.is_shallow:
            row_features = [task.loaded_state.features[part, view] for task, part, view, _ in inputs]
            features = torch.stack([*row_features, *row_features[-1:] * (bucket - len(rows))])
        added = None
        if residuals is not None:
            numbers = send(torch.tensor(_padded(rows, bucket)), batch.scaled.device)
            added = tuple(tensor.index_select(0, numbers) for tensor in residuals)
        scaled, timesteps = batch.scaled.index_select(0, owners), batch.rows.index_select(0, owners)[:, TIMESTEP]
        keeps_features = any(row.task.is_full_now and row.task.keeps_features for row in inputs)
        features_of_call: list[Tensor] | None = [] if keeps_features else None
        with self._measured(group, bucket, stop):
            output = self.model.unet.predict(
                scaled,
                timesteps,
                self._with_images(stack.contexts, inputs),
                **stack.conditions,
                features=features,
                compiled=self.groups.compiled.of(group),
                recorder=self.groups.compiled.recorder(group),
                loras=stack.loras,
                residuals=added,
                kept_features=features_of_call,
            )
        for kept_of_rows in features_of_call or ():
            for place, (task, part, view, _) in enumerate(inputs):
                if task.keeps_features:
                    task.loaded_state.features[part, view] = kept_of_rows[place].clone()
        labels = tuple(batch.label(row) for row in rows)
        calls.append(UNetCall(labels, bucket - len(rows), self._clock() - started_s, group.is_shallow))
        return output[: len(rows)]

    def _conditioning_of(self, batch: UNetRows, rows: range, bucket: int) -> tuple[Tensor, Stack]:
        """Return the image index (bucket,) and the conditioning of each row of a padded call."""
        padded = _padded(rows, bucket)
        owners = batch.owners[rows.start : rows.stop]
        if len(padded) > len(rows):
            owners = torch.cat([owners, owners[-1:].expand(len(padded) - len(rows))])
        return owners, self._stack(tuple(row_inputs(batch, row) for row in padded))

    def _with_images(self, contexts: Contexts, inputs: Sequence[RowInputs]) -> Contexts:
        """Return the ``contexts`` of a call with the references that are active in this step.

        ``inputs`` are the call's rows without padding, which needs no references.
        """
        if not any(row.task.references_now for row in inputs):
            return contexts
        assert isinstance(contexts, KeysValues)  # references are refused without pages
        key = tuple((row, row.task.references_now) for row in inputs)
        images = self._images.get(key)
        if images is None:
            images = self.conditioner.image_parts(
                [
                    [row.task.loaded_state.references[place].row(is_uncond=row.part == UNCOND) for place in places]
                    for row, places in key
                ]
            )
            if bytes_of_images(images) <= self._images.maxsize:
                self._images[key] = images
        return replace(contexts, images=images)

    @contextmanager
    def _measured(self, group: GroupKey, bucket: int, stop: Callable[[], TimeSpan | None]) -> Iterator[None]:
        """Run a call of ``group`` on the best number of threads, and record the time since ``stop`` was created."""
        threads = self.groups.threads
        curve, counts = self.groups.facts_of(group)
        num_threads = threads.choice.next_count((group, bucket), counts)
        with computing_on(num_threads):
            called_s = self._clock()
            yield
            ended_s, span = self._clock(), stop()
        if span is not None:
            self._timed.append((curve, bucket, span))
        self._learn()
        if self.model.device.type == "cpu" and len(counts) > 1:
            threads.choice.observe((group, bucket), num_threads, ended_s - called_s)

    def _learn(self) -> None:
        """Add the available times of calls to their cost curves, in order."""
        while self._timed and self._timed[0][2].is_here:
            curve, bucket, span = self._timed.popleft()
            curve.observe(bucket, span.seconds)

    def _stack(self, key: tuple[RowInputs, ...]) -> Stack:
        """Return the conditioning of the rows, cached while the same rows run together."""
        if key not in self._stacks:
            self._stacks[key] = stack_conditioning(key, self.conditioner, self._spare)
            if self._stacks[key].loras is not None:
                self._spare = None
        self._stacks.move_to_end(key)
        num_bytes = sum(stack.num_bytes for stack in self._stacks.values())
        while len(self._stacks) > 1 and (len(self._stacks) > STACKS_KEPT or num_bytes > STACK_BYTES_KEPT):
            num_bytes -= self._drop(next(iter(self._stacks)))
        return self._stacks[key]

    def trim(self) -> None:
        """Drop the stacks of images that have left."""
        for key in [key for key in self._stacks if any(row.task.state is None for row in key)]:
            self._drop(key)
        for images in [key for key in self._images if any(row.task.state is None for row, _ in key)]:
            del self._images[images]

    def _drop(self, key: tuple[RowInputs, ...]) -> int:
        """Drop a stack and return its size in bytes; its adapter buffer may be reused."""
        stack = self._stacks.pop(key)
        memory = None if stack.loras is None else stack.loras.memory
        if memory is not None and memory.nbytes <= SPARE_BYTES:
            self._spare = memory
        return stack.num_bytes


def _padded(rows: range, bucket: int) -> list[int]:
    """``rows``, the last of them repeated up to ``bucket``."""
    return [*rows, *[rows[-1]] * (bucket - len(rows))]


def row_inputs(batch: UNetRows, row: int) -> RowInputs:
    """Return the inputs of UNet row ``row``."""
    image, part, view = batch.unet_rows[row]
    task = batch.tasks[image]
    return RowInputs(task, part, view, task.text_of(part))


def stack_conditioning(rows: Sequence[RowInputs], conditioner: Conditioner, spare: Tensor | None = None) -> Stack:
    """Stack the conditioning of ``rows``. ``spare`` is a buffer that ``RowLoRAs`` may reuse."""
    texts = [ConditioningRow(row.task.loaded_state.conditionings[row.text], row.part == UNCOND) for row in rows]
    loras = [row.task.loaded_state.loras for row in rows if row.task.loaded_state.loras is not None]
    return Stack(
        conditioner.contexts(texts),
        stack_all([text.pooled_uncond if is_uncond else text.pooled_cond for text, is_uncond in texts]),
        stack_all([_time_ids(row) for row in rows]),
        stack_all([_view(row, row.task.loaded_state.extra) for row in rows]),
        _guidance(rows, conditioner.model),
        RowLoRAs(loras, spare) if loras else None,
    )


class ControlledRow(NamedTuple):
    """Row with a ControlNet: its index, that of its latent in ``UNetRows.scaled``, and the ControlNet's inputs."""

    row: int
    latent: int
    control: ActiveControl
    hint: Tensor
    contexts: Tensor
    pooled: Tensor | None
    time_ids: Tensor | None


def control_calls(batch: UNetRows) -> list[list[ControlledRow]]:
    """Group the rows with ControlNets into calls of one ControlNet and one text length.

    The calls come in the order in which their residuals are summed, which is that of the ControlNets' digests. An image
    that has a ControlNet twice gets two calls.
    """
    rows_of_call: dict[tuple[str, int, int], list[ControlledRow]] = {}
    for row, (_, part, _) in enumerate(batch.unet_rows):
        inputs = row_inputs(batch, row)
        task, time_ids = inputs.task, _time_ids(inputs)
        texts = task.loaded_state.texts[inputs.text] if task.controls_now else None
        if texts is None:
            continue
        is_uncond, times = part == UNCOND, Counter[str]()
        contexts, pooled = (texts.uncond, texts.pooled_uncond) if is_uncond else (texts.cond, texts.pooled_cond)
        for place in task.controls_now:
            control = task.loaded_state.controls[place]
            hint = _view(inputs, control.hint)
            assert hint is not None
            digest = control.network.digest
            controlled = ControlledRow(row, batch.inputs[row], control, hint, contexts, pooled, time_ids)
            rows_of_call.setdefault((digest, times[digest], len(contexts)), []).append(controlled)
            times[digest] += 1
    return [rows_of_call[key] for key in sorted(rows_of_call)]


def _time_ids(row: RowInputs) -> Tensor | None:
    state = row.task.loaded_state
    if state.time_ids is None:
        return state.conditionings[0].time_ids
    time_ids = state.time_ids[row.view] if state.time_ids.dim() == 3 else state.time_ids
    return time_ids[int(row.part == UNCOND)]


def _view(row: RowInputs, tensor: Tensor | None) -> Tensor | None:
    """Return the tile (C, tile h, tile w) of ``tensor`` (C, h, w) that ``row`` evaluates; all of it without tiles."""
    tiles = row.task.settings.tiles
    return tensor if tensor is None or tiles is None else tensor[(slice(None), *tiles.slices(row.view))]


def _guidance(rows: Sequence[RowInputs], model: DiffusionModel) -> Tensor | None:
    """Return the guidance scales (R,) for a UNet that takes them as input."""
    if not model.unet.guidance_dim:
        return None
    return send(torch.tensor([row.task.settings.guidance_scale for row in rows]), model.device)


def stack_all(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Stack one tensor for each row to (R, ...), or return ``None`` for a model whose rows have none."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if len(present) == len(tensors) else None
