"""``POST /sdapi/v1/txt2img`` and ``img2img``: A1111's requests and answers over the shared image service."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.errors import DeadlineExceeded, DiffserveError, ModerationBlocked
from diffserve.api.sizes import plan_size
from diffserve.api.types import Failed, ImageFailed, ImageResult, Painted, Picture, new_request_id
from diffserve.media.images import encode_image
from diffserve.media.infotext import SCHEDULE_LABELS, FirstPass, write_infotext
from diffserve.media.start_picture import StartPicture
from diffserve.service.a1111.asking import (
    USUAL_STEPS,
    AskedBody,
    Hires,
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
from diffserve.service.admission import Backlog, Ticket
from diffserve.service.endpoint import AdmissionSlot, Endpoint, RequestPlan
from diffserve.service.http.streams import Events
from diffserve.service.images.image_store import new_name
from diffserve.service.images.inputs import Start
from diffserve.service.images.openai_encoder import timings
from diffserve.service.images.plan import ImagePlan, plan_images
from diffserve.service.images.service import Collector, ImageService
from diffserve.service.lifecycle import first_of, json_response, read_body
from diffserve.service.threads import ANSWERS, LISTINGS
from diffserve.version import __version__
from schedulers import SAMPLERS

NUM_PREVIEWS: Final = 4
"""Number of previews of a request whose task is polled."""


class A1111Plan(RequestPlan, frozen=True, kw_only=True):
    """A resolved A1111 request: the plan of its images, and the body that the answer repeats."""

    images: ImagePlan
    body: AskedBody

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the marks of the images."""
        return self.images.headers


class EncodedImage(NamedTuple):
    """An image of an answer: a PNG file in base64, black if the safety filter blocked it."""

    file: str
    is_blocked: bool


class A1111Endpoint(Endpoint[AskedBody, A1111Plan]):
    """Endpoint of txt2img or img2img, depending on the class of its body.

    ``jobs`` are shared with the routes that report progress.
    """

    def __init__(self, service: ImageService, jobs: Jobs, body: type[Txt2ImgBody]) -> None:
        super().__init__(service.engine, service.config, service.gate, service.admission, in_flight=service.in_flight)
        self._service = service
        self._jobs = jobs
        self._body = body

    @property
    def _backlog(self) -> Backlog:
        return self._admission.images

    async def _read(self, request: Request) -> AskedBody:
        body = await read_body(request, self._body)
        with self._admission.clients.known(request) as client:
            options = self._jobs.options(client)
        folder = Path(self._config.data_dir).expanduser()
        styles = await LISTINGS.run(read_styles, folder) if body.styles else []
        model = (body.override_settings or options).get("sd_model_checkpoint")
        refused = self._service.refused_fields(str(model).partition(" [")[0] if model else None)
        return ask(body, options, styles, refused, [served.name for served in self._engine.models])

    async def _plan(self, body: AskedBody, request: Request, client: str) -> tuple[A1111Plan, AdmissionSlot]:
        a1111_body, hires = body.asked, body.hires
        info = self._service.model(body.model)
        if hires is not None:  # refuse a size that is out of range before the first pass
            sides = {"min_side_px": self._config.min_size_px, "max_side_px": self._config.max_size_px}
            plan_size(info, (hires.width_px, hires.height_px), **sides, may_pad=False)
        start_reader = None
        if isinstance(a1111_body, Img2ImgBody):
            start_reader = partial(start_of, a1111_body, body.width, body.height)
        is_polled = bool(a1111_body.force_task_id) and not self._service.has_filter
        num_steps = body.num_inference_steps or USUAL_STEPS
        images = await self._service.plan(
            body,
            request,
            client,
            sources=(a1111_body,),
            start_reader=start_reader,
            rewriter="off",
            preview_every=math.ceil(num_steps / NUM_PREVIEWS) if is_polled else 0,
            warnings=(*warnings_of(a1111_body), *ignored_refiner(a1111_body, info.refiner)),
            texts=None if hires is None else hires.texts,
        )
        plan = A1111Plan(images=images, body=body, warnings=images.warnings, price=images.price)
        return plan, self._service.admit(images)

    def _events(self, plan: A1111Plan, ticket: Ticket) -> Events:
        raise NotImplementedError("A1111's API has no streams")  # A1111 bodies never set is_stream

    async def _answer(self, plan: A1111Plan, ticket: Ticket) -> Response:
        images, a1111_body, hires = plan.images, plan.body.asked, plan.body.hires
        request = images.request
        task = a1111_body.force_task_id or request.request_id
        second_work = 0.0 if hires is None else hires.work / first_pass_work(images)
        job = PolledJob(request.client, task, request.num_images, second_work, write=images.preview_file)
        with self._jobs.listed(job):

            def watch(event: object) -> None:
                job.watch(event)
                if hires is None:
                    ticket.watch(event)
                else:
                    ticket.count(event)

            results = passes = await self._generate(images, watch, job)
            last, first_passes = images, dict[tuple[int, int | None], FirstPass]()
            if hires is not None and not job.stop.done():
                job.next_pass()
                size = images.size.width_px, images.size.height_px
                first_passes = {_seeds(result): FirstPass(result, *size, hires.upscaler) for result in results}
                last, results = await self._enlarge(plan, hires, results, ticket, job)
                passes = [*passes, *results]
        engine_warnings = (text for result in passes for text in result.warnings)
        warnings = list(dict.fromkeys([*images.warnings, *last.warnings, *engine_warnings]))
        infotexts = [infotext_of(last, result, first_passes.get(_seeds(result))) for result in results]
        to_encode = [] if a1111_body.send_images is False else [*zip(results, infotexts, strict=True)]
        files = await asyncio.gather(
            *(self._service.encode_in_thread(last.num_pixels, encode_result, last, *pair) for pair in to_encode)
        )
        content = await ANSWERS.run(encode_answer, last, a1111_body, results, infotexts, passes, files, warnings)
        return json_response(content, warnings)

    async def _generate(self, plan: ImagePlan, watch: Callable[[object], None], job: PolledJob) -> list[ImageResult]:
        """Return the images of a plan; unfinished ones if ``job`` is stopped.

        Raises:
            DiffserveError: The request failed, or all images did.
        """
        collector = Collector()

        async def collect() -> None:
            async for _ in self._service.stream(plan, collector, watch, is_whole=True):
                pass

        limit_s = self._config.request_timeout_s
        collecting = asyncio.create_task(collect())
        try:
            await first_of(collecting, job.stop, timeout_s=limit_s)
            if job.stop.done() and not collecting.done():
                self._engine.interrupt(plan.request.request_id)
                await asyncio.wait([collecting], timeout=limit_s)
            if collecting.done() and not job.stop.done():
                collecting.result()
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
        if not collector.results and collector.failures and not job.stop.done():
            raise DiffserveError(collector.failures[0].message, code=collector.failures[0].code)
        return collector.results

    async def _enlarge(
        self, plan: A1111Plan, hires: Hires, results: list[ImageResult], ticket: Ticket, job: PolledJob
    ) -> tuple[ImagePlan, list[ImageResult]]:
        """Run the second pass over all images at once; return a plan of it and its results."""
        first = plan.images
        info = self._service.model(first.request.model)
        left_s = (first.request.deadline_s or self._config.request_timeout_s) - job.elapsed_s
        if left_s <= 0.0:
            raise DeadlineExceeded("the deadline passed before the image was enlarged.")
        body = second_pass(plan.body)

        def plan_second(result: ImageResult) -> ImagePlan:
            start = Start(StartPicture(picture=hires.enlarge(first.deliver(result.picture))), hires.strength)
            seeds = {"seed": result.seed, "variation_seed": result.variation_seed, "n": 1}
            return plan_images(
                body.model_copy(update=seeds),
                info,
                self._config,
                new_request_id(),
                client=first.request.client,
                share=first.request.share,
                start=start,
                kind=first.kind,
                delivery=first.delivery,
                limit_s=left_s,
            )

        plans = await asyncio.gather(
            *(self._service.encode_in_thread(first.num_pixels, plan_second, result) for result in results)
        )

        def watcher(index: int) -> Callable[[object], None]:
            def watch(event: object) -> None:
                job.watch(event, index)
                ticket.count(event)
                if isinstance(event, (Painted, ImageFailed, Failed)):
                    ticket.advance(index, 1.0)

            return watch

        runs = [self._generate(second, watcher(index), job) for index, second in enumerate(plans)]
        groups = await asyncio.gather(*runs)
        finished = [result for group in groups for result in group]
        renumbered = [msgspec.structs.replace(result, image_index=index) for index, result in enumerate(finished)]
        return plans[0] if plans else first, renumbered


def first_pass_work(plan: ImagePlan) -> float:
    """Return the work of the first pass in pixels times steps, the unit of ``Hires.work``."""
    request = plan.request
    return (request.width_px or 512) * (request.height_px or 512) * (request.diffusion.num_steps or USUAL_STEPS)


def encode_result(plan: ImagePlan, result: ImageResult, infotext: str) -> EncodedImage:
    """Filter, watermark and encode an image and record it in the history; takes a while, so call it in a thread."""
    width_px, height_px = plan.size.width_px, plan.size.height_px
    try:
        file = plan.file(result, infotext)
    except ModerationBlocked:
        black = Picture(width_px=width_px, height_px=height_px, data=bytes(3 * width_px * height_px))
        return EncodedImage(base64.b64encode(encode_image(black)).decode("ascii"), is_blocked=True)
    if plan.delivery.history is not None:
        plan.delivery.history.add(plan.request, (width_px, height_px), result, file, new_name("png"))
    return EncodedImage(base64.b64encode(file).decode("ascii"), is_blocked=False)


def infotext_of(plan: ImagePlan, result: ImageResult, first: FirstPass | None) -> str:
    """Return the infotext of an image; ``first`` is the first pass of an enlarged one."""
    return write_infotext(result, width_px=plan.size.width_px, height_px=plan.size.height_px, first=first)


def encode_answer(
    plan: ImagePlan,
    body: Txt2ImgBody,
    results: list[ImageResult],
    infotexts: list[str],
    passes: list[ImageResult],
    files: list[EncodedImage],
    warnings: list[str],
) -> bytes:
    """Return the body of an answer; ``passes`` are the results of both passes, for the usage."""
    flags = {}
    if plan.delivery.safety is not None:
        flags = {"nsfw_content_detected": [image.is_blocked for image in files]}
    info = json.dumps(_info(plan, body, results, infotexts, passes) | flags | {"warnings": warnings})
    return msgspec.json.encode({"images": [image.file for image in files], "parameters": echo_of(body), "info": info})


def _info(
    plan: ImagePlan, body: Txt2ImgBody, results: list[ImageResult], infotexts: list[str], passes: list[ImageResult]
) -> dict[str, Any]:
    """Return A1111's description of the images; of an interrupted request without images, the requested parameters."""
    first = results[0] if results else None
    request = plan.request
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
        "width": plan.size.width_px,
        "height": plan.size.height_px,
        "sampler_name": SAMPLERS[sampler].label if sampler in SAMPLERS else sampler,
        "cfg_scale": first.guidance_scale if first else None,
        "steps": first.num_steps if first else None,
        "batch_size": body.batch_size or 1,
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
        "infotexts": infotexts,
        "styles": body.styles or [],
        "job_timestamp": "0",
        "clip_skip": first.clip_skip if first else 1,
        "is_using_inpainting_conditioning": False,
        "version": f"diffserve {__version__}",
        "timings": [timings(result) for result in results],
        **plan.spent(sum(result.device_s + result.discarded_device_s for result in passes)),
    }


def _seeds(result: ImageResult) -> tuple[int, int | None]:
    return result.seed, result.variation_seed


def _subseed(result: ImageResult | None) -> int:
    return -1 if result is None or result.variation_seed is None else result.variation_seed


def _extra(result: ImageResult | None) -> dict[str, Any]:
    if result is None or result.sigma_schedule is None:
        return {}
    return {"Schedule type": SCHEDULE_LABELS.get(result.sigma_schedule, result.sigma_schedule)}
