"""UNet calls for the rows of a mixed batch: laid into buckets, padded, timed, and taken apart when one fails."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from diffserve.engine.image.batch import ImageBatch
from diffserve.engine.image.buckets import CostCurve, RowCaps
from diffserve.engine.image.shape_groups import Groups
from diffserve.engine.image.task import GroupKey, ImageTask, UNetCall
from diffserve.runtime import DiffusionModel
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.memory import give_memory_back, without_frames
from diffserve.runtime.stopwatch import Stopwatch, TimeSpan
from diffserve.runtime.text.conditioning import Conditioner, ToldRow
from diffserve.runtime.unet.cross_attention import Contexts, KeysValues
from schedulers import COLUMNS

STACKS_KEPT = 16
STACK_BYTES_KEPT = 1 << 29
"""Of SDXL a row's keys and values are 26 MB in 16 bits; the stack of the last call is kept in any case."""

Result = TypeVar("Result")

TIMESTEP = COLUMNS.index("timestep")


class Stack(NamedTuple):
    """What the rows of one call are told: their texts, and where the UNet reads it pooled (R, P), time_ids (R, 6) and
    extra (R, 1 + C, h, w)."""

    contexts: Contexts
    pooled: Tensor | None
    time_ids: Tensor | None
    extra: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Memory that the contexts take; the rest is small."""
        return self.contexts.num_bytes if isinstance(self.contexts, KeysValues) else self.contexts.nbytes


class UNetCaller:
    """Runs rows through the model's UNet, in calls as ``groups`` has them and ``caps`` allows.

    clock      in seconds
    stopwatch  what the costs of calls are learnt by; its readings may come some calls later
    """

    def __init__(
        self,
        model: DiffusionModel,
        conditioner: Conditioner,
        groups: Groups,
        caps: RowCaps,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.conditioner = conditioner
        self.groups = groups
        self.caps = caps
        self.stopwatch = Stopwatch(model.device, clock)
        self._clock = clock
        self._timed: deque[tuple[CostCurve, int, TimeSpan]] = deque()
        self._stacks: OrderedDict[tuple[tuple[ImageTask, bool], ...], Stack] = OrderedDict()

    def predict(self, batch: ImageBatch, group: GroupKey, calls: list[UNetCall]) -> tuple[Tensor, dict[int, Exception]]:
        """(output (rows, C, h, w) float32, what went wrong by row). ``calls`` gets an entry for each call made.

        A call that raises is halved until the guilty rows stand alone; the others get their result all the same. One
        for which there is no memory is made again when memory was given back, and then halved.
        """
        output = torch.zeros((batch.num_rows, *batch.x.shape[1:]), device=batch.x.device)
        failed: dict[int, Exception] = {}
        pending = self._layout(range(batch.num_rows), group)
        has_eased = False
        while pending:
            rows, bucket = pending.pop(0)
            try:
                output[rows.start : rows.stop] = self._call(batch, rows, bucket, group, calls)
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
        return output, failed

    def _layout(self, rows: range, group: GroupKey) -> list[tuple[range, int]]:
        """``rows`` in the calls that are to be made for them, each with its bucket."""
        calls = self.groups.known(group).curve.calls(len(rows), self.caps.cap(group))
        return [(rows[start:stop], bucket) for start, stop, bucket in calls]

    def ease(self) -> None:
        """Give back all memory that is only kept to save time."""
        self._stacks.clear()
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

    def _call(self, batch: ImageBatch, rows: range, bucket: int, group: GroupKey, calls: list[UNetCall]) -> Tensor:
        """One UNet call of exactly ``bucket`` rows; the last row is repeated to fill it."""
        padded = [*rows, *[rows[-1]] * (bucket - len(rows))]
        owners = batch.owners[rows.start : rows.stop]
        if len(padded) > len(rows):
            owners = torch.cat([owners, owners[-1:].expand(len(padded) - len(rows))])
        threads = self.groups.threads
        curve, counts = self.groups.known(group)
        num_threads = threads.choice.next_count((group, bucket), counts)
        started_s, stop = self._clock(), self.stopwatch.start()
        told = self._stack(tuple((batch.tasks[batch.image_of_row[row]], batch.is_uncond(row)) for row in padded))
        images = [batch.tasks[batch.image_of_row[row]] for row in rows]
        features = None
        if group.is_shallow:
            kept = [task.held.features[batch.is_uncond(row)] for task, row in zip(images, rows, strict=True)]
            features = torch.stack([*kept, *kept[-1:] * (bucket - len(rows))])
        is_watched = any(task.is_full_now and task.keeps_features for task in images)
        with threads.using(num_threads), self._keeping(is_watched) as found:
            called_s = self._clock()
            output = self.model.unet.predict(
                batch.scaled.index_select(0, owners),
                batch.rows.index_select(0, owners)[:, TIMESTEP],
                told.contexts,
                pooled=told.pooled,
                time_ids=told.time_ids,
                extra=told.extra,
                features=features,
                merged_share=group.merged_share,
                compiled=self.groups.compiled.of(group, is_watched=is_watched),
            )
            ended_s, span = self._clock(), stop()
        for kept_of_rows in found:
            for place, (task, row) in enumerate(zip(images, rows, strict=True)):
                if task.keeps_features:
                    task.held.features[batch.is_uncond(row)] = kept_of_rows[place].clone()
        if span is not None:
            self._timed.append((curve, bucket, span))
        self._learn()
        if batch.x.device.type == "cpu":
            threads.choice.observe((group, bucket), num_threads, ended_s - called_s)
        labels = tuple(batch.label(row) for row in rows)
        calls.append(UNetCall(labels, bucket - len(rows), ended_s - started_s, group.is_shallow))
        return output[: len(rows)]

    def _learn(self) -> None:
        """Tell the curves what calls took, in their order, as far as that is known by now."""
        while self._timed and self._timed[0][2].is_here:
            curve, bucket, span = self._timed.popleft()
            curve.observe(bucket, span.seconds)

    def _keeping(self, is_needed: bool) -> AbstractContextManager[Sequence[Tensor]]:
        """Keeps the features of a full call where one of its images needs them."""
        shallow = self.model.unet.shallow
        return shallow.keeping() if is_needed and shallow is not None else nullcontext(())

    def _stack(self, key: tuple[tuple[ImageTask, bool], ...]) -> Stack:
        """What the rows are told, gathered once for as long as the same rows run together."""
        if key not in self._stacks:
            self._stacks[key] = stack_conditioning(key, self.conditioner)
        self._stacks.move_to_end(key)
        num_bytes = sum(stack.num_bytes for stack in self._stacks.values())
        while len(self._stacks) > 1 and (len(self._stacks) > STACKS_KEPT or num_bytes > STACK_BYTES_KEPT):
            _, dropped = self._stacks.popitem(last=False)
            num_bytes -= dropped.num_bytes
        return self._stacks[key]

    def trim(self) -> None:
        """Drop the stacks of images that have left."""
        for key in [key for key in self._stacks if any(task.state is None for task, _ in key)]:
            del self._stacks[key]


def stack_conditioning(rows: Sequence[tuple[ImageTask, bool]], conditioner: Conditioner) -> Stack:
    """Stack what each row, an image and whether it is its unconditional one, is told."""
    told = [ToldRow(task.held.conditioning, is_uncond) for task, is_uncond in rows]
    return Stack(
        conditioner.contexts(told),
        stack_all([text.pooled_uncond if is_uncond else text.pooled_cond for text, is_uncond in told]),
        stack_all([text.time_ids for text, _ in told]),
        stack_all([task.held.extra for task, _ in rows]),
    )


def stack_all(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """(R, ...) from one tensor for each row, or ``None`` for a model whose rows have none."""
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(found) if len(found) == len(tensors) else None
