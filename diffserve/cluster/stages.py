"""Stages that stand apart as one: texts are encoded, pictures denoised and decoded by replicas of their own.

::

    GenerationRequest ──► encode ──► denoise ──► decode ──► Painted          texts, rewrites, embeddings ──► encode
                          TextsEncoded    latents     picture

What is handed from stage to stage passes here as msgpack, a header and raw buffers for each tensor
(:mod:`diffserve.api.stage_types`); nothing is pickled. Every stage has a router and a scaler of its own. Work of a lost
replica starts again on another one; the results of earlier stages are kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

from msgspec.structs import replace

from diffserve.api.engine_stats import EngineStats, merged
from diffserve.api.errors import DeadlineExceeded, DeadlineUnreachable, DiffserveError, EngineUnavailable, QueueFull
from diffserve.api.stage_types import DecodeRequest, EncodeRequest, PictureDecoded, TextsEncoded
from diffserve.api.text_types import LanguageModelInfo
from diffserve.api.types import (
    Accepted,
    Asks,
    Failed,
    Finished,
    GenerationRequest,
    ImageFailed,
    ImageResult,
    LatentArray,
    ModelInfo,
    Painted,
    ServedModel,
)
from diffserve.cluster.config import ClusterConfig, settings_of
from diffserve.cluster.engines import MOST_LOST, RayEngines, watch_seats
from diffserve.cluster.seat import Calls, Seat
from diffserve.service.engine.engines import HOW_FAR, Job, Watch, refuse_unready
from diffserve.service.engine.fleet import MAY_COME_TWICE
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings

APART: Final = ("encode", "denoise", "decode")
PATIENCE_S: Final = 60.0
"""With a stage that is away, and twice its usual start where that takes longer, from when it was seen to be."""
AGAIN_AFTER_S: Final = 0.25

E = TypeVar("E")
log = logging.getLogger("diffserve.cluster")


class StagedEngines:
    """The replicas of all stages as one engine: see :class:`~diffserve.service.engine.engines.Engines`.

    of_stage  the replicas of each
    """

    def __init__(self, settings: Settings, cluster: ClusterConfig, calls: Mapping[str, Calls]) -> None:
        """``calls``: one entry for each replica that there may be, by the names of ``cluster.deployments``."""
        self.settings = settings
        self.metrics = Metrics()
        self.failed: asyncio.Future[DiffserveError] = asyncio.get_running_loop().create_future()
        own = {stage: [one.name for one in cluster.deployments if one.stage == stage] for stage in APART}
        self.of_stage = {
            stage: RayEngines(
                settings_of(settings, stage),
                cluster.of_stage(stage),
                {name: calls[name] for name in names},
                self.metrics,
            )
            for stage, names in own.items()
        }
        self.encode, self.denoise, self.decode = (self.of_stage[stage] for stage in APART)
        watch_seats(self.metrics, self.seats)
        self._painting: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False
        for engines in self.of_stage.values():
            engines.failed.add_done_callback(self._gave_up)

    @property
    def seats(self) -> list[Seat]:
        """Of all stages."""
        return [seat for engines in self.of_stage.values() for seat in engines.seats]

    @property
    def info(self) -> ModelInfo | None:
        """The first model, as those know it who paint."""
        return self.denoise.info

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """The language model, which is where texts are encoded."""
        return self.encode.text_info

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Every image model that requests may name."""
        return self.denoise.models

    @property
    def is_ready(self) -> bool:
        """Whether every stage is."""
        return all(engines.is_ready for engines in self.of_stage.values())

    @property
    def num_ready(self) -> int:
        """How many replicas denoise, where all stages are there."""
        return self.denoise.num_ready if self.is_ready else 0

    @property
    def retry_after_s(self) -> float:
        """Seconds until the last stage should be there, 1 at least."""
        return max((one.retry_after_s for one in self.of_stage.values() if not one.is_ready), default=1.0)

    def require_ready(self) -> None:
        """EngineUnavailable, with when to come back, unless every stage is there; those that are not are started."""
        for engines in self.of_stage.values():
            with contextlib.suppress(DiffserveError):
                engines.require_ready()
        refuse_unready(self)

    def start(self) -> None:
        """Start every stage."""
        for engines in self.of_stage.values():
            engines.start()

    def gives_up(self, engines: RayEngines) -> bool:
        """Whether nobody of a stage will come any more."""
        return self._is_stopping or engines.failed.done()

    async def stop(self) -> None:
        """Let go of all; whatever they still hold ends in EngineUnavailable."""
        self._is_stopping = True
        await asyncio.gather(*(engines.stop() for engines in self.of_stage.values()))
        await asyncio.gather(*self._painting.values(), return_exceptions=True)

    def submit(self, request: Asks[E], watch: Watch | None = None, *, is_whole: bool = False) -> Job[E]:
        """Hand ``request`` to the stage that does it, or a picture to one after the other; see ``Engines``."""
        if not isinstance(request, GenerationRequest):
            return self.encode.submit(request, watch, is_whole=is_whole)
        self.require_ready()
        job = Job(cast(Asks[E], request), self.cancel, watch, is_whole=is_whole)
        way = _Way(self, job, request, is_whole=is_whole)
        task = asyncio.create_task(way.go(), name=f"image {request.request_id}")
        self._painting[request.request_id] = task
        task.add_done_callback(lambda _: self._painting.pop(request.request_id, None))
        return job

    def cancel(self, request_id: str) -> None:
        """Give a picture up, if it is not over; its place is free at its engine's next step."""
        task = self._painting.pop(request_id, None)
        if task is not None:
            task.cancel()

    def interrupt(self, request_id: str) -> None:
        """End a request for images early, if it is being denoised, with the unfinished pictures."""
        self.denoise.interrupt(request_id)

    def look_again(self, name: str) -> None:
        """Have the files of a model looked at again that could not be read. EngineUnavailable without a replica."""
        for engines in self.of_stage.values():
            engines.look_again(name)

    async def num_requests(self) -> int:
        """How many requests are in the replicas. EngineUnavailable without one."""
        return sum(await asyncio.gather(*(engines.num_requests() for engines in self.of_stage.values())))

    async def trace(self) -> list[list[str]]:
        """Per recent UNet call, the request id of every row. EngineUnavailable without a replica."""
        return await self.denoise.trace()

    async def stats(self) -> EngineStats | None:
        """The numbers of all replicas that are up, as one. EngineUnavailable without one."""
        told = await asyncio.gather(*(engines.stats() for engines in (self.denoise, self.encode, self.decode)))
        known = [one for one in told if one is not None]
        return merged(known) if known else None

    def _gave_up(self, failed: asyncio.Future[DiffserveError]) -> None:
        if not self.failed.done() and not failed.cancelled():
            self.failed.set_result(failed.result())


class _Patience:
    """With a stage, the replicas of ``engines``, that work is lost with or that has no room for it."""

    def __init__(self, engines: RayEngines) -> None:
        self._engines = engines
        self._num_engines, self._num_lost = -1, 0
        self._since_s = 0.0

    def lasts(self, now_s: float) -> bool:
        """Whether it is tried again, now that it was in vain; each engine that came meanwhile is given its own time."""
        num_engines = sum(seat.num_engines for seat in self._engines.seats)
        if num_engines != self._num_engines:
            self._num_engines, self._since_s = num_engines, now_s
            self._num_lost += 1
        usual_s = max(seat.start_s for seat in self._engines.seats)
        return self._num_lost < MOST_LOST and now_s - self._since_s < max(PATIENCE_S, 2.0 * usual_s)


class _Way:
    """A request for pictures on its way through the stages; ``job`` is what its client reads."""

    def __init__(self, engines: StagedEngines, job: Job[Any], request: GenerationRequest, *, is_whole: bool) -> None:
        self._engines = engines
        self._job = job
        self._request = request
        self._is_whole = is_whole
        self._begun_s = self._now()
        self._encoded: TextsEncoded | None = None
        self._decoding: list[asyncio.Task[bool]] = []
        self._seed = request.seed
        self._may_begin_anew = is_whole
        self._is_first = True

    async def go(self) -> None:
        """Through all stages; what goes wrong at one ends it, as it would in one engine."""
        try:
            self._encoded = await self._encode()
            await self._denoise(self._encoded)
        except DiffserveError as error:
            self._job.feed(self._in_own_words(error))
        except Exception as error:
            log.exception("a picture's way failed", extra={"request_id": self._request.request_id})
            self._job.feed(DiffserveError(f"painting this image raised {type(error).__name__}."))
        finally:
            for task in self._decoding:
                task.cancel()

    def _in_own_words(self, error: DiffserveError) -> DiffserveError:
        """``error``; where a stage was told what was left of a deadline, with all of it."""
        deadline_s, waited_s = self._request.deadline_s, self._now() - self._begun_s
        if deadline_s is None:
            return error
        if isinstance(error, DeadlineExceeded):
            said = f"the deadline of {deadline_s:g} s passed before the picture was finished."
            return DeadlineExceeded(said, param="deadline_s")
        if isinstance(error, DeadlineUnreachable) and error.predicted_s is not None:
            predicted_s = error.predicted_s + waited_s
            least_s = math.inf if error.retry_after_s is None else 0.0
            return DeadlineUnreachable.of(deadline_s, predicted_s, least_s)
        return error

    async def _encode(self) -> TextsEncoded:
        asked = EncodeRequest(generation=replace(self._request, deadline_s=self._left_s()))
        started_s = self._now()
        encoded: TextsEncoded = await self._answer(self._engines.encode, asked)
        self._engines.metrics.did_stage("encode", self._now() - started_s, encoded.encodings.num_bytes)
        return encoded

    async def _denoise(self, encoded: TextsEncoded) -> None:
        """Paint; where its replica is lost and nobody has heard of more than steps, begin anew when there is one."""
        denoise = self._engines.denoise
        patience = _Patience(denoise)
        while True:
            request = replace(
                self._request,
                prompt=encoded.prompt,
                seed=self._seed,
                rewriting=None,
                encodings=encoded.encodings,
                deadline_s=self._left_s(),
            )
            try:
                await self._steps(request, encoded)
                return
            except EngineUnavailable:
                if not (self._may_begin_anew and patience.lasts(self._now())) or self._engines.gives_up(denoise):
                    raise
            await asyncio.sleep(AGAIN_AFTER_S)

    async def _steps(self, request: GenerationRequest, encoded: TextsEncoded) -> None:
        started_s, num_bytes = self._now(), 0
        async with self._engines.denoise.submit(request, self._watch, is_whole=self._is_whole) as events:
            async for event in events:
                self._may_begin_anew = self._may_begin_anew and isinstance(event, MAY_COME_TWICE)
                match event:
                    case Accepted():
                        self._seed = event.seed
                        self._job.feed(replace(event, warnings=(*encoded.warnings, *event.warnings)))
                    case Painted(result=result):
                        latents = told_latents(result)
                        num_bytes += len(latents.data)
                        place = len(self._decoding)
                        self._decoding.append(asyncio.create_task(self._decode(result, latents, encoded, place)))
                    case Finished():
                        self._engines.metrics.did_stage("denoise", self._now() - started_s, num_bytes)
                        await self._finish(event)
                    case _:
                        self._job.feed(event)

    def _watch(self, event: object) -> None:
        """Pass on how far the request is, which a job that is read whole leaves out of its events."""
        if self._is_whole and isinstance(event, HOW_FAR):
            self._job.feed(event)

    async def _decode(self, result: ImageResult, latents: LatentArray, encoded: TextsEncoded, place: int) -> bool:
        """Have the picture of ``result`` decoded, and tell it; whether there is one."""
        started_s = self._now()
        try:
            asked = DecodeRequest(
                request_id=f"{result.request_id}.{result.image_index}",
                latents=latents,
                init_image=self._request.init_image,
                mask_image=self._request.mask_image,
                model=self._request.model,
                deadline_s=self._left_s(),
                priority=self._request.priority,
            )
            decoded: PictureDecoded = await self._answer(
                self._engines.decode, asked, away=(EngineUnavailable, QueueFull)
            )
        except DiffserveError as error:
            said = ImageFailed(
                request_id=result.request_id, image_index=result.image_index, code=error.code, message=error.message
            )
            self._job.feed(said)
            return False
        waited_s = self._now() - started_s
        self._engines.metrics.did_stage("decode", waited_s, len(decoded.picture.data))
        took = result.timings
        is_first = place == 0  # which the seconds before are charged to
        told = replace(
            result,
            picture=decoded.picture,
            latents=latents if self._request.return_latents else None,
            timings=replace(
                took,
                queue_s=took.queue_s + encoded.waited_s - encoded.encode_s,
                encode_s=took.encode_s + encoded.encode_s,
                decode_s=decoded.decode_s,
            ),
            warnings=(*encoded.warnings, *result.warnings),
            original_prompt=encoded.original_prompt,
            device_s=result.device_s + decoded.decode_s + is_first * (encoded.encode_s + encoded.rewriting_s),
        )
        self._job.feed(Painted(request_id=result.request_id, result=told))
        return True

    async def _finish(self, event: Finished) -> None:
        """Tell the end once all pictures are decoded."""
        are_there = await asyncio.gather(*self._decoding)
        num_lost = are_there.count(False)
        if num_lost and num_lost == len(are_there):
            said = "the latents could not be decoded; please try again."
            self._job.feed(Failed(request_id=event.request_id, code=DiffserveError.default_code, message=said))
            return
        self._job.feed(replace(event, num_painted=event.num_painted - num_lost, num_failed=event.num_failed + num_lost))

    async def _answer(
        self, engines: RayEngines, request: Asks[Any], away: tuple[type[DiffserveError], ...] = (EngineUnavailable,)
    ) -> Any:
        """The event that ends ``request``. Raises what it ends in otherwise; a stage that is ``away`` for a while, for
        its replica is begun anew or has no room, is waited for: what others did of the picture is not lost with it.
        """
        patience = _Patience(engines)
        while True:
            try:
                async with engines.submit(request, is_whole=True) as events:
                    async for event in events:
                        last = event
                return last
            except away:
                if not patience.lasts(self._now()) or self._engines.gives_up(engines):
                    raise
                self._left_s()
            await asyncio.sleep(AGAIN_AFTER_S)

    def _left_s(self) -> float | None:
        """Of the deadline. Raises DeadlineExceeded where nothing is."""
        if self._request.deadline_s is None:
            return None
        left_s = self._request.deadline_s - (self._now() - self._begun_s)
        if left_s <= 0.0:
            said = f"the deadline of {self._request.deadline_s:g} s passed before the picture was finished."
            raise DeadlineExceeded(said, param="deadline_s")
        return left_s

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def told_latents(result: ImageResult) -> LatentArray:
    """Of a picture that is still to be decoded. DiffserveError where there are none."""
    if result.latents is None:
        raise DiffserveError("a replica told a picture without latents: it is of another version, or not of its stage.")
    return result.latents
