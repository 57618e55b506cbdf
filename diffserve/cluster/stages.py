"""Pool whose stages (text encoding, denoising, decoding) run on different replicas.

    GenerationRequest --> encode --> denoise --> decode --> ImageFinished       texts, rewrites, embeddings --> encode
                                                                                upscaling --> decode

Data passes from stage to stage through this process as msgpack (:mod:`diffserve.api.stage_types`). Every stage has its
own router and scaler. If a replica is lost, only its stage is repeated.
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
    ImageFinished,
    ImageResult,
    LatentArray,
    ModelInfo,
    ServedModel,
)
from diffserve.api.upscale_types import UpscaleRequest
from diffserve.cluster.config import ClusterConfig, settings_of
from diffserve.cluster.pool import MAX_ATTEMPTS, RayPool, watch_replicas
from diffserve.cluster.replica import Calls
from diffserve.service.engine.engines import PROGRESS_EVENTS, Job, OnCapture, Watch, refuse_unready
from diffserve.service.engine.pool import REPEATABLE_EVENTS
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings

STAGES: Final = ("encode", "denoise", "decode")
RETRY_TIMEOUT_S: Final = 60.0
"""Least time to wait for a lost stage; twice the usual start of its replicas if that is longer."""

RETRY_EVERY_S: Final = 0.25

E = TypeVar("E")
log = logging.getLogger("diffserve.cluster")


class StagedPool:
    """The pools of all stages as one: see ``Engines``.

    Attributes:
        pools: The pool of each stage.
    """

    def __init__(self, settings: Settings, cluster: ClusterConfig, calls: Mapping[str, Calls]) -> None:
        """Create the pools; ``calls`` has an entry for each of ``cluster.deployments``."""
        self.settings = settings
        self.metrics = Metrics()
        self.failed: asyncio.Future[DiffserveError] = asyncio.get_running_loop().create_future()
        self.pools: dict[str, RayPool] = {}
        for stage in STAGES:
            stage_calls = {
                deployment.name: calls[deployment.name]
                for deployment in cluster.deployments
                if deployment.stage == stage
            }
            stage_settings = settings_of(settings, stage)
            self.pools[stage] = RayPool(stage_settings, cluster.of_stage(stage), stage_calls, self.metrics)
        self.encode, self.denoise, self.decode = (self.pools[stage] for stage in STAGES)
        watch_replicas(self.metrics, list(self.pools.values()))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False
        for pool in self.pools.values():
            pool.failed.add_done_callback(self._on_failure)

    @property
    def info(self) -> ModelInfo | None:
        """Description of the first image model, from the denoising stage."""
        return self.denoise.info

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """Description of the language model, from the encoding stage."""
        return self.encode.text_info

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Image models that requests may name."""
        return self.denoise.models

    @property
    def is_ready(self) -> bool:
        """Whether every stage is ready."""
        return all(pool.is_ready for pool in self.pools.values())

    @property
    def num_ready(self) -> int:
        """Number of denoising replicas that are ready; 0 if a stage is not ready."""
        return self.denoise.num_ready if self.is_ready else 0

    @property
    def retry_after_s(self) -> float:
        """Expected seconds until all stages are ready, at least 1."""
        return max((pool.retry_after_s for pool in self.pools.values() if not pool.is_ready), default=1.0)

    def require_ready(self) -> None:
        """Raise EngineUnavailable, with the time for a retry, if a stage is not ready; such stages are started."""
        for pool in self.pools.values():
            with contextlib.suppress(DiffserveError):
                pool.require_ready()
        refuse_unready(self)

    def start(self) -> None:
        """Start every stage."""
        for pool in self.pools.values():
            pool.start()

    def has_given_up(self, pool: RayPool) -> bool:
        """Return whether ``pool`` will have no replica any more."""
        return self._is_stopping or pool.failed.done()

    async def stop(self) -> None:
        """Stop all replicas; unfinished requests end in EngineUnavailable."""
        self._is_stopping = True
        await asyncio.gather(*(pool.stop() for pool in self.pools.values()))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def submit(
        self,
        request: Asks[E],
        watch: Watch | None = None,
        *,
        is_whole: bool = False,
        on_capture: OnCapture | None = None,
    ) -> Job[E]:
        """Send a request to its stage, an image request through all stages; see ``Engines``."""
        if not isinstance(request, GenerationRequest):
            stage = self.decode if isinstance(request, UpscaleRequest) else self.encode
            return stage.submit(request, watch, is_whole=is_whole)
        self.require_ready()
        job = Job(cast(Asks[E], request), self.cancel, watch, is_whole=is_whole, on_capture=on_capture)
        staged = _StagedRequest(self, job, request, is_whole=is_whole, on_capture=on_capture)
        task = asyncio.create_task(staged.run(), name=f"image {request.request_id}")
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.request_id, None))
        return job

    def cancel(self, request_id: str) -> None:
        """Cancel an image request; its slot is free at the engine's next step. Ignored if it has ended."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def interrupt(self, request_id: str) -> None:
        """End an image request early with its unfinished images, if it is being denoised."""
        self.denoise.interrupt(request_id)

    def retry_load(self, name: str) -> None:
        """Read the files of a model that failed to load again; raise EngineUnavailable if a stage is not ready."""
        for pool in self.pools.values():
            pool.retry_load(name)

    async def num_requests(self) -> int:
        """Return the number of requests in the replicas; raise EngineUnavailable if a stage is not ready."""
        return sum(await asyncio.gather(*(pool.num_requests() for pool in self.pools.values())))

    async def trace(self) -> list[list[str]]:
        """Return the request id of every row of the recent UNet calls; raise EngineUnavailable without a replica."""
        return await self.denoise.trace()

    async def stats(self) -> EngineStats | None:
        """Return the sum of the statistics of all stages; raise EngineUnavailable if a stage is not ready."""
        stages = await asyncio.gather(*(pool.stats() for pool in (self.denoise, self.encode, self.decode)))
        all_stats = [stats for stats in stages if stats is not None]
        return merged(all_stats) if all_stats else None

    def _on_failure(self, failed: asyncio.Future[DiffserveError]) -> None:
        if not self.failed.done() and not failed.cancelled():
            self.failed.set_result(failed.result())


class _RetryBudget:
    """Limit for the retries of one request at one stage whose replica was lost or has no room."""

    def __init__(self, pool: RayPool) -> None:
        self._pool = pool
        self._num_engines, self._num_losses = -1, 0
        self._since_s = 0.0

    def allows(self, now_s: float) -> bool:
        """Count a failed attempt and return whether another is allowed; each new engine gets the full time."""
        num_engines = sum(replica.num_engines for replica in self._pool.replicas)
        if num_engines != self._num_engines:
            self._num_engines, self._since_s = num_engines, now_s
            self._num_losses += 1
        usual_s = max(replica.start_s for replica in self._pool.replicas)
        return self._num_losses < MAX_ATTEMPTS and now_s - self._since_s < max(RETRY_TIMEOUT_S, 2.0 * usual_s)


class _StagedRequest:
    """An image request on its way through the stages; ``job`` is what its client reads."""

    def __init__(
        self,
        pool: StagedPool,
        job: Job[Any],
        request: GenerationRequest,
        *,
        is_whole: bool,
        on_capture: OnCapture | None,
    ) -> None:
        self._on_capture = on_capture
        self._capture = request.resume_from
        self._pool = pool
        self._job = job
        self._request = request
        self._is_whole = is_whole
        self._submitted_s = self._now()
        self._decoding: list[asyncio.Task[bool]] = []
        self._seed = request.seed
        self._is_repeatable = is_whole

    async def run(self) -> None:
        """Run all stages; an error of one ends the request."""
        try:
            await self._denoise(await self._encode())
        except DiffserveError as error:
            self._job.feed(self._with_full_deadline(error))
        except Exception as error:
            log.exception("a staged request failed", extra={"request_id": self._request.request_id})
            self._job.feed(DiffserveError(f"generating this image raised {type(error).__name__}."))
        finally:
            for task in self._decoding:
                task.cancel()

    def _with_full_deadline(self, error: DiffserveError) -> DiffserveError:
        """Return ``error`` with the deadline of the request in place of the remainder that the stage got."""
        deadline_s, waited_s = self._request.deadline_s, self._now() - self._submitted_s
        if deadline_s is None:
            return error
        if isinstance(error, DeadlineExceeded):
            message = f"the deadline of {deadline_s:g} s passed before the image was finished."
            return DeadlineExceeded(message, param="deadline_s")
        if isinstance(error, DeadlineUnreachable) and error.predicted_s is not None:
            predicted_s = error.predicted_s + waited_s
            least_s = math.inf if error.retry_after_s is None else 0.0
            return DeadlineUnreachable.of(deadline_s, predicted_s, least_s)
        return error

    async def _encode(self) -> TextsEncoded:
        request = EncodeRequest(generation=replace(self._request, deadline_s=self._left_s(), resume_from=None))
        started_s = self._now()
        encoded: TextsEncoded = await self._answer(self._pool.encode, request)
        self._pool.metrics.did_stage("encode", self._now() - started_s, encoded.encodings.num_bytes)
        return encoded

    async def _denoise(self, encoded: TextsEncoded) -> None:
        """Denoise; repeat it if the replica is lost while the client has seen no more than progress."""
        denoise = self._pool.denoise
        budget = _RetryBudget(denoise)
        while True:
            request = replace(
                self._request,
                prompt=encoded.prompt,
                seed=self._seed,
                rewriting=None,
                encodings=encoded.encodings,
                resume_from=self._capture,
                deadline_s=self._left_s(),
            )
            try:
                await self._denoise_once(request, encoded)
                return
            except EngineUnavailable:
                if not (self._is_repeatable and budget.allows(self._now())) or self._pool.has_given_up(denoise):
                    raise
            await asyncio.sleep(RETRY_EVERY_S)

    async def _denoise_once(self, request: GenerationRequest, encoded: TextsEncoded) -> None:
        started_s, num_bytes = self._now(), 0
        denoise = self._pool.denoise
        on_capture = self._keep_capture if self._is_whole or self._on_capture else None
        async with denoise.submit(request, self._watch, is_whole=self._is_whole, on_capture=on_capture) as events:
            async for event in events:
                self._is_repeatable = self._is_repeatable and isinstance(event, REPEATABLE_EVENTS)
                match event:
                    case Accepted():
                        self._seed = event.seed
                        self._job.feed(replace(event, warnings=(*encoded.warnings, *event.warnings)))
                    case ImageFinished(result=result):
                        latents = latents_of(result)
                        num_bytes += len(latents.data)
                        is_first = not self._decoding
                        self._decoding.append(asyncio.create_task(self._decode(result, latents, encoded, is_first)))
                    case Finished():
                        self._pool.metrics.did_stage("denoise", self._now() - started_s, num_bytes)
                        await self._finish(event)
                    case _:
                        self._job.feed(event)

    def _keep_capture(self, capture: bytes) -> None:
        """Keep the state of the images for the next attempt, and pass it on."""
        self._capture = capture
        if self._on_capture is not None:
            self._on_capture(capture)

    def _watch(self, event: object) -> None:
        """Pass progress on, which a job that is read as a whole leaves out of its events."""
        if self._is_whole and isinstance(event, PROGRESS_EVENTS):
            self._job.feed(event)

    async def _decode(self, result: ImageResult, latents: LatentArray, encoded: TextsEncoded, is_first: bool) -> bool:
        """Decode the image of ``result`` and feed the job; return whether that succeeded."""
        started_s = self._now()
        try:
            request = DecodeRequest(
                request_id=f"{result.request_id}.{result.image_index}",
                latents=latents,
                init_image=self._request.init_image,
                mask_image=self._request.mask_image,
                model=self._request.model,
                deadline_s=self._left_s(),
                priority=self._request.priority,
            )
            decoded: PictureDecoded = await self._answer(
                self._pool.decode, request, retry_on=(EngineUnavailable, QueueFull)
            )
        except DiffserveError as error:
            failure = ImageFailed(
                request_id=result.request_id, image_index=result.image_index, code=error.code, message=error.message
            )
            self._job.feed(failure)
            return False
        waited_s = self._now() - started_s
        self._pool.metrics.did_stage("decode", waited_s, len(decoded.picture.data))
        timings = result.timings
        decoded_result = replace(
            result,
            picture=decoded.picture,
            latents=latents if self._request.return_latents else None,
            timings=replace(
                timings,
                queue_s=timings.queue_s + encoded.waited_s - encoded.encode_s,
                encode_s=timings.encode_s + encoded.encode_s,
                decode_s=decoded.decode_s,
            ),
            warnings=(*encoded.warnings, *result.warnings),
            original_prompt=encoded.original_prompt,
            # The first image is charged for the encoding of the texts.
            device_s=result.device_s + decoded.decode_s + is_first * (encoded.encode_s + encoded.rewriting_s),
        )
        self._job.feed(ImageFinished(request_id=result.request_id, result=decoded_result))
        return True

    async def _finish(self, event: Finished) -> None:
        """Feed the final event when all images are decoded."""
        has_succeeded = await asyncio.gather(*self._decoding)
        num_failed = has_succeeded.count(False)
        if num_failed and num_failed == len(has_succeeded):
            message = "the latents could not be decoded; please try again."
            self._job.feed(Failed(request_id=event.request_id, code=DiffserveError.default_code, message=message))
            return
        self._job.feed(
            replace(event, num_painted=event.num_painted - num_failed, num_failed=event.num_failed + num_failed)
        )

    async def _answer(
        self, pool: RayPool, request: Asks[Any], retry_on: tuple[type[DiffserveError], ...] = (EngineUnavailable,)
    ) -> Any:
        """Return the final event of ``request``; errors of ``retry_on`` are retried, other ones raised.

        Waiting for a stage that restarts or has no room keeps the results of the earlier stages.
        """
        budget = _RetryBudget(pool)
        while True:
            try:
                async with pool.submit(request, is_whole=True) as events:
                    async for event in events:
                        last = event
                return last
            except retry_on:
                if not budget.allows(self._now()) or self._pool.has_given_up(pool):
                    raise
                self._left_s()
            await asyncio.sleep(RETRY_EVERY_S)

    def _left_s(self) -> float | None:
        """Return the remaining seconds of the deadline; raise DeadlineExceeded if it has passed."""
        if self._request.deadline_s is None:
            return None
        left_s = self._request.deadline_s - (self._now() - self._submitted_s)
        if left_s <= 0.0:
            message = f"the deadline of {self._request.deadline_s:g} s passed before the image was finished."
            raise DeadlineExceeded(message, param="deadline_s")
        return left_s

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def latents_of(result: ImageResult) -> LatentArray:
    """Return the latents of an image that is still to be decoded; raise DiffserveError if there are none."""
    if result.latents is None:
        raise DiffserveError("a replica returned an image without latents: it runs another version or another stage.")
    return result.latents
