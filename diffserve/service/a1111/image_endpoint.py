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

from diffserve.api.errors import DiffserveError, ModerationBlocked
from diffserve.api.types import ImageResult, Picture
from diffserve.media.images import encode_image
from diffserve.media.infotext import SCHEDULE_LABELS, write_infotext
from diffserve.service.a1111.conversion import USUAL_STEPS, convert_body, start_of, warnings_of
from diffserve.service.a1111.jobs import Jobs, PolledJob
from diffserve.service.a1111.schemas import Img2ImgBody, Txt2ImgBody, ignored_refiner
from diffserve.service.a1111.styles import read_styles
from diffserve.service.admission import Ticket
from diffserve.service.endpoint import RequestPlan
from diffserve.service.http.streams import Events
from diffserve.service.images.image_endpoint import ImageServiceEndpoint
from diffserve.service.images.image_store import new_name
from diffserve.service.images.openai_encoder import Collector, timings
from diffserve.service.images.plan import ImagePlan
from diffserve.service.images.service import ImageService
from diffserve.service.lifecycle import first_of, json_response
from diffserve.service.threads import ANSWERS, LISTINGS
from diffserve.version import __version__
from schedulers import SAMPLERS

NUM_PREVIEWS: Final = 4
"""Number of previews of a request whose task is polled."""


class A1111Plan(RequestPlan, frozen=True, kw_only=True):
    """A resolved A1111 request: the plan of its images, and the body that the answer repeats."""

    images: ImagePlan
    body: Txt2ImgBody

    @property
    def num_images(self) -> int:
        """Number of images that the request makes, for the quota of its key."""
        return self.images.num_images

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
        has_networks = body.enable_hr or body.infotext
        networks = await LISTINGS.run(self._service.upscaler_networks) if has_networks else []
        body, image_body = convert_body(body, options, styles, refused, models, networks)
        info = self._service.model(image_body.model)
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
            warnings=(*warnings_of(body, networks), *ignored_refiner(body, info.refiner)),
        )
        return A1111Plan(images=images, body=body, warnings=images.warnings, price=images.price)

    def _admit(self, plan: A1111Plan, client: str) -> AbstractContextManager[Ticket]:
        return self._service.admit(plan.images)

    def _events(self, plan: A1111Plan, ticket: Ticket) -> Events:
        raise NotImplementedError("A1111's API does not stream")  # A1111 bodies never set is_stream

    async def _answer(self, plan: A1111Plan, ticket: Ticket) -> Response:
        images, body = plan.images, plan.body
        request = images.request
        task = body.force_task_id or request.request_id
        job = PolledJob(request.client, task, request.num_images, write=images.preview_file)
        with self._jobs.listed(job):

            def watch(event: object) -> None:
                job.watch(event)
                ticket.watch(event)

            results = await self._generate(images, watch, job)
        engine_warnings = (text for result in results for text in result.warnings)
        warnings = list(dict.fromkeys([*images.warnings, *engine_warnings]))
        infotexts = [infotext_of(images, result) for result in results]
        to_encode = [] if body.send_images is False else [*zip(results, infotexts, strict=True)]
        files = await asyncio.gather(
            *(self._service.encode_in_thread(images.num_pixels, encode_result, images, *pair) for pair in to_encode)
        )
        content = await ANSWERS.run(encode_answer, images, body, results, infotexts, files, warnings)
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


def encode_result(plan: ImagePlan, result: ImageResult, infotext: str) -> str | None:
    """Return an image as a PNG file in base64 and record it in the history; None if the safety filter blocks it.

    Takes a while: call it in a thread.
    """
    try:
        file = plan.file(result, infotext)
    except ModerationBlocked:
        return None
    if plan.history is not None:
        plan.history.add(plan.request, plan.size, result, file, new_name("png"))
    return base64.b64encode(file).decode("ascii")


def infotext_of(plan: ImagePlan, result: ImageResult) -> str:
    """Return the infotext of an image."""
    width_px, height_px = plan.size.recorded_px
    return write_infotext(result, width_px=width_px, height_px=height_px)


def encode_answer(
    plan: ImagePlan,
    body: Txt2ImgBody,
    results: list[ImageResult],
    infotexts: list[str],
    files: list[str | None],
    warnings: list[str],
) -> bytes:
    """Return the body of an answer, with a black image in place of each blocked one."""
    flags = {} if plan.safety is None else {"nsfw_content_detected": [file is None for file in files]}
    info = json.dumps(_info(plan, body, results, infotexts) | flags | {"warnings": warnings})
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


def _info(plan: ImagePlan, body: Txt2ImgBody, results: list[ImageResult], infotexts: list[str]) -> dict[str, Any]:
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
        "denoising_strength": _strength(first),
        "extra_generation_params": _extra(first),
        "index_of_first_image": 0,
        "infotexts": infotexts,
        "styles": body.styles or [],
        "job_timestamp": "0",
        "clip_skip": first.clip_skip if first else 1,
        "is_using_inpainting_conditioning": False,
        "version": f"diffserve {__version__}",
        "timings": [timings(result) for result in results],
        **plan.spent(sum(result.device_s + result.discarded_device_s for result in results)),
    }


def _strength(result: ImageResult | None) -> float | None:
    """Return the strength with a start image, or that of the second pass of hires fix."""
    if result is None:
        return None
    return result.hires_strength if result.has_hires else result.strength


def _subseed(result: ImageResult | None) -> int:
    return -1 if result is None or result.variation_seed is None else result.variation_seed


def _extra(result: ImageResult | None) -> dict[str, Any]:
    if result is None or result.sigma_schedule is None:
        return {}
    return {"Schedule type": SCHEDULE_LABELS.get(result.sigma_schedule, result.sigma_schedule)}
