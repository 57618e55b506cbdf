"""``POST /sdapi/v1/txt2img`` and ``img2img``: as ours, but asked and answered in A1111's words, watched by polling."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.errors import DeadlineExceeded, DiffserveError, ModerationBlocked
from diffserve.api.sizes import plan_size
from diffserve.api.types import Failed, GenerationRequest, ImageFailed, ImageResult, Painted, Picture, new_request_id
from diffserve.media.images import encode_image
from diffserve.media.infotext import SCHEDULE_LABELS, FirstPass, write_infotext
from diffserve.media.start_picture import StartPicture
from diffserve.service.a1111.asking import (
    USUAL_STEPS,
    AskedBody,
    ask,
    echo_of,
    second_pass,
    start_of,
    warnings_of,
)
from diffserve.service.a1111.ignored import ignored_refiner
from diffserve.service.a1111.jobs import Jobs, PolledJob
from diffserve.service.a1111.schemas import Img2ImgBody, Txt2ImgBody
from diffserve.service.a1111.styles import read_styles
from diffserve.service.admission import Ticket
from diffserve.service.endpoint import Place
from diffserve.service.images.answers import timings
from diffserve.service.images.generations import Generations
from diffserve.service.images.kept_pictures import new_name
from diffserve.service.images.painting import CheckedImages, Start, plan_painting
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.lifecycle import first_of, json_response, read_body
from diffserve.service.models import find_model
from diffserve.service.threads import ANSWERS, LISTINGS
from diffserve.version import __version__
from schedulers import SAMPLERS

PREVIEWS: Final = 4
"""Of a task that somebody polls by its name."""


class Txt2Img(Generations):
    """The endpoint of pictures from text alone. ``jobs``: shared with the other one, and with those who ask."""

    asked: ClassVar[type[Txt2ImgBody]] = Txt2ImgBody

    def __init__(self, *arguments: Any, jobs: Jobs, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._jobs = jobs

    async def _read(self, request: Request) -> GenerateBody:
        body = await read_body(request, self.asked)
        with self._admission.clients.known(request) as client:
            options = self._jobs.options(client)
        folder = Path(self._config.data_dir).expanduser()
        styles = await LISTINGS.run(read_styles, folder) if body.styles else []
        model = (body.override_settings or options).get("sd_model_checkpoint")
        refused = self._refused(str(model).partition(" [")[0] if model else None)
        return ask(body, options, styles, refused, [served.name for served in self._engine.models])

    def _with_pictures(self, body: GenerateBody) -> tuple[BaseModel, ...]:
        assert isinstance(body, AskedBody)
        return body, body.asked

    async def _checked(self, painting: CheckedImages, body: GenerateBody, request: Request) -> CheckedImages:
        assert isinstance(body, AskedBody)
        if body.hires is not None:  # before the first pass is painted in vain
            info = find_model(painting.request.model, self._engine.models)
            sides = {"min_side_px": self._config.min_size_px, "max_side_px": self._config.max_size_px}
            plan_size(info, (body.hires.width_px, body.hires.height_px), **sides, may_pad=False)
        return await super()._checked(painting, body, request)

    def _texts(self, painting: CheckedImages, body: GenerateBody) -> dict[str, str]:
        assert isinstance(body, AskedBody)
        return super()._texts(painting, body) | ({} if body.hires is None else body.hires.texts)

    async def _start(self, body: GenerateBody, request: Request, client: str) -> tuple[GenerateBody, Start | None]:
        assert isinstance(body, AskedBody)
        if not isinstance(body.asked, Img2ImgBody):
            return body, None
        return body, await self._decoded(request, client, partial(start_of, body.asked, body.width, body.height))

    async def _check(self, body: GenerateBody, request: Request, client: str) -> tuple[CheckedImages, Place]:
        assert isinstance(body, AskedBody)
        painting, place = await super()._check(body, request, client)
        if body.asked.force_task_id and painting.safety is None:
            num_steps = painting.request.diffusion.num_steps or USUAL_STEPS
            watched = msgspec.structs.replace(painting.request, preview_every=math.ceil(num_steps / PREVIEWS))
            painting = msgspec.structs.replace(painting, request=watched)
        refiner = find_model(painting.request.model, self._engine.models).refiner
        warnings = (*painting.warnings, *warnings_of(body.asked), *ignored_refiner(body.asked, refiner))
        return msgspec.structs.replace(painting, asked=body, warnings=warnings), place

    async def _answer(self, painting: CheckedImages, ticket: Ticket) -> Response:
        body = painting.asked
        assert isinstance(body, AskedBody)
        task = body.asked.force_task_id or painting.request.request_id
        further = 0.0 if body.hires is None else body.hires.work / work_of(painting.request)
        job = PolledJob(
            painting.request.client, task, painting.request.num_images, further, write=painting.preview_file
        )
        with self._jobs.listed(job):

            def watch(event: object) -> None:
                job.watch(event)
                if body.hires is None:
                    ticket.watch(event)
                else:
                    ticket.count(event)

            results = passes = await self._paint(painting.request, watch, job)
            last, firsts = painting, dict[tuple[int, int | None], FirstPass]()
            if body.hires is not None and not job.stop.done():
                job.next_pass()
                plan = painting.plan
                size = plan.width_px, plan.height_px
                firsts = {_seeds(result): FirstPass(result, *size, body.hires.upscaler) for result in results}
                last, results = await self._enlarge(painting, body, results, ticket, job)
                passes = [*passes, *results]
        painted = (text for result in passes for text in result.warnings)
        warnings = list(dict.fromkeys([*painting.warnings, *last.warnings, *painted]))
        texts = [infotext_of(last, result, firsts.get(_seeds(result))) for result in results]
        sent = [] if body.asked.send_images is False else [*zip(results, texts, strict=True)]
        told = await asyncio.gather(*(self._in_thread(last.num_pixels, encoded, last, *each) for each in sent))
        content = await ANSWERS.run(answer_of, last, body, results, texts, passes, told, warnings)
        return json_response(content, warnings)

    async def _paint(
        self, request: GenerationRequest, watch: Callable[[object], None], job: PolledJob
    ) -> list[ImageResult]:
        """Return the pictures of ``request``; unfinished ones once ``job`` is to stop. Raises what went wrong, where
        there is none.
        """
        results: list[ImageResult] = []
        lost: list[ImageFailed] = []

        async def collect() -> None:
            async with self._engine.submit(request, watch, is_whole=True) as events:
                async for event in events:
                    match event:
                        case Painted():
                            results.append(event.result)
                        case ImageFailed():
                            lost.append(event)

        collecting = asyncio.create_task(collect())
        try:
            await first_of(collecting, job.stop, timeout_s=self._config.request_timeout_s)
            if job.stop.done() and not collecting.done():
                self._engine.interrupt(request.request_id)
                await asyncio.wait([collecting], timeout=self._config.request_timeout_s)
            if collecting.done() and not job.stop.done():
                collecting.result()
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
        if not results and lost and not job.stop.done():
            raise DiffserveError(lost[0].message, code=lost[0].code)
        return sorted(results, key=lambda result: result.image_index)

    async def _enlarge(
        self, painting: CheckedImages, body: AskedBody, results: list[ImageResult], ticket: Ticket, job: PolledJob
    ) -> tuple[CheckedImages, list[ImageResult]]:
        """The second pass over each of ``results``, all at once."""
        hires = body.hires
        assert hires is not None
        first = painting.request
        info = find_model(first.model, self._engine.models)
        left_s = (first.deadline_s or self._config.request_timeout_s) - job.elapsed_s
        if left_s <= 0.0:
            raise DeadlineExceeded("the deadline passed before the picture was enlarged.")

        def plan(result: ImageResult) -> CheckedImages:
            start = Start(StartPicture(picture=hires.enlarge(painting.deliver(result.picture))), hires.strength)
            again = plan_painting(
                second_pass(body),
                info,
                self._config,
                new_request_id(),
                client=first.client,
                share=first.share,
                start=start,
            )
            varied = msgspec.structs.replace(again.request.diffusion, variation_seed=result.variation_seed)
            own = {"seed": result.seed, "diffusion": varied, "num_images": 1, "deadline_s": left_s}
            request = msgspec.structs.replace(again.request, **own)
            return msgspec.structs.replace(
                again, request=request, kind=painting.kind, marks=painting.marks, safety=painting.safety,
                history=painting.history,
            )  # fmt: skip

        planned = await asyncio.gather(*(self._in_thread(painting.num_pixels, plan, result) for result in results))

        def watching(index: int) -> Callable[[object], None]:
            def watch(event: object) -> None:
                job.watch(event, index)
                ticket.count(event)
                if isinstance(event, (Painted, ImageFailed, Failed)):
                    ticket.advance(index, 1.0)

            return watch

        runs = [self._paint(one.request, watching(place), job) for place, one in enumerate(planned)]
        painted = await asyncio.gather(*runs)
        again = planned[0] if planned else painting
        found = [result for group in painted for result in group]
        return again, [msgspec.structs.replace(one, image_index=place) for place, one in enumerate(found)]


class Img2Img(Txt2Img):
    """The endpoint of pictures from a picture, all of it or where a mask says so."""

    asked = Img2ImgBody


def work_of(request: GenerationRequest) -> float:
    """Pixels times steps, as far as it says."""
    return (request.width_px or 512) * (request.height_px or 512) * (request.diffusion.num_steps or USUAL_STEPS)


def encoded(painting: CheckedImages, result: ImageResult, infotext: str) -> tuple[str, bool]:
    """A picture as a PNG in base64, ``infotext`` in it, and whether it is a black one, for nobody shall see what was
    painted. Takes a while: call it in a thread.
    """
    width_px, height_px = painting.plan.width_px, painting.plan.height_px
    try:
        file = painting.file(result, infotext)
    except ModerationBlocked:
        black = Picture(width_px=width_px, height_px=height_px, data=bytes(3 * width_px * height_px))
        return base64.b64encode(encode_image(black)).decode("ascii"), True
    if painting.history is not None:
        painting.history.add(painting.request, (width_px, height_px), result, file, new_name("png"))
    return base64.b64encode(file).decode("ascii"), False


def infotext_of(painting: CheckedImages, result: ImageResult, first: FirstPass | None) -> str:
    """How ``result`` was painted."""
    plan = painting.plan
    return write_infotext(result, width_px=plan.width_px, height_px=plan.height_px, first=first)


def answer_of(
    painting: CheckedImages,
    body: AskedBody,
    results: list[ImageResult],
    texts: list[str],
    passes: list[ImageResult],
    told: list[tuple[str, bool]],
    warnings: list[str],
) -> bytes:
    """The whole body of an answer; ``told``: what ``encoded`` says of each."""
    flags = {} if painting.safety is None else {"nsfw_content_detected": [is_blocked for _, is_blocked in told]}
    info = json.dumps(_info(painting, body.asked, results, texts, passes) | flags | {"warnings": warnings})
    images = [file for file, _ in told]
    return msgspec.json.encode({"images": images, "parameters": echo_of(body.asked), "info": info})


def _info(
    painting: CheckedImages,
    asked: Txt2ImgBody,
    results: list[ImageResult],
    texts: list[str],
    passes: list[ImageResult],
) -> dict[str, Any]:
    """What A1111 says of the pictures, and what ``passes`` took of the device. Of none, interrupted, what was
    asked.
    """
    first = results[0] if results else None
    request = painting.request
    prompt, negative = (first.prompt, first.negative_prompt) if first else (request.prompt, request.negative_prompt)
    sampler = first.sampler if first else request.diffusion.sampler or ""
    return {
        "prompt": prompt,
        "all_prompts": [result.prompt for result in results],
        "negative_prompt": negative,
        "all_negative_prompts": [result.negative_prompt for result in results],
        "seed": first.seed if first else -1,
        "all_seeds": [result.seed for result in results],
        "subseed": _subseed(first),
        "all_subseeds": [_subseed(result) for result in results],
        "subseed_strength": first.variation_strength if first else 0,
        "width": painting.plan.width_px,
        "height": painting.plan.height_px,
        "sampler_name": SAMPLERS[sampler].label if sampler in SAMPLERS else sampler,
        "cfg_scale": first.guidance_scale if first else None,
        "steps": first.num_steps if first else None,
        "batch_size": asked.batch_size or 1,
        "restore_faces": False,
        "face_restoration_model": None,
        "sd_model_name": first.model if first else None,
        "sd_model_hash": first.model_digest[:10] if first else None,
        "sd_vae_name": None,
        "sd_vae_hash": None,
        "seed_resize_from_w": -1,
        "seed_resize_from_h": -1,
        "denoising_strength": first.strength if first else None,
        "extra_generation_params": _extra(first),
        "index_of_first_image": 0,
        "infotexts": texts,
        "styles": asked.styles or [],
        "job_timestamp": "0",
        "clip_skip": first.clip_skip if first else 1,
        "is_using_inpainting_conditioning": False,
        "version": f"diffserve {__version__}",
        "timings": [timings(result) for result in results],
        **painting.spent(sum(result.device_s + result.discarded_device_s for result in passes)),
    }


def _seeds(result: ImageResult) -> tuple[int, int | None]:
    return result.seed, result.variation_seed


def _subseed(result: ImageResult | None) -> int:
    return -1 if result is None or result.variation_seed is None else result.variation_seed


def _extra(result: ImageResult | None) -> dict[str, Any]:
    if result is None or result.sigma_schedule is None:
        return {}
    return {"Schedule type": SCHEDULE_LABELS.get(result.sigma_schedule, result.sigma_schedule)}
