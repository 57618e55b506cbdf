"""The HTTP application: routes, health, errors and the guards in front of them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from diffserve import __version__
from diffserve.config import ServeConfig
from diffserve.errors import DiffserveError, EngineUnavailable
from diffserve.service.engine_client import EngineClient
from diffserve.service.errors import HttpError, reply_to
from diffserve.service.gate import Gate
from diffserve.service.generations import Generations
from diffserve.service.guards import BodyLimit, OriginGuard, Outermost
from diffserve.service.models import check_model, model_entry, model_list
from diffserve.service.schemas import GenerateBody, show
from diffserve.types import ModelInfo


def create_app(engine: EngineClient, config: ServeConfig, gate: Gate) -> FastAPI:
    """The application over a running ``engine``; the caller starts and stops the engine and closes the ``gate``."""
    app = FastAPI(title="diffserve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_health(app, engine, gate)
    _add_models(app, engine)
    app.add_api_route(
        "/v1/images/generations",
        _plain(Generations(engine, config, gate)),
        methods=["POST"],
        summary="Paint pictures from a text",
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _schema()}}}},
    )
    app.add_exception_handler(DiffserveError, _reply)
    app.add_exception_handler(HTTPException, _reply_http)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(OriginGuard, bound_host=config.host)
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
        if gate.is_closed or not engine.is_ready:
            raise EngineUnavailable("the server is not ready.")
        return JSONResponse({"status": "ok"})

    @app.get("/debug/trace", summary="How many requests are in the engine, and which shared the recent UNet calls?")
    async def trace() -> Response:
        return JSONResponse({"num_requests": await engine.count(), "unet_calls": await engine.trace()})


def _add_models(app: FastAPI, engine: EngineClient) -> None:
    created = int(time.time())

    def loaded() -> ModelInfo:
        if engine.info is None:
            raise EngineUnavailable("the engine is loading its model; please try again in a moment.")
        return engine.info

    @app.get("/v1/models", summary="The loaded model and its names")
    async def list_models() -> Response:
        return JSONResponse(model_list(loaded(), created))

    @app.get("/v1/models/{name:path}", summary="One model")
    async def get_model(name: str) -> Response:
        check_model(name, loaded())
        return JSONResponse(model_entry(name, created))


def _plain(endpoint: Generations) -> Any:
    """``endpoint`` as a function that takes the bare request: the body is read and checked by ourselves."""

    async def create_image(request: Request) -> Response:
        return await endpoint(request)

    return create_image


def _schema() -> dict[str, Any]:
    return GenerateBody.model_json_schema()


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
