"""A request for images as the page follows it, from the queue to its files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec

from diffserve.api.errors import DiffserveError, EngineUnavailable, InvalidRequest, QueueFull
from diffserve.client import (
    AsyncStream,
    CompletedImage,
    ImageEvent,
    Lora,
    LostImage,
    PartialImage,
    Progress,
    StreamedEditFields,
)
from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext, seeds_text
from ui.create.parameters import CheckedForm, Form, StartFile, order_of, sampler_of
from ui.fields import as_labelled, describe_fields, seeds_named
from ui.server import LONGEST_WAIT_S, LOOK_AGAIN_S, PATIENCE_S, Server, as_sentence, sentence


class Advance:
    """Progress of all images of a request."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._all_done_s: float | None = None

    def take(self, event: Progress | CompletedImage | LostImage, now_s: float) -> None:
        """Record ``event``, received at ``now_s`` on a monotonic clock."""
        match event:
            case Progress(image_index=index, request_seconds_left=seconds_left):
                self._all_done_s = self._all_done_s if seconds_left is None else now_s + seconds_left
                if index is not None and event.steps:
                    self._reach(index, (event.step or 0) / event.steps)
            case CompletedImage() | LostImage():
                self._reach(event.image_index, 1.0)

    def _reach(self, index: int, share: float) -> None:
        self._shares[index] = max(share, self._shares.get(index, 0.0))

    def share(self, num_painted: int) -> float:
        """Return the finished share of all steps of ``num_painted`` images, 0 to 1; it never decreases."""
        return min(1.0, sum(self._shares.values()) / num_painted)

    def seconds_left(self, now_s: float) -> float | None:
        """Return the seconds until all images are done, or None if unknown."""
        return None if self._all_done_s is None else max(0.0, self._all_done_s - now_s)


STOP_S: Final = 60.0
"""Seconds that the page waits for unfinished pictures after Stop."""

log = logging.getLogger("diffserve.page")


class FinishedPicture(msgspec.Struct, frozen=True):
    """Finished image with its parameters.

    Attributes:
        path: The file as the server sent it.
        seed: The seed of its noise.
        prompt: The prompt that it was generated from.
        wish: The prompt of the request.
        rewrites: Whether the prompt was to be rewritten first.
        infotext: The parameters in the file.
        warnings: Warnings of the server.
        settings: A summary of the parameters.
        number: Its index in the request.
        origin: Text about the stored latents that it started from, empty if it started from noise.
        variation_seed: The seed of its variation noise, None without a variation.
        stopped: "step 5 of 20" if it was stopped there and is not finished.
        history_id: The ID of its history entry, empty if the server keeps no history.
        is_favorite: Whether it is marked as a favorite.
        job: The ID of the job that generated it, empty if it was streamed.
    """

    path: Path
    seed: int
    prompt: str
    wish: str
    rewrites: bool
    infotext: str
    warnings: tuple[str, ...]
    settings: str
    number: int = 0
    origin: str = msgspec.field(default="", name="begun")  # the name in the notes of earlier versions
    variation_seed: int | None = None
    stopped: str = ""
    history_id: str = ""
    is_favorite: bool = False
    job: str = ""

    @property
    def facts(self) -> str:
        """Summary of its parameters, such as "25 steps, DDIM, guidance 3, 128x128, seed 7"."""
        return f"{self.settings}, {self.label}{self.origin}"

    @property
    def label(self) -> str:
        """The seeds that distinguish it from other images of the request, such as "seed 7, variation seed 9"."""
        return seeds_text(self.seed, self.variation_seed)


class Painting:
    """Request that runs in a task as soon as the server has loaded its models.

    Attributes:
        request: A checked form, or a form that is checked once the capabilities of the models are known.
        is_early: Whether it waits for the models.
        shut_out: Why the server refuses it for now, empty if it does not; it is retried.
        pictures: The finished images in order.
        preview: The file of the newest preview, None before the first.
        error: Why it failed, for the user.
    """

    def __init__(
        self,
        server: Server,
        request: CheckedForm | Form,
        changed: Callable[[FinishedPicture | None], None],
        start: StartFile | None = None,
    ) -> None:
        self.request = request
        self._start = start
        self.is_early = False
        self.shut_out = ""
        self.pictures: list[FinishedPicture] = []
        self.preview: Path | None = None
        self.error: str | None = None
        self.was_stopped = False
        self.queue_position: int | None = None
        self.seconds = 0.0
        self._progress: dict[int, Progress] = {}
        self._advance = Advance()
        self._done: set[int] = set()
        self._lost: dict[str, list[int]] = {}
        self._server = server
        self._changed = changed
        self._started_s = time.monotonic()
        self._interrupting: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(), name="painting")

    @property
    def is_over(self) -> bool:
        """Whether the request has ended."""
        return self._task.done()

    @property
    def num_images(self) -> int:
        """The number of requested images."""
        return self.request.num_images or 1

    @property
    def num_painted(self) -> int:
        """The number of images to generate, including those that ``best_of`` discards."""
        best_of = self.request.fields.get("best_of") if isinstance(self.request, CheckedForm) else None
        return max(self.num_images, best_of or 0)

    @property
    def share(self) -> float:
        """The finished share of all images, 0 to 1."""
        return self._advance.share(self.num_painted)

    @property
    def seconds_left(self) -> float | None:
        """Expected seconds until all images are done, None if unknown."""
        return self._advance.seconds_left(time.monotonic())

    @property
    def num_finished(self) -> int:
        """The number of images that are done or failed."""
        return len(self._done)

    @property
    def failures(self) -> tuple[str, ...]:
        """Reasons for failed images, each once, without the reason why the request itself failed."""
        images_of = {reason: _numbered(sorted(indices)) for reason, indices in self._lost.items()}
        return tuple(
            f"{images} failed: {reason}"
            for reason, images in images_of.items()
            if as_sentence(as_labelled(reason)) != self.error
        )

    @property
    def slowest(self) -> Progress | None:
        """Progress of the unfinished image with the most steps left; None while all wait."""
        going = [progress for index, progress in self._progress.items() if index not in self._done]
        return max(going, key=lambda progress: (progress.steps or 0) - (progress.step or 0), default=None)

    def stop(self, *, keeps_unfinished: bool = False) -> None:
        """End the work at the server's next step.

        Args:
            keeps_unfinished: Wait for the unfinished pictures, if a step is done; a second call does not wait.
        """
        if self._task.done():
            return
        waits = keeps_unfinished and bool(self._progress) and not self.was_stopped
        self.was_stopped = True
        if waits:
            self._interrupting = asyncio.create_task(self._interrupt(), name="interrupting")
            self._changed(None)
        else:
            self._task.cancel()

    async def _interrupt(self) -> None:
        """Ask the server to end the request early, and wait for the unfinished pictures."""
        request_id = next(iter(self._progress.values())).id
        try:
            if await self._server.client.interrupt(request_id):
                await asyncio.wait([self._task], timeout=STOP_S)
        except DiffserveError as error:
            log.warning("a request could not be interrupted: %s", error.message)
        self._task.cancel()

    async def wait(self) -> None:
        """Wait until the request has ended; never raises its error."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._paint_when_ready()
        except asyncio.CancelledError:
            self.was_stopped = True
        except DiffserveError as error:
            self.error = sentence(error)
        except Exception as error:
            log.exception("a request failed inside the page")
            self.error = sentence(error)
        finally:
            self.seconds = time.monotonic() - self._started_s
            self._changed(None)

    async def _paint_when_ready(self) -> None:
        """Run the request; retry while the models load or the queue is full, but not after the first progress."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                if isinstance(self.request, Form):
                    image = (await self._server.models()).image_of(self.request.model)
                    self.request = order_of(self.request, image, self._start)
                async with await self._stream(self.request) as stream:
                    async for event in stream:
                        self.is_early, self.shut_out = False, ""
                        await self._take(event)
                return
            except EngineUnavailable:
                if self._progress or self._done or time.monotonic() > until_s:
                    raise
                self.is_early, self.shut_out, wait_s = True, "", LOOK_AGAIN_S
            except QueueFull as full:
                self.is_early, self.shut_out = False, sentence(full).partition(";")[0]
                wait_s = min(LONGEST_WAIT_S, max(LOOK_AGAIN_S, full.retry_after_s))
            self.queue_position = None
            self._changed(None)
            await asyncio.sleep(wait_s)

    async def _stream(self, request: CheckedForm) -> AsyncStream[ImageEvent]:
        client, start = self._server.client, self._start
        if start is None:
            return client.generate_stream(request.prompt, **request.fields)
        picture = await asyncio.to_thread(start.read)
        strength = {} if start.strength is None else {"strength": start.strength}
        fields = cast(StreamedEditFields, {**request.fields, **strength})
        return client.edit_stream(request.prompt, picture, start.mask, **fields)

    async def _take(self, event: ImageEvent) -> None:
        if not isinstance(event, PartialImage):
            self._advance.take(event, time.monotonic())
        match event:
            case Progress(image_index=None):
                self.queue_position = event.queue_position
            case Progress():
                self.queue_position = None
                self._progress[event.image_index or 0] = event
            case PartialImage():
                name = f"preview-{event.step}.{event.output_format}"
                self.preview = await asyncio.to_thread(self._server.files.write, event.file, name)
            case CompletedImage():
                self._done.add(event.image_index)
                assert isinstance(self.request, CheckedForm), "only a checked form is painted"
                picture = await finished_picture(
                    self._server,
                    event,
                    self.request.prompt,
                    self.request.rewrites,
                    describe_fields(self.request.fields),
                )
                self.pictures = sorted([*self.pictures, picture], key=lambda each: each.number)
                self._changed(picture)
                return
            case LostImage():
                self._done.add(event.image_index)
                self._lost.setdefault(event.failure.message, []).append(event.image_index)
        self._changed(None)


async def finished_picture(
    server: Server, event: CompletedImage, wish: str, rewrites: bool, field_texts: Iterable[str] = (), job: str = ""
) -> FinishedPicture:
    """Write the file of a finished image.

    Args:
        server: The server that generated it; its ``files`` store the image.
        event: The image with its parameters.
        wish: The prompt of the request.
        rewrites: Whether the prompt was to be rewritten first.
        field_texts: Descriptions of other fields of the request, such as "clip skip 2".
        job: The ID of the job that generated it.

    Raises:
        OSError: The file cannot be written.
    """
    prompt = event.revised_prompt or wish
    infotext, sampler = await asyncio.to_thread(_read_parameters, event.file)
    seeds = seeds_named(event.seed, event.variation_seed)
    num_steps = await asyncio.to_thread(_interrupted_after, infotext)
    name = f"{prompt[:40]}-{seeds}.{event.output_format}"
    path = await asyncio.to_thread(server.files.write, event.file, name)
    sampler = sampler or event.sampler
    steps = f"{event.num_inference_steps} step{'s' if event.num_inference_steps != 1 else ''}"
    return FinishedPicture(
        path=path,
        seed=event.seed,
        prompt=prompt,
        wish=wish,
        rewrites=rewrites,
        infotext=infotext,
        warnings=event.warnings,
        settings=", ".join(
            (
                steps,
                sampler,
                f"guidance {event.guidance_scale:g}",
                event.size,
                *map(_lora_label, event.loras),
                *(f"reference {reference.name} {reference.scale:g}" for reference in event.references),
                *(() if event.strength is None else (f"strength {event.strength:g}",)),
                *field_texts,
            )
        ),
        number=event.image_index,
        origin="" if event.similarity is None else _origin_text(event.similarity, event.skipped_steps),
        variation_seed=event.variation_seed,
        history_id=event.history_id or "",
        stopped=f"step {num_steps} of {event.num_inference_steps}" if num_steps else "",
        job=job,
    )


def _origin_text(similarity: float, skipped_steps: int) -> str:
    return f", first {skipped_steps} steps skipped (prompt similarity {similarity:g})"


def _numbered(indices: Sequence[int]) -> str:
    """Return "Image 2" or "Images 1, 2 and 4"."""
    *earlier, last = (str(index + 1) for index in indices)
    return f"Images {', '.join(earlier)} and {last}" if earlier else f"Image {last}"


def _lora_label(lora: Lora) -> str:
    return f"{lora.name} {lora.scale:g}" + ("" if lora.unet_scale is None else f":{lora.unet_scale:g}")


def _interrupted_after(infotext: str) -> str:
    """Return after how many steps a picture was interrupted; "" for a finished one."""
    try:
        return parse_infotext(infotext).fields.get("Interrupted after", "")
    except InvalidRequest:
        return ""


def _read_parameters(file: bytes) -> tuple[str, str | None]:
    """Return the parameters in a file and the sampler; empty and None if it has none."""
    try:
        infotext = str(read_infotext(file) or "")  # Pillow returns a subclass of str
        return infotext, sampler_of(infotext)
    except InvalidRequest:
        return "", None
