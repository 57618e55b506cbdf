"""UNet calls for the rows of a mixed batch: laid into buckets, padded, timed, and taken apart when one fails.

Rows that ControlNets add to make UNet calls of their own, behind a call of each ControlNet for those that it adds to.
Both have sizes that were seen to give a row the same bytes, and what is added is summed row by row in the order of the
ControlNets' digests: so a row knows nothing of its neighbours' ControlNets.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from diffserve.engine.image.batch import ImageBatch
from diffserve.engine.image.buckets import CostCurve, RowCaps
from diffserve.engine.image.shape_groups import Groups
from diffserve.engine.image.state import HeldControl
from diffserve.engine.image.task import GroupKey, ImageTask, UNetCall
from diffserve.runtime import DiffusionModel
from diffserve.runtime.accelerators import Stopwatch, TimeSpan
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.low_rank import RowLoRAs
from diffserve.runtime.memory import give_memory_back, without_frames
from diffserve.runtime.text.conditioning import Conditioner, ConditioningRow
from diffserve.runtime.threads import computing_on
from diffserve.runtime.transfer import send
from diffserve.runtime.unet.controlnet import Residuals, residual_shapes
from diffserve.runtime.unet.cross_attention import Contexts, KeysValues
from schedulers import COLUMNS

STACKS_KEPT = 16
STACK_BYTES_KEPT = 1 << 29
"""Of SDXL a row's keys and values are 26 MB in 16 bits; the stack of the last call is kept in any case."""
SPARE_BYTES = 1 << 26
"""Of stacked adapters whose images have left, for those of the next: new pages take longer than what is copied into
them. Beside the calls of a network with larger ones that is little."""

Result = TypeVar("Result")

TIMESTEP = COLUMNS.index("timestep")


class Stack(NamedTuple):
    """What the rows of one call are told: their texts, and where the UNet reads it pooled (R, P), time_ids (R, 6) and
    extra (R, 1 + C, h, w); ``guidance`` (R,), which few UNets are told; ``loras``: what changes the network for each of
    them, where anything does.
    """

    contexts: Contexts
    pooled: Tensor | None
    time_ids: Tensor | None
    extra: Tensor | None
    guidance: Tensor | None
    loras: RowLoRAs | None

    @property
    def conditions(self) -> dict[str, Tensor | None]:
        """What a UNet is told beside contexts and adapters, by its names in ``UNetRunner``."""
        told = {"pooled": self.pooled, "time_ids": self.time_ids, "extra": self.extra}
        return {**told, "guidance": self.guidance}

    @property
    def num_bytes(self) -> int:
        """Memory that contexts and adapters take; the rest is small."""
        contexts = self.contexts.num_bytes if isinstance(self.contexts, KeysValues) else self.contexts.nbytes
        return contexts + (self.loras.num_bytes if self.loras else 0)


class UNetCaller:
    """Runs rows through the model's UNet, in calls as ``groups`` has them and ``caps`` allows.

    clock      in seconds
    stopwatch  what the costs of calls are learnt by; its readings may come some calls later
    beside     another one on the same device, which gives back what it keeps as well
    """

    def __init__(
        self,
        model: DiffusionModel,
        conditioner: Conditioner,
        groups: Groups,
        caps: RowCaps,
        clock: Callable[[], float] = time.perf_counter,
        beside: UNetCaller | None = None,
    ) -> None:
        self.beside = beside
        self.model = model
        self.conditioner = conditioner
        self.groups = groups
        self.caps = caps
        self.stopwatch = Stopwatch(model.device, clock)
        self._clock = clock
        self._timed: deque[tuple[CostCurve, int, TimeSpan]] = deque()
        self._stacks: OrderedDict[tuple[tuple[ImageTask, bool], ...], Stack] = OrderedDict()
        self._spare: Tensor | None = None

    def predict(self, batch: ImageBatch, group: GroupKey, calls: list[UNetCall]) -> tuple[Tensor, dict[int, Exception]]:
        """(output (rows, C, h, w) float32, what went wrong by row). ``calls`` gets an entry for each call made.

        A call that raises is halved until the guilty rows stand alone; the others get their result all the same. One
        for which there is no memory is made again when memory was given back, and then halved.
        """
        output = torch.zeros((batch.num_rows, *batch.x.shape[1:]), device=batch.x.device)
        failed: dict[int, Exception] = {}
        residuals = self._residuals(batch, group, calls, failed) if group.is_controlled else None

        def call(rows: range, bucket: int) -> None:
            output[rows.start : rows.stop] = self._call(batch, rows, bucket, group, calls, residuals)

        return output, self._make(range(batch.num_rows), group, call) | failed

    def _make(self, rows: range, group: GroupKey, call: Callable[[range, int], None]) -> dict[int, Exception]:
        """Have ``call`` make the calls for ``rows``, each with its bucket; what went wrong by row."""
        failed: dict[int, Exception] = {}
        pending = self._layout(rows, group)
        has_eased = False
        while pending:
            rows, bucket = pending.pop(0)
            try:
                call(rows, bucket)
                self.caps.ran(group, bucket, self.groups.most_rows)
            except Exception as error:
                raise_if_sticky(error)
                if isinstance(error, torch.OutOfMemoryError):
                    without_frames(error)
                    if not has_eased:
                        has_eased = True
                        self.ease()
                        pending.insert(0, (rows, bucket))
                        continue
                    self.caps.ran_out(group, bucket)
                if len(rows) == 1:
                    failed[rows.start] = error
                else:
                    middle = len(rows) // 2
                    pending[:0] = [*self._layout(rows[:middle], group), *self._layout(rows[middle:], group)]
        return failed

    def _residuals(
        self, batch: ImageBatch, group: GroupKey, calls: list[UNetCall], failed: dict[int, Exception]
    ) -> Residuals:
        """What ControlNets add to all rows of ``batch``, (num_rows, C, h, w) each; ``failed`` gets what went wrong."""
        height, width = batch.x.shape[-2:]
        shapes = residual_shapes(self.model.unet.network, height, width)
        residuals = tuple(
            torch.zeros((batch.num_rows, *shape), device=batch.x.device, dtype=self.model.dtype) for shape in shapes
        )
        for rows in told_rows(batch):
            num_tokens = rows[0].contexts.shape[0]
            own = GroupKey(group.height_px, group.width_px, num_tokens, control=rows[0].control.network.digest)
            found = tuple(tensor.new_zeros((len(rows), *tensor.shape[1:])) for tensor in residuals)
            wrong = self._make(range(len(rows)), own, partial(self._call_control, batch, rows, found, own, calls))
            failed |= {rows[place].row: error for place, error in wrong.items()}
            numbers = send(torch.tensor([one.row for one in rows]), batch.x.device)
            for total, more in zip(residuals, found, strict=True):
                total.index_add_(0, numbers, more)
        return residuals

    def _call_control(
        self,
        batch: ImageBatch,
        rows: Sequence[ControlledRow],
        found: Residuals,
        group: GroupKey,
        calls: list[UNetCall],
        places: range,
        bucket: int,
    ) -> None:
        """One call of the ControlNet of ``rows`` of exactly ``bucket`` rows; ``found`` gets what it adds to those at
        ``places``.
        """
        chosen = [rows[place] for place in places]
        padded = [*chosen, *chosen[-1:] * (bucket - len(chosen))]
        network, device = chosen[0].control.network, batch.x.device
        started_s, stop = self._clock(), self.stopwatch.start()
        owners = send(torch.tensor([one.image for one in padded]), device)
        with self._measured(group, bucket, stop):
            residuals = network.predict(
                batch.scaled.index_select(0, owners),
                batch.rows.index_select(0, owners)[:, TIMESTEP],
                torch.stack([one.contexts for one in padded]),
                torch.stack([one.control.hint for one in padded]),
                send(torch.tensor([one.control.scale for one in padded]), device),
                pooled=stack_all([one.pooled for one in padded]),
                time_ids=stack_all([one.time_ids for one in padded]),
            )
        for kept, more in zip(found, residuals, strict=True):
            kept[places.start : places.stop] = more[: len(chosen)]
        labels = tuple(batch.label(one.row) for one in chosen)
        calls.append(UNetCall(labels, bucket - len(chosen), self._clock() - started_s, control=network.name))

    def _layout(self, rows: range, group: GroupKey) -> list[tuple[range, int]]:
        """``rows`` in the calls that are to be made for them, each with its bucket."""
        calls = self.groups.calls(group, len(rows), self.caps.cap(group))
        return [(rows[start:stop], bucket) for start, stop, bucket in calls]

    def ease(self) -> None:
        """Give back all memory that is only kept to save time."""
        self._stacks.clear()
        self._spare = None
        if self.beside is not None:
            self.beside.ease()
        if self.groups.compiled.graphs is not None:
            self.groups.compiled.graphs.clear()
        give_memory_back(self.model.device)

    def with_room(self, run: Callable[[], Result]) -> Result:
        """``run``, once more where memory ran out and some could be given back."""
        try:
            return run()
        except torch.OutOfMemoryError as error:
            without_frames(error)
        self.ease()
        return run()

    def _call(
        self,
        batch: ImageBatch,
        rows: range,
        bucket: int,
        group: GroupKey,
        calls: list[UNetCall],
        residuals: Residuals | None,
    ) -> Tensor:
        """One UNet call of exactly ``bucket`` rows; the last row is repeated to fill it."""
        started_s, stop = self._clock(), self.stopwatch.start()
        owners, told = self._told(batch, rows, bucket)
        images = [batch.tasks[batch.image_of_row[row]] for row in rows]
        features = None
        if group.is_shallow:
            kept = [task.loaded_state.features[batch.is_uncond(row)] for task, row in zip(images, rows, strict=True)]
            features = torch.stack([*kept, *kept[-1:] * (bucket - len(rows))])
        added = None
        if residuals is not None:
            numbers = send(torch.tensor(_padded(rows, bucket)), batch.x.device)
            added = tuple(tensor.index_select(0, numbers) for tensor in residuals)
        scaled, timesteps = batch.scaled.index_select(0, owners), batch.rows.index_select(0, owners)[:, TIMESTEP]
        keeps_features = any(task.is_full_now and task.keeps_features for task in images)
        features_of_call: list[Tensor] | None = [] if keeps_features else None
        with self._measured(group, bucket, stop):
            output = self.model.unet.predict(
                scaled,
                timesteps,
                told.contexts,
                **told.conditions,
                features=features,
                compiled=self.groups.compiled.of(group),
                recorder=self.groups.compiled.recorder(group),
                loras=told.loras,
                residuals=added,
                kept_features=features_of_call,
            )
        for kept_of_rows in features_of_call or ():
            for place, (task, row) in enumerate(zip(images, rows, strict=True)):
                if task.keeps_features:
                    task.loaded_state.features[batch.is_uncond(row)] = kept_of_rows[place].clone()
        labels = tuple(batch.label(row) for row in rows)
        calls.append(UNetCall(labels, bucket - len(rows), self._clock() - started_s, group.is_shallow))
        return output[: len(rows)]

    def _told(self, batch: ImageBatch, rows: range, bucket: int) -> tuple[Tensor, Stack]:
        """Of each row of a call of ``bucket`` rows, the image that it is of (bucket,) and what it is told."""
        padded = _padded(rows, bucket)
        owners = batch.owners[rows.start : rows.stop]
        if len(padded) > len(rows):
            owners = torch.cat([owners, owners[-1:].expand(len(padded) - len(rows))])
        return owners, self._stack(
            tuple((batch.tasks[batch.image_of_row[row]], batch.is_uncond(row)) for row in padded)
        )

    @contextmanager
    def _measured(self, group: GroupKey, bucket: int, stop: Callable[[], TimeSpan | None]) -> Iterator[None]:
        """A call of ``group``, on as many threads as are worth it; what it took since ``stop`` was given is learnt."""
        threads = self.groups.threads
        curve, counts = self.groups.known(group)
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
        """Tell the curves what calls took, in their order, as far as that is known by now."""
        while self._timed and self._timed[0][2].is_here:
            curve, bucket, span = self._timed.popleft()
            curve.observe(bucket, span.seconds)

    def _stack(self, key: tuple[tuple[ImageTask, bool], ...]) -> Stack:
        """What the rows are told, gathered once for as long as the same rows run together."""
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
        for key in [key for key in self._stacks if any(task.state is None for task, _ in key)]:
            self._drop(key)

    def _drop(self, key: tuple[tuple[ImageTask, bool], ...]) -> int:
        """Drop a stack, and say how many bytes it took; what adapters were stacked in may serve for others."""
        stack = self._stacks.pop(key)
        memory = None if stack.loras is None else stack.loras.memory
        if memory is not None and memory.nbytes <= SPARE_BYTES:
            self._spare = memory
        return stack.num_bytes


def _padded(rows: range, bucket: int) -> list[int]:
    """``rows``, the last of them repeated up to ``bucket``."""
    return [*rows, *[rows[-1]] * (bucket - len(rows))]


def stack_conditioning(
    rows: Sequence[tuple[ImageTask, bool]], conditioner: Conditioner, spare: Tensor | None = None
) -> Stack:
    """Stack what each row, an image and whether it is its unconditional one, is told; ``spare`` as ``RowLoRAs`` has
    it.
    """
    told = [ConditioningRow(task.loaded_state.conditioning, is_uncond) for task, is_uncond in rows]
    loras = [task.loaded_state.loras for task, _ in rows if task.loaded_state.loras is not None]
    return Stack(
        conditioner.contexts(told),
        stack_all([text.pooled_uncond if is_uncond else text.pooled_cond for text, is_uncond in told]),
        stack_all([_time_ids(task, is_uncond) for task, is_uncond in rows]),
        stack_all([task.loaded_state.extra for task, _ in rows]),
        _guidance(rows, conditioner.model),
        RowLoRAs(loras, spare) if loras else None,
    )


class ControlledRow(NamedTuple):
    """A row that a ControlNet adds to: its number, its image's number, and what the ControlNet is told of it."""

    row: int
    image: int
    control: HeldControl
    contexts: Tensor
    pooled: Tensor | None
    time_ids: Tensor | None


def told_rows(batch: ImageBatch) -> list[list[ControlledRow]]:
    """The rows of each call of a ControlNet, which share it and the length of their texts, in the order in which what
    they add is summed: that of the ControlNets' digests. One that an image has twice is called twice.
    """
    found: dict[tuple[str, int, int], list[ControlledRow]] = {}
    for row, image in enumerate(batch.image_of_row):
        task = batch.tasks[image]
        texts = task.loaded_state.texts
        assert texts is not None
        is_uncond, times = batch.is_uncond(row), Counter[str]()
        contexts, pooled = (texts.uncond, texts.pooled_uncond) if is_uncond else (texts.cond, texts.pooled_cond)
        for place in task.controls_now:
            control = task.loaded_state.controls[place]
            digest = control.network.digest
            told = ControlledRow(row, image, control, contexts, pooled, _time_ids(task, is_uncond))
            found.setdefault((digest, times[digest], len(contexts)), []).append(told)
            times[digest] += 1
    return [found[key] for key in sorted(found)]


def _time_ids(task: ImageTask, is_uncond: bool) -> Tensor | None:
    own = task.loaded_state.time_ids
    return task.loaded_state.conditioning.time_ids if own is None else own[int(is_uncond)]


def _guidance(rows: Sequence[tuple[ImageTask, bool]], model: DiffusionModel) -> Tensor | None:
    """The scales (R,) of a UNet that is told them."""
    if not model.unet.guidance_dim:
        return None
    return send(torch.tensor([task.settings.guidance_scale for task, _ in rows]), model.device)


def stack_all(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """(R, ...) from one tensor for each row, or ``None`` for a model whose rows have none."""
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(found) if len(found) == len(tensors) else None
