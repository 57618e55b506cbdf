"""``POST /sdapi/v1/txt2img`` and ``img2img``: A1111's requests and answers over the shared image service."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.errors import DeadlineExceeded, DiffserveError, ModerationBlocked
from diffserve.api.sizes import plan_size
from diffserve.api.types import Failed, ImageFailed, ImageFinished, ImageResult, Picture, new_request_id
from diffserve.media.images import encode_image
from diffserve.media.infotext import SCHEDULE_LABELS, FirstPass, write_infotext
from diffserve.media.start_picture import StartPicture
from diffserve.models.loras import with_tags
from diffserve.service.a1111.conversion import USUAL_STEPS, Hires, convert_body, start_of, warnings_of
from diffserve.service.a1111.jobs import Jobs, PolledJob
from diffserve.service.a1111.schemas import Img2ImgBody, Txt2ImgBody, ignored_refiner
from diffserve.service.a1111.styles import read_styles
from diffserve.service.admission import Ticket
from diffserve.service.endpoint import RequestPlan
from diffserve.service.http.streams import Events
from diffserve.service.images.image_endpoint import ImageServiceEndpoint
from diffserve.service.images.image_store import new_name
from diffserve.service.images.inputs import Start
from diffserve.service.images.openai_encoder import Collector, timings
from diffserve.service.images.plan import ImagePlan, plan_images
from diffserve.service.images.service import ImageService
from diffserve.service.lifecycle import first_of, json_response
from diffserve.service.threads import ANSWERS, LISTINGS
from diffserve.version import __version__
from schedulers import SAMPLERS

NUM_PREVIEWS: Final = 4
"""Number of previews of a request whose task is polled."""


class A1111Plan(RequestPlan, frozen=True, kw_only=True):
    """A resolved A1111 request: the plan of its images, the body that the answer repeats, and the second pass."""

    images: ImagePlan
    body: Txt2ImgBody
    hires: Hires | None

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the marks of the images."""
        return self.images.headers


class A1111Endpoint(ImageServiceEndpoint[Txt2ImgBody, A1111Plan]):
    """Endpoint of txt2img or img2img, depending on the class of its body.

    ``jobs`` are shared with the routes that report progress.
    """

    def __init__(self, service: ImageService, jobs: Jobs, body: type[Txt2ImgBody]) -> None:
        super().__init__(service)
        self._jobs = jobs
        self.body = body

    async def _plan(self, body: Txt2ImgBody, request: Request, client: str) -> A1111Plan:
        options = self._jobs.options(client)
        folder = Path(self._config.data_dir).expanduser()
        styles = await LISTINGS.run(read_styles, folder) if body.styles else []
        model = (body.override_settings or options).get("sd_model_checkpoint")
        refused = self._service.refused_fields(str(model).partition(" [")[0] if model else None)
        models = [served.name for served in self._engine.models]
        body, image_body, hires = convert_body(body, options, styles, refused, models)
        info = self._service.model(image_body.model)
        if hires is not None:  # refuse a size that is out of range before the first pass
            sides = {"min_side_px": self._config.min_size_px, "max_side_px": self._config.max_size_px}
            plan_size(info, (hires.width_px, hires.height_px), **sides, may_pad=False)
        start_reader = None
        if isinstance(body, Img2ImgBody):
            start_reader = partial(start_of, body, image_body.width, image_body.height)
        is_polled = bool(body.force_task_id) and not self._service.has_filter
        num_steps = image_body.num_inference_steps or USUAL_STEPS
        images = await self._service.plan(
            image_body,
            request,
            client,
            sources=(body,),
            start_reader=start_reader,
            rewriter="off",
            preview_every=math.ceil(num_steps / NUM_PREVIEWS) if is_polled else 0,
            warnings=(*warnings_of(body), *ignored_refiner(body, info.refiner)),
            texts=None if hires is None else hires.texts,
        )
        return A1111Plan(images=images, body=body, hires=hires, warnings=images.warnings, price=images.price)

    def _admit(self, plan: A1111Plan, client: str) -> AbstractContextManager[Ticket]:
        return self._service.admit(plan.images)

    def _events(self, plan: A1111Plan, ticket: Ticket) -> Events:
        raise NotImplementedError("A1111's API does not stream")  # A1111 bodies never set is_stream

    async def _answer(self, plan: A1111Plan, ticket: Ticket) -> Response:
        images, body, hires = plan.images, plan.body, plan.hires
        request = images.request
        task = body.force_task_id or request.request_id
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
                last, results = await self._enlarge(images, hires, results, ticket, job)
                passes = [*passes, *results]
        engine_warnings = (text for result in passes for text in result.warnings)
        warnings = list(dict.fromkeys([*images.warnings, *last.warnings, *engine_warnings]))
        infotexts = [infotext_of(last, result, first_passes.get(_seeds(result))) for result in results]
        to_encode = [] if body.send_images is False else [*zip(results, infotexts, strict=True)]
        files = await asyncio.gather(
            *(self._service.encode_in_thread(last.num_pixels, encode_result, last, *pair) for pair in to_encode)
        )
        content = await ANSWERS.run(encode_answer, last, body, results, infotexts, passes, files, warnings)
        return json_response(content, warnings)

    async def _generate(self, plan: ImagePlan, watch: Callable[[object], None], job: PolledJob) -> list[ImageResult]:
        """Return the images of a plan; unfinished ones if ``job`` is stopped.

        Raises:
            DiffserveError: The request failed, or all images did.
        """
        collector = Collector(plan)

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
        self, first: ImagePlan, hires: Hires, results: list[ImageResult], ticket: Ticket, job: PolledJob
    ) -> tuple[ImagePlan, list[ImageResult]]:
        """Run the second pass over all images at once; return a plan of it and its results."""
        info = self._service.model(first.request.model)
        left_s = (first.request.deadline_s or self._config.request_timeout_s) - job.elapsed_s
        if left_s <= 0.0:
            raise DeadlineExceeded("the deadline passed before the image was enlarged.")

        def plan_second(result: ImageResult) -> ImagePlan:
            start = Start(StartPicture(picture=hires.enlarge(first.deliver(result.picture))), hires.strength)
            seeds: dict[str, Any] = {"seed": result.seed, "variation_seed": result.variation_seed, "n": 1}
            if first.request.template and hires.repeats_prompt:
                seeds["prompt"] = with_tags(result.prompt, result.loras)
            return plan_images(
                hires.body.model_copy(update=seeds),
                info,
                self._config,
                new_request_id(),
                client=first.request.client,
                share=first.request.share,
                start=start,
                kind=first.kind,
                marks=first.marks,
                safety=first.safety,
                urls=first.urls,
                history=first.history,
                limit_s=left_s,
            )

        plans = await asyncio.gather(
            *(self._service.encode_in_thread(first.num_pixels, plan_second, result) for result in results)
        )

        def watcher(index: int) -> Callable[[object], None]:
            def watch(event: object) -> None:
                job.watch(event, index)
                ticket.count(event)
                if isinstance(event, (ImageFinished, ImageFailed, Failed)):
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


def encode_result(plan: ImagePlan, result: ImageResult, infotext: str) -> str | None:
    """Return an image as a PNG file in base64 and record it in the history; None if the safety filter blocks it.

    Takes a while: call it in a thread.
    """
    try:
        file = plan.file(result, infotext)
    except ModerationBlocked:
        return None
    if plan.history is not None:
        plan.history.add(plan.request, (plan.size.width_px, plan.size.height_px), result, file, new_name("png"))
    return base64.b64encode(file).decode("ascii")


def infotext_of(plan: ImagePlan, result: ImageResult, first: FirstPass | None) -> str:
    """Return the infotext of an image; ``first`` is the first pass of an enlarged one."""
    return write_infotext(result, width_px=plan.size.width_px, height_px=plan.size.height_px, first=first)


def encode_answer(
    plan: ImagePlan,
    body: Txt2ImgBody,
    results: list[ImageResult],
    infotexts: list[str],
    passes: list[ImageResult],
    files: list[str | None],
    warnings: list[str],
) -> bytes:
    """Return the body of an answer, with a black image in place of each blocked one.

    ``passes`` are the results of both passes, for the usage.
    """
    flags = {} if plan.safety is None else {"nsfw_content_detected": [file is None for file in files]}
    info = json.dumps(_info(plan, body, results, infotexts, passes) | flags | {"warnings": warnings})
    images = [_black_image(plan.size.width_px, plan.size.height_px) if file is None else file for file in files]
    return msgspec.json.encode({"images": images, "parameters": echo_of(body), "info": info})


def _black_image(width_px: int, height_px: int) -> str:
    black = Picture(width_px=width_px, height_px=height_px, data=bytes(3 * width_px * height_px))
    return base64.b64encode(encode_image(black)).decode("ascii")


def echo_of(body: Txt2ImgBody) -> dict[str, Any]:
    """Return ``parameters`` of the answer: the body, without its images unless ``include_init_images`` is set."""
    fields = body.model_dump(exclude_none=True)
    if isinstance(body, Img2ImgBody) and not body.include_init_images:
        for name in ("init_images", "mask"):
            fields.pop(name, None)
    return msgspec.to_builtins(fields)  # type: ignore[no-any-return]


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
