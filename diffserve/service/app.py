"""The HTTP application: routes, health, errors and the guards in front of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from diffserve.config import ServeConfig
from diffserve.errors import DiffserveError, EngineUnavailable, ModelNotFound
from diffserve.service.admission import Admission
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.bodies import Body, show
from diffserve.service.http.errors import HttpError, reply_to
from diffserve.service.http.hosts import HostNames, is_loopback
from diffserve.service.http.middleware import BodyLimit, FramingGuard, OriginGuard, Outermost
from diffserve.service.images.generations import Generations
from diffserve.service.images.kept_pictures import ROUTE, KeptPictures
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.lifecycle import Gate
from diffserve.service.metrics import add_metrics
from diffserve.service.models import capabilities_of, is_alias, model_entry, model_list, model_names
from diffserve.service.page import PageRoute
from diffserve.service.texts.completions import ChatCompletions, TextCompletions
from diffserve.service.texts.rewrites import RewriteEndpoint
from diffserve.service.texts.schemas import ChatBody, CompletionBody, RewriteBody, RewriterMode
from diffserve.types import ModelInfo
from diffserve.version import __version__

Endpoint = Callable[[Request], Awaitable[Response]]
AnyEndpoint = TypeVar("AnyEndpoint", bound=Callable[..., Awaitable[Response]])


def create_app(
    engine: EngineClient,
    config: ServeConfig,
    gate: Gate,
    *,
    rewriter: RewriterMode = "off",
    page: PageRoute | None = None,
    pictures: KeptPictures | None = None,
) -> FastAPI:
    """The application over a running ``engine``; the caller starts and stops the engine and closes the ``gate``.

    ``rewriter``: whether prompts are rewritten where an image request says nothing of it. ``page``: what is shown at
    ``/``; ``None``: nothing. ``pictures``: those kept for their URLs, which the caller sweeps; ``None``: none are.
    """
    app = FastAPI(title="diffserve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.engine = engine
    _add_health(app, engine, gate)
    if config.debug:
        _add_debug(app, engine)
    _add_models(app, engine, config)
    add_metrics(app, engine.metrics, lambda: engine.up().stats())
    admission = Admission(engine.settings, engine.metrics)
    images = Generations(engine, config, gate, admission, rewriter=rewriter, pictures=pictures)
    _post(app, "/v1/images/generations", images, GenerateBody, "Paint pictures from a text")
    _post(app, "/v1/images/generations/{request_id}/cancel", images.cancel, None, "Stop painting; the id is the secret")
    chat = ChatCompletions(engine, config, gate, admission)
    texts = TextCompletions(engine, config, gate, admission)
    _post(app, "/v1/chat/completions", chat, ChatBody, "Answer a conversation")
    _post(app, "/v1/completions", texts, CompletionBody, "Continue texts")
    rewrites = RewriteEndpoint(engine, config, gate, admission)
    _post(app, "/v1/prompts/rewrite", rewrites, RewriteBody, "Turn a wish into prompts that the image model reads well")
    if pictures is not None:
        _add_pictures(app, pictures)
    if page is not None:
        app.router.routes.append(page)
    app.add_exception_handler(DiffserveError, _reply)
    app.add_exception_handler(HTTPException, _reply_http)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(FramingGuard)
    app.add_middleware(OriginGuard, hosts=HostNames(config.host, config.allowed_hosts))
    app.add_middleware(Outermost)
    return app


def _add_health(app: FastAPI, engine: EngineClient, gate: Gate) -> None:
    @app.get("/livez", summary="Is the process alive?")
    @app.get("/ping", include_in_schema=False)
    async def livez() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", summary="Would a request be painted now?")
    @app.get("/health", include_in_schema=False)
    async def readyz() -> Response:
        if gate.is_closed:
            raise EngineUnavailable("the server is not ready.")
        engine.require_ready()
        return JSONResponse({"status": "ok"})


def _add_debug(app: FastAPI, engine: EngineClient) -> None:
    @app.get("/debug/trace", summary="How many requests are in the engine, and which shared the recent UNet calls?")
    async def trace(request: Request) -> Response:
        if request.client is not None and not is_loopback(request.client.host):
            raise HttpError(403, "request ids are told on the server's own machine only.", code="local_only")
        num_requests = (await engine.up().ping()).num_requests
        return JSONResponse({"num_requests": num_requests, "unet_calls": await engine.up().trace()})


def _add_models(app: FastAPI, engine: EngineClient, config: ServeConfig) -> None:
    created = int(time.time())

    def loaded() -> ModelInfo:
        if engine.info is None:
            raise EngineUnavailable(
                "the engine is loading its model; please try again in a moment.", retry_after_s=engine.retry_after_s
            )
        return engine.info

    @_named(app, "/v1/models", ["GET"], summary="The loaded models and their names")
    async def list_models() -> Response:
        info, language = loaded(), engine.text_info
        return JSONResponse(model_list(info, language, created, capabilities_of(info, language, config)))

    @_named(app, "/v1/models/{name:path}", ["GET"], summary="One model")
    async def get_model(name: str) -> Response:
        info, language, name = loaded(), engine.text_info, name.rstrip("/")
        if name not in model_names(info, language) and not is_alias(name):
            raise ModelNotFound(f"there is no model {show(name)}; GET /v1/models lists the names.", param="model")
        return JSONResponse(model_entry(name, created, capabilities_of(info, language, config).get(name)))


def _add_pictures(app: FastAPI, pictures: KeptPictures) -> None:
    async def get_picture(request: Request, name: str) -> Response:
        picture = await asyncio.to_thread(pictures.open, name)
        return picture.response(is_head=request.method == "HEAD")

    place = f"{ROUTE}/{{name}}"
    _named(app, place, ["GET", "HEAD"], include_in_schema=False)(get_picture)
    described = "A picture that was asked for as a URL"  # once: FastAPI gives all methods of a route one operation id
    app.add_api_route(place, get_picture, methods=["GET"], summary=described)


def _named(app: FastAPI, path: str, methods: list[str], **described: Any) -> Callable[[AnyEndpoint], AnyEndpoint]:
    """Offer an endpoint at ``path``, which begins with /v1, and without that and with a slash at its end: clients
    disagree about what a base URL is."""

    def add(endpoint: AnyEndpoint) -> AnyEndpoint:
        app.add_api_route(path, endpoint, methods=methods, **described)
        for other in (f"{path}/", path.removeprefix("/v1"), f"{path.removeprefix('/v1')}/"):
            app.add_api_route(other, endpoint, methods=methods, include_in_schema=False)
        return endpoint

    return add


def _post(app: FastAPI, path: str, endpoint: Endpoint, body: type[Body] | None, summary: str) -> None:
    """Add ``endpoint`` as a function that takes the bare request: the body is read and checked by ourselves.

    One that takes a body asks for work: while the engine is not ready that is refused before the body is read.
    """

    async def answer(request: Request) -> Response:
        if body is not None:
            request.app.state.engine.require_ready()
        return await endpoint(request)

    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    text = {"in": "path", "required": True, "schema": {"type": "string"}}
    described: dict[str, Any] = {"parameters": [{"name": name, **text} for name in names]} if names else {}
    if body is not None:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        _describe_parts(app, schema.pop("$defs", {}))
        described |= {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    _named(app, path, ["POST"], summary=summary, openapi_extra=described)(answer)


def _describe_parts(app: FastAPI, parts: dict[str, Any]) -> None:
    """Put what a body's schema refers to where the description of the whole keeps such things."""
    without = app.openapi

    def openapi() -> dict[str, Any]:
        described = without()
        described.setdefault("components", {}).setdefault("schemas", {}).update(parts)
        return described

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's own handbook does


async def _reply(request: Request, error: Exception) -> Response:
    return reply_to(error).response


async def _reply_http(request: Request, error: Exception) -> Response:
    """What the router says: no such address, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = (error.headers if isinstance(error, HTTPException) else None) or {}
    where = f"{request.method[:16]} {show(request.scope['path'])}"
    if status == 405:
        told = HttpError(status, f"{where} is not offered.", code="method_not_allowed", allow=headers.get("Allow"))
    elif status == 404:
        told = HttpError(status, f"{where} does not exist.", code="unknown_url")
    else:
        told = HttpError(status, "the request could not be read.", code="bad_request")
    return reply_to(told).response
