"""Routes of ``/sdapi/v1`` that do not generate images: lists, options, progress, interruption, png-info."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.types import FILTERS, ModelInfo
from diffserve.media.decoders import ImageDecoder, shared_decoders
from diffserve.media.infotext import SCHEDULE_LABELS, parse_infotext
from diffserve.models.controlnets import MAX_CONTROLNETS, ControlNetFolder
from diffserve.models.learned_samplers import LearnedSamplers
from diffserve.models.loras import LoraFolders
from diffserve.models.references import ReferenceFolder
from diffserve.models.upscalers import UpscalerFolders, read_upscaler
from diffserve.service.a1111.controlnets import API_VERSION, control_types, detect, module_list
from diffserve.service.a1111.jobs import IDLE, Jobs, PolledJob
from diffserve.service.a1111.schemas import DetectBody, OptionsBody, PngInfoBody, ProgressBody, ignored_settings
from diffserve.service.a1111.styles import FILE, read_styles
from diffserve.service.engine.engines import Engines
from diffserve.service.http.addresses import Clients
from diffserve.service.http.errors import A1111 as PREFIX
from diffserve.service.http.errors import CONTROLNET
from diffserve.service.images.fetching import Fetcher
from diffserve.service.images.inputs import image_bytes
from diffserve.service.lifecycle import read_body, warning_headers, while_connected
from diffserve.service.models import find_model
from diffserve.service.threads import ANSWERS, LISTINGS
from diffserve.settings.config import ServeConfig
from schedulers import SAMPLERS

EMPTY: Final = {
    "sd-vae": [], "sd-modules": [], "hypernetworks": [], "face-restorers": [], "realesrgan-models": [],
    "extensions": [], "latent-upscale-modes": [], "cmd-flags": {}, "memory": {"ram": {}, "cuda": {}},
}  # fmt: skip
"""Empty answers of lists that clients read and this server does not have."""

SCRIPTS: Final = {kind: ["controlnet"] for kind in ("txt2img", "img2img")}
SCRIPT_INFO: Final[list[dict[str, Any]]] = [
    {"name": "controlnet", "is_alwayson": True, "is_img2img": is_img2img, "args": []} for is_img2img in (False, True)
]
"""The only supported script of A1111; clients look for ControlNets here."""

DONE_ALREADY: Final = ("refresh-checkpoints", "refresh-loras", "refresh-vae", "unload-checkpoint", "reload-checkpoint")
"""Routes without an effect: folders are read at every request, and models are loaded and unloaded by use."""

AnyRoute = TypeVar("AnyRoute", bound=Callable[..., Any])


class A1111Routes:
    """A1111's routes on ``app``; ``clients`` names the client of a request."""

    def __init__(
        self, app: FastAPI, engine: Engines, config: ServeConfig, clients: Clients, jobs: Jobs, fetcher: Fetcher
    ) -> None:
        self._app = app
        self._engine = engine
        self._folder = Path(config.data_dir).expanduser()
        self._clients = clients
        self._jobs = jobs
        self._add_lists()
        self._add_options()
        self._add_progress()
        self._add_controlnets(fetcher)

        async def png_info(request: Request) -> Response:
            return await _png_info(request, fetcher, clients)

        self._post(f"{PREFIX}/png-info", png_info, "Read the parameters in an image file", PngInfoBody)

    def _get(self, name: str, content: Callable[[], Any], summary: str, prefix: str = PREFIX) -> None:
        async def answer() -> Response:
            return JSONResponse(await LISTINGS.run(content))

        self._app.add_api_route(f"{prefix}/{name}", answer, methods=["GET"], summary=summary)

    def _post(self, path: str, answer: Callable[..., Any], summary: str, body: type[Any] | None = None) -> None:
        described: dict[str, Any] = {}
        if body is not None:
            schema = body.model_json_schema()
            described = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        self._app.add_api_route(path, answer, methods=["POST"], summary=summary, openapi_extra=described)

    def _info(self, name: str | None = None) -> ModelInfo:
        return find_model(name, self._engine.models)

    def _models(self) -> list[dict[str, Any]]:
        return [model_entry(model.info) for model in self._engine.models if model.info is not None]

    def _samplers(self) -> list[dict[str, Any]]:
        info = self._engine.models[0].info if self._engine.models else None
        return SAMPLER_LIST if info is None else sampler_list(info)

    def _add_lists(self) -> None:
        self._get("sd-models", self._models, "The models")
        self._get("samplers", self._samplers, "The samplers")
        self._get("schedulers", lambda: SCHEDULE_LIST, "List the noise schedules")
        self._get("upscalers", self._upscalers, "List the upscalers")
        self._get("prompt-styles", self._styles, f"List the styles in {FILE}")
        self._get("loras", self._loras, "The adapters")
        self._get("embeddings", self._embeddings, "The embeddings")
        self._get("scripts", lambda: SCRIPTS, "List the scripts that a request may use")
        self._get("script-info", lambda: SCRIPT_INFO, "Describe the scripts")
        for name, nothing in EMPTY.items():
            self._get(name, lambda nothing=nothing: nothing, "Empty: not supported")  # type: ignore[misc]

    def _add_controlnets(self, fetcher: Fetcher) -> None:
        """Add the routes of A1111's ControlNet extension."""

        def models() -> list[str]:
            info = self._info()
            return list(ControlNetFolder(info.controlnet_dir, info.dtype, info.text_width).names())

        def adapters() -> list[str]:
            info = self._info()
            return list(ReferenceFolder(info.reference_dir, info.dtype, info.text_width).names())

        async def answer(request: Request) -> Response:
            return await detect(request, fetcher, self._clients)

        for name, content, summary in (
            ("version", lambda: {"version": API_VERSION}, "Version of the API of A1111's ControlNet extension"),
            ("settings", lambda: {"control_net_unit_count": MAX_CONTROLNETS}, "Number of ControlNets per image"),
            ("model_list", lambda: {"model_list": [*models(), *adapters()]}, "The ControlNets and IP-Adapters"),
            ("module_list", lambda: module_list(adapters()), "List the ControlNet preprocessors"),
            (
                "control_types",
                lambda: control_types(models(), adapters()),
                "List ControlNets and preprocessors by type",
            ),
        ):
            self._get(name, content, summary, CONTROLNET)
        self._post(f"{CONTROLNET}/detect", answer, "Create control maps from images", DetectBody)

    def _upscalers(self) -> list[dict[str, Any]]:
        """Return A1111's filters, then the networks."""
        usable = UpscalerFolders(self._info().upscaler_dir).usable()
        names = {"model_name": None, "model_path": None, "model_url": None}
        return UPSCALER_LIST + [
            {"name": name, **names, "scale": read_upscaler(path).shape.scale} for name, path in usable.items()
        ]

    def _styles(self) -> list[dict[str, str]]:
        return [style._asdict() for style in read_styles(self._folder)]

    def _loras(self) -> list[dict[str, Any]]:
        """Return the LoRAs in A1111's form: by the last part of their names if it is unique."""
        info = self._info()
        folders = LoraFolders(info.lora_dirs, info.text_width)
        names = folders.names()
        last_parts = [name.rpartition("/")[2] for name in names]
        short = [last if last_parts.count(last) == 1 else name for name, last in zip(names, last_parts, strict=True)]
        return [
            {"name": name, "alias": full, "path": f"{full}.safetensors", "metadata": folders.metadata(full)}
            for name, full in zip(short, names, strict=True)
        ]

    def _embeddings(self) -> dict[str, Any]:
        """Return the embeddings in A1111's form; those that cannot be used have a ``reason`` in addition."""
        info = self._info()
        entry = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None, "shape": 0, "vectors": 0}
        return {
            "loaded": dict.fromkeys(info.learnt_words, entry),
            "skipped": {word: entry | {"reason": reason} for word, reason in info.refused_words.items()},
        }

    def _add_options(self) -> None:
        async def get_options(request: Request) -> Response:
            with self._clients.name_of(request) as client:
                options = self._jobs.options(client)
            defaults = {
                "sd_model_checkpoint": title_of(self._info()),
                "CLIP_stop_at_last_layers": 1,
                "samples_format": "png",
            }
            return JSONResponse(defaults | options)

        async def set_options(request: Request) -> Response:
            body = await read_body(request, OptionsBody)
            options = body.model_dump(include={"sd_model_checkpoint", "CLIP_stop_at_last_layers"}, exclude_unset=True)
            if name := options.get("sd_model_checkpoint"):
                self._info(model_of(str(name)))
            with self._clients.name_of(request) as client:
                self._jobs.set_options(client, options)
            sentences = [f"{name} has no effect." for name in ignored_settings(body.model_extra or {})]
            return JSONResponse(None, headers=warning_headers(sentences))

        self._app.add_api_route(f"{PREFIX}/options", get_options, methods=["GET"], summary="Settings of this client")
        self._post(f"{PREFIX}/options", set_options, "Change settings of this client", OptionsBody)

    def _add_progress(self) -> None:
        async def progress(request: Request) -> Response:
            with self._clients.name_of(request) as client:
                jobs = self._jobs.of(client)
            if not jobs:
                state = {"progress": 0.0, "eta_relative": 0.0, "state": IDLE, "current_image": None, "textinfo": None}
                return JSONResponse(state)
            skips_image = request.query_params.get("skip_current_image", "").lower() in ("true", "1")
            image = None if skips_image else await ANSWERS.run(_preview, jobs[0])
            waits = None if jobs[0].has_begun else "Waiting..."
            state = {"progress": jobs[0].progress, "eta_relative": jobs[0].seconds_left, "state": jobs[0].state()}
            return JSONResponse(state | {"current_image": image, "textinfo": waits})

        async def task_progress(request: Request) -> Response:
            body = await read_body(request, ProgressBody)
            with self._clients.name_of(request) as client:
                job, is_over = self._jobs.find(client, body.id_task), self._jobs.is_over(client, body.id_task)
            state: dict[str, Any] = {
                "active": job is not None and job.has_begun, "queued": job is not None and not job.has_begun,
                "completed": is_over and job is None, "progress": None, "eta": None, "live_preview": None,
                "id_live_preview": -1, "textinfo": "Waiting...",
            }  # fmt: skip
            if job is not None:
                state |= {"progress": job.progress, "eta": job.seconds_left, "id_live_preview": job.num_previews}
                state["textinfo"] = None if job.has_begun else "In queue..."
                if body.live_preview is not False and body.id_live_preview != job.num_previews:
                    image = await ANSWERS.run(_preview, job)
                    state["live_preview"] = image and f"data:image/png;base64,{image}"
            return JSONResponse(state)

        async def pending(request: Request) -> Response:
            with self._clients.name_of(request) as client:
                tasks = [job.task for job in self._jobs.of(client)]
            return JSONResponse({"size": len(tasks), "tasks": tasks})

        def stops(how: str, num_jobs: int | None) -> Callable[[Request], Any]:
            async def stop(request: Request) -> Response:
                with self._clients.name_of(request) as client:
                    self._jobs.stop(client, how, num_jobs)
                return JSONResponse({} if num_jobs is None else None)

            return stop

        async def nothing() -> Response:
            return JSONResponse(None)

        description = "Whether to omit the preview image."
        skip = {"name": "skip_current_image", "in": "query", "description": description, "schema": {"type": "boolean"}}
        self._app.add_api_route(
            f"{PREFIX}/progress", progress, methods=["GET"], summary="Progress of this client's images",
            openapi_extra={"parameters": [skip]},
        )  # fmt: skip
        self._post("/internal/progress", task_progress, "Progress of one of this client's tasks", ProgressBody)
        self._app.add_api_route("/internal/pending-tasks", pending, methods=["GET"], summary="Tasks of this client")
        self._post(
            f"{PREFIX}/interrupt",
            stops("interrupt", None),
            "Interrupt this client's tasks; their responses have unfinished images",
        )
        self._post(f"{PREFIX}/skip", stops("skip", 1), "Interrupt the oldest task of this client")
        for name in DONE_ALREADY:
            self._post(f"{PREFIX}/{name}", nothing, "Accepted for compatibility; has no effect")


async def _png_info(request: Request, fetcher: Fetcher, clients: Clients) -> Response:
    body = await read_body(request, PngInfoBody)
    await fetcher.fill(body)

    def read(decoder: ImageDecoder) -> str | None:
        return decoder.read_infotext(image_bytes(body.image, "image"), may_shorten=True)

    with clients.name_of(request) as client:
        text = await while_connected(request, shared_decoders().run(client, read))
    parsed = parse_infotext(text) if text else None
    parameters = (
        {} if parsed is None else {"Prompt": parsed.prompt, "Negative prompt": parsed.negative_prompt, **parsed.fields}
    )
    content = {"info": text or "", "items": {}, "parameters": parameters}
    return JSONResponse(content, headers=warning_headers(() if parsed is None else parsed.warnings))


def _preview(job: PolledJob) -> str | None:
    if job.preview is None:
        return None
    return base64.b64encode(job.write(job.preview.picture)).decode("ascii")


def model_of(title: str) -> str:
    """Return the model name in a title of A1111."""
    return title.partition(" [")[0]


def title_of(info: ModelInfo) -> str:
    """Return the title of a model in A1111: its name and the beginning of its hash."""
    return f"{info.model_id} [{info.digest[:10]}]"


def model_entry(info: ModelInfo) -> dict[str, Any]:
    """Return A1111's list entry of a model."""
    names = {"title": title_of(info), "model_name": info.model_id, "filename": info.model_id}
    return names | {"hash": info.digest[:10], "sha256": info.digest, "config": None}


SAMPLER_LIST: Final = [
    {"name": sampler.label, "aliases": [sampler.name, f"k_{sampler.name}"], "options": {}}
    for sampler in SAMPLERS.values()
]
SCHEDULE_LIST: Final = [
    {"name": name, "label": label, "aliases": None, "default_rho": -1, "need_inner_model": False}
    for name, label in {"automatic": "Automatic", **SCHEDULE_LABELS}.items()
]
UPSCALER_LIST: Final[list[dict[str, Any]]] = [
    {"name": name, "model_name": None, "model_path": None, "model_url": None, "scale": 4}
    for name in ("None", *(name.capitalize() for name in FILTERS))
]


def sampler_list(info: ModelInfo) -> list[dict[str, Any]]:
    """Return A1111's list of samplers, with the learned samplers of the model."""
    learned = LearnedSamplers.of(info).usable()
    return SAMPLER_LIST + [{"name": name, "aliases": [], "options": {}} for name in learned]
