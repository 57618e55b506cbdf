"""The HTTP application: routes, health, errors and the guards in front of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from diffserve.api.errors import DiffserveError, EngineUnavailable, ModelNotFound
from diffserve.media.provenance import HEADER as PROVENANCE
from diffserve.service.a1111.image_endpoint import A1111Endpoint
from diffserve.service.a1111.jobs import Jobs
from diffserve.service.a1111.routes import A1111Routes
from diffserve.service.a1111.schemas import Img2ImgBody, Txt2ImgBody
from diffserve.service.admission import Admission
from diffserve.service.capabilities import REFS, Offer, capabilities, models_told
from diffserve.service.endpoint import Endpoint as Asking
from diffserve.service.engine.engines import Engines, refuse_unready
from diffserve.service.http.bodies import Body, show
from diffserve.service.http.docs import add_docs
from diffserve.service.http.errors import A1111, HttpError, reply_for, routing_error
from diffserve.service.http.forms import MEDIA_TYPE
from diffserve.service.http.heads import HeadAsGet
from diffserve.service.http.hosts import HostNames, is_loopback
from diffserve.service.http.keys import KeyGuard, KeyRing
from diffserve.service.http.login import add_login
from diffserve.service.http.middleware import BodyLimit, FramingGuard, OriginGuard, Outermost
from diffserve.service.http.named import named
from diffserve.service.http.openapi import EVENT, IDEMPOTENCY_KEY, describe
from diffserve.service.http.public_path import PublicPath
from diffserve.service.images.edit_schemas import UPLOADS, EditBody, VariationBody
from diffserve.service.images.image_endpoint import ImageEndpoint
from diffserve.service.images.image_history import ImageHistory
from diffserve.service.images.image_store import ROUTE, ImageStore
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.images.service import ImageChecks, ImageService
from diffserve.service.images.verification import UPLOADS as VERIFY_UPLOADS
from diffserve.service.images.verification import Verification, VerifyBody
from diffserve.service.lifecycle import Gate
from diffserve.service.metrics import Metrics, add_metrics
from diffserve.service.models import is_alias, model_entry, model_list
from diffserve.service.page import PageRoute
from diffserve.service.responses.chat_images import ChatImages, wants_image
from diffserve.service.responses.conversations import ConversationBody, Conversations, ItemsBody, MetadataBody
from diffserve.service.responses.endpoint import Responses
from diffserve.service.responses.response_store import ResponseStore
from diffserve.service.responses.schemas import ResponseBody
from diffserve.service.responses.turns import MAX_PAGE
from diffserve.service.stored.batch_runner import BatchRunner
from diffserve.service.stored.batches import BatchBody, BatchRoutes
from diffserve.service.stored.file_pictures import FilePictures
from diffserve.service.stored.files import FileRoutes
from diffserve.service.stored.history import HistoryRoutes
from diffserve.service.stored.idempotency import PARAMETER, Idempotency
from diffserve.service.stored.owners import Owners
from diffserve.service.stored.usage import UsageBook, UsageRoutes
from diffserve.service.stored.watching import watch_store
from diffserve.service.texts.completions import ChatCompletions, TextCompletions
from diffserve.service.texts.embeddings import EmbeddingBody, EmbeddingEndpoint
from diffserve.service.texts.rewrites import RewriteEndpoint
from diffserve.service.texts.schemas import ChatBody, CompletionBody, RewriteBody, RewriterMode
from diffserve.service.threads import FILES
from diffserve.settings.config import ServeConfig
from diffserve.store.batches import Batches
from diffserve.store.database import Database
from diffserve.store.files import Files
from diffserve.store.history import History
from diffserve.store.replies import Replies
from diffserve.store.usage import Usage
from diffserve.version import __version__

Endpoint = Callable[[Request], Awaitable[Response]]
DAY_S = 24 * 3600.0
PAGE_QUERIES: Final[list[dict[str, Any]]] = [
    {"in": "query", "name": "limit", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}},
    {"in": "query", "name": "order", "schema": {"enum": ["asc", "desc"]}},
    {"in": "query", "name": "after", "schema": {"type": "string"}},
]
"""Of lists of items."""
RETOLD_QUERIES: Final[list[dict[str, Any]]] = [
    {"in": "query", "name": "stream", "schema": {"type": "boolean"}},
    {"in": "query", "name": "starting_after", "schema": {"type": "integer", "minimum": 0}},
]
"""Of a response that is made and told in the background."""


def create_app(
    engine: Engines,
    config: ServeConfig,
    gate: Gate,
    *,
    rewriter: RewriterMode = "off",
    page: PageRoute | None = None,
    pictures: ImageStore | None = None,
    ring: KeyRing | None = None,
    database: Database | None = None,
    checks: ImageChecks | None = None,
) -> FastAPI:
    """The application over a running ``engine``; the caller starts and stops the engine and closes the ``gate``.

    ``rewriter``: whether prompts are rewritten where an image request says nothing of it. ``page``: what is shown at
    ``/``; ``None``: nothing. ``pictures``: those kept for their URLs, which the caller sweeps; ``None``: none are.
    ``ring``: the keys that are asked for, where there are any. ``database``: what keeps things for clients; ``None``:
    nothing does. ``checks``: what pictures pass; ``None``: as the settings of ``engine`` say. What is to go on beside
    the answers, for as long as there are any, is told in ``app.state.beside``.
    """
    app = FastAPI(
        title="diffserve", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.engine = engine
    app.state.beside = list[Callable[[], Coroutine[Any, Any, None]]]()
    owners = Owners(config, ring)
    app.state.idempotency = None if database is None else Idempotency(Replies(database), owners)
    app.state.endpoints = dict[str, Endpoint]()  # those that work is asked of, by their paths
    app.state.offers = {}
    engine.metrics.watch("storage_free_bytes", "Of the disk with the server's folder.", partial(_free_bytes, config))
    usage = None if database is None else Usage(database)
    book = None if usage is None else UsageBook(usage)
    counted: dict[str, Any] = {} if book is None else {"count": book.count}
    admission = Admission(engine.settings, engine.metrics, **counted, num_engines=lambda: engine.num_ready)
    files = None if database is None else Files(database, config.files_bytes)
    checks = (checks or ImageChecks.of(engine.settings))._replace(files=FilePictures(files, owners))
    if checks.safety is not None:
        checks.safety.tell = engine.metrics.judged
    checks.marks.tell = engine.metrics.encoded
    history = None if database is None else _history(app, config, database, owners, pictures, checks)
    service = ImageService(
        engine, config, gate, admission, rewriter=rewriter, checks=checks, store=pictures, history=history
    )
    images = ImageEndpoint(service, GenerateBody)
    _post(app, "/v1/images/generations", images, GenerateBody, "Paint pictures from a text")
    _post(app, "/v1/images/generations/{request_id}/cancel", images.cancel, None, "Stop painting")
    _post(
        app, "/v1/images/generations/{request_id}/interrupt", images.interrupt, None,
        "End painting early: the request is answered with unfinished pictures",
    )  # fmt: skip
    edits, variations = ImageEndpoint(service, EditBody), ImageEndpoint(service, VariationBody)
    _post(app, "/v1/images/edits", edits, EditBody, "Paint from a picture and a text", uploads=UPLOADS)
    _post(app, "/v1/images/variations", variations, VariationBody, "Paint a picture again, otherwise", uploads=UPLOADS)
    jobs = Jobs()
    txt2img, img2img = A1111Endpoint(service, jobs, Txt2ImgBody), A1111Endpoint(service, jobs, Img2ImgBody)
    _post(app, f"{A1111}/txt2img", txt2img, Txt2ImgBody, "Paint from a text")
    _post(app, f"{A1111}/img2img", img2img, Img2ImgBody, "Paint from a picture")
    A1111Routes(app, engine, config, admission.clients, jobs, checks.fetcher)
    verification = Verification(checks.fetcher, admission.clients)
    told = "Say whether a machine painted a picture"
    _post(app, "/v1/provenance/verify", verification, VerifyBody, told, uploads=VERIFY_UPLOADS, needs_engine=False)
    chat = ChatCompletions(engine, config, gate, admission, painter=ChatImages(service), wants_picture=wants_image)
    texts = TextCompletions(engine, config, gate, admission)
    _post(app, "/v1/chat/completions", chat, ChatBody, "Answer a conversation")
    _post(app, "/v1/completions", texts, CompletionBody, "Continue texts")
    conversations = Conversations()
    responses = Responses(service, store=ResponseStore(), conversations=conversations)
    _post(app, "/v1/responses", responses, ResponseBody, "Say something, or paint it, within a conversation")
    _add_responses(app, responses)
    _add_conversations(app, conversations)
    embeddings = EmbeddingEndpoint(engine, config, gate, admission)
    _post(app, "/v1/embeddings", embeddings, EmbeddingBody, "Turn texts into vectors")
    rewrites = RewriteEndpoint(engine, config, gate, admission)
    _post(app, "/v1/prompts/rewrite", rewrites, RewriteBody, "Turn a wish into prompts that the image model reads well")
    _add_health(app, engine, gate)
    if config.debug:
        _add_debug(app, engine)
    _add_models(app, engine, config)
    add_metrics(app, engine.metrics, engine.stats)
    if pictures is not None:
        _add_pictures(app, pictures)
    if history is not None:
        HistoryRoutes(app, history, owners)
    if usage is not None and book is not None:
        UsageRoutes(app, usage, book, owners)
    if database is not None and files is not None:
        _add_stored(app, database, files, owners, admission, engine.metrics)
    if page is not None:
        app.router.routes.append(page)
    add_docs(app)
    describe(app)
    app.add_exception_handler(DiffserveError, _reply)
    app.add_exception_handler(HTTPException, _reply_http)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    if ring is not None:
        add_login(app, ring)
        below = (f"{ROUTE}/", f"{ROUTE.removeprefix('/v1')}/")  # clients fetch pictures without a word of who they are
        app.add_middleware(KeyGuard, ring=ring, open_below=below)
    app.add_middleware(FramingGuard)
    hosts = HostNames(config.host, config.allowed_hosts, public_url=config.public_url)
    app.add_middleware(OriginGuard, hosts=hosts, public_url=config.public_url, cors_origins=config.cors_origins)
    app.add_middleware(HeadAsGet)
    app.add_middleware(PublicPath, public_url=config.public_url, trusted_proxies=config.trusted_proxies)
    app.add_middleware(Outermost, metrics=engine.metrics)
    return app


def _free_bytes(config: ServeConfig) -> dict[tuple[str, ...], float]:
    folder = Path(config.data_dir).expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return {(): float(shutil.disk_usage(there).free)}


def _add_health(app: FastAPI, engine: Engines, gate: Gate) -> None:
    @app.get("/livez", summary="Is the process alive?")
    @app.get("/ping", summary="The same")
    async def livez() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", summary="Would a request be painted now?")
    @app.get("/health", summary="The same")
    async def readyz() -> Response:
        if gate.is_closed:
            raise EngineUnavailable("the server is not ready.")
        refuse_unready(engine)
        return JSONResponse({"status": "ok"})


def _add_debug(app: FastAPI, engine: Engines) -> None:
    @app.get("/debug/trace", summary="How many requests are in the engine, and which shared the recent UNet calls?")
    async def trace(request: Request) -> Response:
        if request.client is not None and not is_loopback(request.client.host):
            raise HttpError(403, "request ids are told on the server's own machine only.", code="local_only")
        num_requests = await engine.num_requests()
        return JSONResponse({"num_requests": num_requests, "unet_calls": await engine.trace()})


def _add_models(app: FastAPI, engine: Engines, config: ServeConfig) -> None:
    created = int(time.time())

    def require_models() -> None:
        if not engine.models:
            raise EngineUnavailable(
                "the engine is loading its model; please try again in a moment.", retry_after_s=engine.retry_after_s
            )

    def told() -> dict[str, dict[str, Any]]:
        require_models()
        return models_told(app.state.offers, engine.models, engine.text_info, config)

    @named(app, "/v1/capabilities", ["GET"], summary="What may be asked: fields with their bounds, models, limits")
    async def get_capabilities() -> Response:
        require_models()
        return JSONResponse(capabilities(created, app.state.offers, engine.models, engine.text_info, config))

    @named(app, "/v1/models", ["GET"], summary="The models and their names")
    async def list_models() -> Response:
        return JSONResponse(model_list(created, told()))

    @named(app, "/v1/models/{name:path}", ["GET"], summary="One model")
    async def get_model(name: str) -> Response:
        known, name = told(), name.rstrip("/")
        if name not in known and not is_alias(name):
            raise ModelNotFound(f"there is no model {show(name)}; GET /v1/models lists the names.", param="model")
        return JSONResponse(model_entry(name, created, known.get(name)))


def _add_conversations(app: FastAPI, conversations: Conversations) -> None:
    begun = "Begin a conversation that responses go on with"
    _post(app, "/v1/conversations", conversations.begin, ConversationBody, begun, needs_engine=False)
    one = {"in": "path", "name": "conversation_id", "required": True, "schema": {"type": "string"}}
    place, told = "/v1/conversations/{conversation_id}", {"openapi_extra": {"parameters": [one]}}
    named(app, place, ["GET"], summary="A conversation that is kept", **told)(conversations.get)
    named(app, place, ["DELETE"], summary="Forget a conversation", **told)(conversations.remove)
    changed = "Replace the metadata of a conversation"
    _post(app, place, conversations.update, MetadataBody, changed, needs_engine=False)
    added = "Add messages to a conversation"
    _post(app, f"{place}/items", conversations.add_items, ItemsBody, added, needs_engine=False)
    paged = {"parameters": [one, *PAGE_QUERIES]}
    said = "What was said and painted in a conversation"
    named(app, f"{place}/items", ["GET"], summary=said, openapi_extra=paged)(conversations.items)
    item = {"in": "path", "name": "item_id", "required": True, "schema": {"type": "string"}}
    both = {"openapi_extra": {"parameters": [one, item]}}
    named(app, f"{place}/items/{{item_id}}", ["GET"], summary="One item", **both)(conversations.get_item)
    named(app, f"{place}/items/{{item_id}}", ["DELETE"], summary="Remove an item", **both)(conversations.remove_item)


def _add_responses(app: FastAPI, responses: Responses) -> None:
    one = {"in": "path", "name": "response_id", "required": True, "schema": {"type": "string"}}
    place, paged = "/v1/responses/{response_id}", {"parameters": [one, *PAGE_QUERIES]}
    told = {"openapi_extra": {"parameters": [one]}}
    events: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}
    again: dict[str, Any] = {"responses": events, "openapi_extra": {"parameters": [one, *RETOLD_QUERIES]}}
    named(app, place, ["GET"], summary="A response that is kept, or its events", **again)(responses.get)
    named(app, place, ["DELETE"], summary="Forget a response", **told)(responses.remove)
    described = "End a response that is made in the background"
    named(app, f"{place}/cancel", ["POST"], summary=described, **told)(responses.cancel)
    described = "What a response was asked with"
    named(app, f"{place}/input_items", ["GET"], summary=described, openapi_extra=paged)(responses.input_items)


def _add_pictures(app: FastAPI, pictures: ImageStore) -> None:
    async def get_picture(name: str) -> Response:
        return (await FILES.run(pictures.open, name)).response()

    files = {f"image/{kind}": {"schema": {"type": "string", "format": "binary"}} for kind in ("png", "jpeg", "webp")}
    answers: dict[int | str, dict[str, Any]] = {200: {"description": "The file.", "content": files}}
    said = "A picture that was asked for as a URL"
    told: dict[str, Any] = {"summary": said, "responses": answers, "response_class": Response}
    named(app, f"{ROUTE}/{{name}}", ["GET"], **told)(get_picture)


def _history(
    app: FastAPI,
    config: ServeConfig,
    database: Database,
    owners: Owners,
    urls: ImageStore | None,
    checks: ImageChecks,
) -> ImageHistory:
    rows = History(database)
    pictures = ImageStore(
        database.file.parent / "history",
        max_bytes=config.history_bytes,
        kept_s=config.history_days * DAY_S,
        headers={PROVENANCE: checks.marks.header},
        gone=rows.forget,
    )
    app.state.beside.append(pictures.sweep_for_ever)
    is_kept = config.history_days > 0 and config.history_bytes > 0
    return ImageHistory(rows, pictures, owners, urls, is_kept=is_kept)


def _add_stored(
    app: FastAPI, database: Database, files: Files, owners: Owners, admission: Admission, metrics: Metrics
) -> None:
    """What is kept for clients: files and batches."""
    batches = Batches(database, files)
    watch_store(metrics, database, batches)
    endpoints = {path: endpoint for path, endpoint in app.state.endpoints.items() if path.startswith("/v1/")}
    runner = BatchRunner(app, batches, files, owners, admission, endpoints)
    FileRoutes(app, files, batches, owners)
    routes = BatchRoutes(app, batches, files, owners, runner, lambda: sorted(endpoints))
    told = "Have many requests worked on, each as a line of a file"
    _post(app, "/v1/batches", routes.create, BatchBody, told, needs_engine=False)
    app.state.beside.append(runner.run_for_ever)


def _post(
    app: FastAPI,
    path: str,
    endpoint: Endpoint,
    body: type[Body] | None,
    summary: str,
    *,
    uploads: Mapping[str, Any] | None = None,
    needs_engine: bool = True,
) -> None:
    """Add ``endpoint`` as a function that takes the bare request: the body is read and checked by ourselves.

    ``uploads``: the files that it takes as a form, whose other fields are the body's. One that takes a body asks for
    work: while the engine is not ready that is refused before the body is read, where it ``needs_engine``.
    """
    is_work = body is not None and needs_engine

    async def answer(request: Request) -> Response:
        if is_work:
            request.app.state.engine.require_ready()
        return await endpoint(request)

    async def once(request: Request) -> Response:
        idempotency: Idempotency | None = app.state.idempotency
        if idempotency is None or IDEMPOTENCY_KEY not in request.headers:
            return await answer(request)
        return await idempotency.answer(request, answer)

    if body is not None and needs_engine:
        app.state.endpoints[path] = answer
        app.state.offers[path] = Offer(endpoint.asks if isinstance(endpoint, Asking) else "image", body)

    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    text = {"in": "path", "required": True, "schema": {"type": "string"}}
    parameters = [{"name": name, **text} for name in names] + ([] if body is None else [PARAMETER])
    described: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if body is not None:
        schema = body.model_json_schema(ref_template=REFS)
        _describe_parts(app, schema.pop("$defs", {}))
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        if uploads is not None:
            left_out = {*uploads, "infotext"}  # which is taken as JSON alone
            fields = {name: field for name, field in schema["properties"].items() if name not in left_out}
            form = schema | {"title": f"{schema['title']}Form", "properties": {**uploads, **fields}}
            content[MEDIA_TYPE] = {"schema": form}
        described |= {"requestBody": {"required": True, "content": content}}
    named(app, path, ["POST"], summary=summary, openapi_extra=described)(answer if body is None else once)


def _describe_parts(app: FastAPI, parts: dict[str, Any]) -> None:
    """Put what a body's schema refers to where the description of the whole keeps such things."""
    without = app.openapi

    def openapi() -> dict[str, Any]:
        described = without()
        described.setdefault("components", {}).setdefault("schemas", {}).update(parts)
        return described

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's own handbook does


async def _reply(request: Request, error: Exception) -> Response:
    request.scope.setdefault("state", {})["error_code"] = getattr(error, "counted_as", getattr(error, "code", ""))
    return reply_for(request.scope["path"], error).response


def _allowed(request: Request) -> str:
    """The methods of all routes at the address of ``request``: the router knows those of the first alone."""
    there = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in there for method in getattr(route, "methods", None) or ()}))


async def _reply_http(request: Request, error: Exception) -> Response:
    """What the router says: no such address, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    allow = _allowed(request) if status == 405 else None
    return await _reply(request, routing_error(status, request.method, request.scope["path"], allow=allow))
