"""One request for pictures as the page follows it: from its place in the queue to its files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
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
from diffserve.media.infotext import parse_infotext, seeds_told
from ui.create.advance import Advance
from ui.create.parameters import CheckedForm, Form, StartFile, order_of, sampler_of
from ui.fields import as_labelled, seeds_named, told
from ui.server import LONGEST_WAIT_S, LOOK_AGAIN_S, PATIENCE_S, Server, sentence, whole

STOP_S: Final = 60.0
"""Seconds that the page waits for unfinished pictures after Stop."""

log = logging.getLogger("diffserve.page")


class FinishedPicture(msgspec.Struct, frozen=True):
    """A finished picture: the server's own file, and what it says of itself.

    prompt    what it was painted from
    wish      what was asked for
    rewrites  whether it was to be rewritten first
    infotext  the parameters in the file
    warnings  what the server said about it
    number    which of its request, from 0
    begun     what it began from, where that was not noise
    variation_seed  towards whose noise it was varied, ``None`` where it was not
    stopped   "step 5 of 20" where it was stopped there, and is not finished
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
    begun: str = ""
    variation_seed: int | None = None
    stopped: str = ""

    @property
    def facts(self) -> str:
        """How it was painted: "25 steps, DDIM, guidance 3, 128x128, seed 7"."""
        return f"{self.settings}, {self.label}{self.begun}"

    @property
    def label(self) -> str:
        """By which it is told from others of its request: "seed 7", "seed 7, variation seed 9"."""
        return seeds_told(self.seed, self.variation_seed)


class Painting:
    """A request that is being painted in a task of its own, as soon as the server has loaded its models.

    asked      an order, or a form that is to become one once it is known what the models can do
    is_early   whether it waits for the models
    shut_out   why the server takes no more of it for now, empty where it does; it asks again
    pictures   those that are finished, in their order
    preview    the newest file of the way there, ``None`` before the first
    error      why it ended, for a person
    """

    def __init__(
        self,
        server: Server,
        asked: CheckedForm | Form,
        changed: Callable[[FinishedPicture | None], None],
        start: StartFile | None = None,
    ) -> None:
        self.asked = asked
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
        """Whether nothing more will come."""
        return self._task.done()

    @property
    def num_images(self) -> int:
        """How many pictures are asked for."""
        return self.asked.num_images or 1

    @property
    def num_painted(self) -> int:
        """The same with those of which only the best are kept."""
        best_of = self.asked.fields.get("best_of") if isinstance(self.asked, CheckedForm) else None
        return max(self.num_images, best_of or 0)

    @property
    def share(self) -> float:
        """How much of all pictures together is painted, 0 to 1."""
        return self._advance.share(self.num_painted)

    @property
    def seconds_left(self) -> float | None:
        """Until the last of all pictures is there; ``None`` while that is not known."""
        return self._advance.seconds_left(time.monotonic())

    @property
    def num_finished(self) -> int:
        """Pictures that are painted or lost."""
        return len(self._done)

    @property
    def lost(self) -> tuple[str, ...]:
        """Why pictures failed, each reason once, and none that is why it ended."""
        told = {reason: _numbered(sorted(indices)) for reason, indices in self._lost.items()}
        return tuple(
            f"{who} failed: {reason}" for reason, who in told.items() if whole(as_labelled(reason)) != self.error
        )

    @property
    def slowest(self) -> Progress | None:
        """How far the picture is that will take longest; ``None`` while all wait."""
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
            log.warning("a painting could not be interrupted: %s", error.message)
        self._task.cancel()

    async def wait(self) -> None:
        """Until it is over. Never raises what went wrong."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._paint_when_ready()
        except asyncio.CancelledError:
            self.was_stopped = True
        except DiffserveError as error:
            self.error = sentence(error)
        except Exception as error:
            log.exception("a painting failed inside the page")
            self.error = sentence(error)
        finally:
            self.seconds = time.monotonic() - self._started_s
            self._changed(None)

    async def _paint_when_ready(self) -> None:
        """Ask again while the models are being loaded or the queue is full, but never once something was painted."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                if isinstance(self.asked, Form):
                    image = (await self._server.models()).image_of(self.asked.model)
                    self.asked = order_of(self.asked, image, self._start)
                async with await self._stream(self.asked) as stream:
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

    async def _stream(self, asked: CheckedForm) -> AsyncStream[ImageEvent]:
        client, start = self._server.client, self._start
        if start is None:
            return client.generate_stream(asked.prompt, **asked.fields)
        try:
            picture = await asyncio.to_thread(start.path.read_bytes)
        except OSError:
            raise InvalidRequest("The picture to begin from is gone; choose it again.", param="image") from None
        strength = {} if start.strength is None else {"strength": start.strength}
        fields = cast(StreamedEditFields, {**asked.fields, **strength})
        return client.edit_stream(asked.prompt, picture, start.mask, **fields)

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
                self.preview = await self._file(event.file, f"preview-{event.step}.{event.output_format}")
            case CompletedImage():
                self._done.add(event.image_index)
                picture = await self._picture(event)
                self.pictures = sorted([*self.pictures, picture], key=lambda each: each.number)
                self._changed(picture)
                return
            case LostImage():
                self._done.add(event.image_index)
                self._lost.setdefault(event.failure.message, []).append(event.image_index)
        self._changed(None)

    async def _picture(self, event: CompletedImage) -> FinishedPicture:
        assert isinstance(self.asked, CheckedForm), "only an order is painted"
        prompt = event.revised_prompt or self.asked.prompt
        infotext, sampler = await asyncio.to_thread(_own_words, event.file)
        seeds = seeds_named(event.seed, event.variation_seed)
        num_steps = await asyncio.to_thread(_interrupted_after, infotext)
        path = await self._file(event.file, f"{prompt[:40]}-{seeds}.{event.output_format}")
        sampler = sampler or event.sampler
        steps = f"{event.num_inference_steps} step{'s' if event.num_inference_steps != 1 else ''}"
        return FinishedPicture(
            path=path,
            seed=event.seed,
            prompt=prompt,
            wish=self.asked.prompt,
            rewrites=self.asked.rewrites,
            infotext=infotext,
            warnings=event.warnings,
            settings=", ".join(
                (
                    steps,
                    sampler,
                    f"guidance {event.guidance_scale:g}",
                    event.size,
                    *map(_lora_label, event.loras),
                    *(() if event.strength is None else (f"strength {event.strength:g}",)),
                    *told(self.asked.fields),
                )
            ),
            number=event.image_index,
            begun="" if event.similarity is None else _begun(event.similarity, event.skipped_steps),
            variation_seed=event.variation_seed,
            stopped=f"step {num_steps} of {event.num_inference_steps}" if num_steps else "",
        )

    async def _file(self, data: bytes, name: str) -> Path:
        return await asyncio.to_thread(self._server.files.write, data, name)


def _begun(similarity: float, skipped_steps: int) -> str:
    return f", without the first {skipped_steps} from a prompt {similarity:g} similar"


def _numbered(indices: Sequence[int]) -> str:
    """ "Picture 2", "Pictures 1, 2 and 4"."""
    *others, last = (str(index + 1) for index in indices)
    return f"Pictures {', '.join(others)} and {last}" if others else f"Picture {last}"


def _lora_label(lora: Lora) -> str:
    return f"{lora.name} {lora.scale:g}" + ("" if lora.unet_scale is None else f":{lora.unet_scale:g}")


def _interrupted_after(infotext: str) -> str:
    """Return after how many steps a picture was interrupted; "" for a finished one."""
    try:
        return parse_infotext(infotext).fields.get("Interrupted after", "")
    except InvalidRequest:
        return ""


def _own_words(file: bytes) -> tuple[str, str | None]:
    """What a picture's ``file`` says of itself, and its sampler; nothing where it cannot be read."""
    try:
        infotext = str(read_infotext(file) or "")  # Pillow has a kind of its own
        return infotext, sampler_of(infotext)
    except InvalidRequest:
        return "", None
