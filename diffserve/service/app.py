"""The HTTP application: routes, health, errors and the guards in front of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from diffserve.api.errors import DiffserveError, EngineUnavailable, ModelNotFound
from diffserve.media.provenance import HEADER as PROVENANCE
from diffserve.service.a1111.extras import ExtraBatchBody, ExtrasEndpoint, ExtraSingleBody
from diffserve.service.a1111.image_endpoint import A1111Endpoint
from diffserve.service.a1111.jobs import Jobs
from diffserve.service.a1111.routes import A1111Routes
from diffserve.service.a1111.schemas import Img2ImgBody, Txt2ImgBody
from diffserve.service.admission import Admission
from diffserve.service.endpoint import Endpoint as WorkEndpoint
from diffserve.service.endpoint import ServiceContext
from diffserve.service.engine.engines import Engines, refuse_unready
from diffserve.service.http.addresses import HostNames, PublicPath, is_loopback
from diffserve.service.http.bodies import Body, explain, show
from diffserve.service.http.docs import add_docs
from diffserve.service.http.errors import A1111, HttpError, reply_for, routing_error
from diffserve.service.http.forms import MEDIA_TYPE
from diffserve.service.http.keys import KeyGuard, KeyRing
from diffserve.service.http.login import add_login
from diffserve.service.http.middleware import BodyLimit, FramingGuard, HeadAsGet, OriginGuard, Outermost
from diffserve.service.http.openapi import EVENT, IDEMPOTENCY_KEY, REFS, describe_api
from diffserve.service.http.outgoing import OutgoingClient
from diffserve.service.http.proxied_users import ProxiedUsers
from diffserve.service.http.routing import ApiRoute
from diffserve.service.images.image_endpoint import ImageEndpoint
from diffserve.service.images.image_history import ImageHistory
from diffserve.service.images.image_store import ROUTE, ImageStore
from diffserve.service.images.schemas import UPLOADS, EditBody, GenerateBody, VariationBody
from diffserve.service.images.service import ImageChecks, ImageService
from diffserve.service.images.upscaling import UPLOADS as UPSCALE_UPLOADS
from diffserve.service.images.upscaling import UpscaleBody, UpscaleEndpoint
from diffserve.service.images.verification import UPLOADS as VERIFY_UPLOADS
from diffserve.service.images.verification import Verification, VerifyBody
from diffserve.service.lifecycle import Gate, InFlight
from diffserve.service.metrics import Metrics, add_metrics, watch_jobs, watch_store
from diffserve.service.models import Offer, capabilities, describe_models, is_alias, model_entry, model_list
from diffserve.service.page import PageRoute
from diffserve.service.quotas import Quotas
from diffserve.service.responses.chat_images import ChatImages, wants_image
from diffserve.service.responses.conversations import ConversationBody, Conversations, ItemsBody, MetadataBody
from diffserve.service.responses.endpoint import Responses
from diffserve.service.responses.response_store import ResponseStore
from diffserve.service.responses.schemas import ResponseBody
from diffserve.service.responses.turns import MAX_PAGE
from diffserve.service.safety import Safety
from diffserve.service.stored.batch_runner import BatchRunner
from diffserve.service.stored.batches import BatchBody, BatchRoutes
from diffserve.service.stored.delivery_runner import DeliveryRunner
from diffserve.service.stored.experiment_runner import ExperimentRunner
from diffserve.service.stored.experiments import ExperimentBody, ExperimentRoutes
from diffserve.service.stored.files import FilePictures, FileRoutes
from diffserve.service.stored.history import HistoryRoutes
from diffserve.service.stored.idempotency import PARAMETER, Idempotency
from diffserve.service.stored.job_runner import JobRunner
from diffserve.service.stored.jobs import ACCEPTED_HEADERS, PREFER, CancelJobsBody, JobBody, JobRoutes, prefers_async
from diffserve.service.stored.owners import Owners
from diffserve.service.stored.usage import UsageBook, UsageRoutes
from diffserve.service.stored.webhooks import (
    RotateSecretBody,
    WebhookEndpointBody,
    WebhookRoutes,
    WebhookTestBody,
    WebhookUpdateBody,
)
from diffserve.service.texts.completions import ChatCompletions, TextCompletions
from diffserve.service.texts.embeddings import EmbeddingBody, EmbeddingEndpoint
from diffserve.service.texts.rewrites import RewriteEndpoint
from diffserve.service.texts.schemas import ChatBody, CompletionBody, RewriteBody, RewriterMode
from diffserve.service.threads import FILES
from diffserve.settings.config import ServeConfig
from diffserve.store.batches import Batches
from diffserve.store.database import Database
from diffserve.store.deliveries import Deliveries
from diffserve.store.experiments import Experiments
from diffserve.store.files import Files
from diffserve.store.history import History
from diffserve.store.jobs import Jobs as DurableJobs
from diffserve.store.replies import Replies
from diffserve.store.usage import Usage
from diffserve.store.webhooks import WebhookEndpoints
from diffserve.version import __version__

Endpoint = Callable[[Request], Awaitable[Response]]
DAY_S = 24 * 3600.0
PAGE_QUERIES: Final[list[dict[str, Any]]] = [
    {"in": "query", "name": "limit", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}},
    {"in": "query", "name": "order", "schema": {"enum": ["asc", "desc"]}},
    {"in": "query", "name": "after", "schema": {"type": "string"}},
]
"""Query parameters of lists of items."""
REPLAY_QUERIES: Final[list[dict[str, Any]]] = [
    {"in": "query", "name": "stream", "schema": {"type": "boolean"}},
    {"in": "query", "name": "starting_after", "schema": {"type": "integer", "minimum": 0}},
]
"""Query parameters of a stored response, to replay its events."""


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
    """Create the application over a running ``engine``; the caller starts and stops the engine and closes ``gate``.

    Background work of the application is collected in ``app.state.background_tasks``; the caller runs it.

    Args:
        engine: The engines.
        config: Settings of the server.
        gate: Refuses work during shutdown.
        rewriter: Default of ``prompt_rewriter`` for image requests.
        page: Route of the page at ``/``, if any.
        pictures: Store of images with URLs, if any.
        ring: API keys, if any.
        database: Store of files, batches and history, if any.
        checks: Checks of images; by default those of the engine's settings.
    """
    app = FastAPI(
        title="diffserve", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.router.route_class = ApiRoute
    app.state.engine = engine
    app.state.body_schemas = dict[str, Any]()
    app.state.background_tasks = list[Callable[[], Coroutine[Any, Any, None]]]()
    owners = Owners(config, ring)
    app.state.idempotency = None if database is None else Idempotency(Replies(database), owners)
    app.state.endpoints = dict[str, Endpoint]()  # endpoints that submit work, by path
    app.state.offers = {}
    app.state.jobs = None
    engine.metrics.watch(
        "storage_free_bytes", "Free bytes on the disk of the server's data folder.", partial(_free_bytes, config)
    )
    usage = None if database is None else Usage(database)
    book = None if usage is None else UsageBook(usage)
    counted: dict[str, Any] = {} if book is None else {"count": book.count}
    quotas = None if book is None or ring is None else Quotas(book, ring.by_id)
    admission = Admission(
        engine.settings, engine.metrics, **counted, num_engines=lambda: engine.num_ready, quotas=quotas
    )
    files = None if database is None else Files(database, config.files_bytes)
    checks = (checks or ImageChecks.of(engine.settings))._replace(files=FilePictures(files, owners))
    if checks.safety is not None:
        checks.safety.tell = engine.metrics.judged
    checks.marks.on_written = engine.metrics.encoded
    history = None if database is None else _history(app, config, database, owners, pictures, checks)
    context = ServiceContext(engine, config, gate, admission, InFlight())
    service = ImageService(context, rewriter=rewriter, checks=checks, store=pictures, history=history)
    images = ImageEndpoint(service, GenerateBody)
    _post(app, "/v1/images/generations", images, GenerateBody, "Generate images from a prompt")
    _post(app, "/v1/images/generations/{request_id}/cancel", images.cancel, None, "Cancel an image request")
    _post(
        app, "/v1/images/generations/{request_id}/interrupt", images.interrupt, None,
        "End an image request early; its answer has the unfinished images",
    )  # fmt: skip
    edits, variations = ImageEndpoint(service, EditBody), ImageEndpoint(service, VariationBody)
    _post(app, "/v1/images/edits", edits, EditBody, "Edit an image with a prompt", uploads=UPLOADS)
    _post(app, "/v1/images/variations", variations, VariationBody, "Generate variations of an image", uploads=UPLOADS)
    upscaling = UpscaleEndpoint(service)
    _post(app, "/v1/images/upscale", upscaling, UpscaleBody, "Enlarge an image", uploads=UPSCALE_UPLOADS)
    jobs = Jobs()
    txt2img, img2img = A1111Endpoint(service, jobs, Txt2ImgBody), A1111Endpoint(service, jobs, Img2ImgBody)
    _post(app, f"{A1111}/txt2img", txt2img, Txt2ImgBody, "Generate images from a prompt")
    _post(app, f"{A1111}/img2img", img2img, Img2ImgBody, "Generate images from an image")
    extras = ExtrasEndpoint(service, ExtraSingleBody), ExtrasEndpoint(service, ExtraBatchBody)
    _post(app, f"{A1111}/extra-single-image", extras[0], ExtraSingleBody, "Enlarge an image")
    _post(app, f"{A1111}/extra-batch-images", extras[1], ExtraBatchBody, "Enlarge images")
    A1111Routes(app, engine, config, admission.clients, jobs, checks.fetcher)
    verification = Verification(checks.fetcher, admission.clients)
    summary = "Read the provenance of an image"
    _post(app, "/v1/provenance/verify", verification, VerifyBody, summary, uploads=VERIFY_UPLOADS, needs_engine=False)
    text_context = context._replace(in_flight=InFlight())  # texts are not cancelled by the address of images
    chat = ChatCompletions(text_context, painter=ChatImages(service), wants_picture=wants_image)
    texts = TextCompletions(text_context)
    _post(app, "/v1/chat/completions", chat, ChatBody, "Answer a conversation")
    _post(app, "/v1/completions", texts, CompletionBody, "Continue texts")
    conversations = Conversations()
    responses = Responses(service, store=ResponseStore(), conversations=conversations)
    _post(app, "/v1/responses", responses, ResponseBody, "Create a response: text or images in a conversation")
    _add_responses(app, responses)
    _add_conversations(app, conversations)
    embeddings = EmbeddingEndpoint(text_context)
    _post(app, "/v1/embeddings", embeddings, EmbeddingBody, "Create embeddings of texts")
    rewrites = RewriteEndpoint(text_context)
    _post(app, "/v1/prompts/rewrite", rewrites, RewriteBody, "Rewrite a prompt for the image model")
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
        UsageRoutes(app, usage, book, owners, quotas)
    if database is not None and files is not None:
        _add_stored(app, database, files, owners, admission, engine.metrics)
        durable_jobs, uploads = DurableJobs(database), OutgoingClient(config.upload_hosts)
        _add_jobs(app, durable_jobs, owners, admission, uploads)
        endpoints = WebhookEndpoints(database)
        responses.on_background_end = endpoints.add_event
        hooks = OutgoingClient(config.webhook_hosts)
        _add_webhooks(app, endpoints, owners, hooks)
        deliveries = Deliveries(database)
        watch_jobs(engine.metrics, durable_jobs, deliveries)
        runner = DeliveryRunner(deliveries, endpoints, durable_jobs, owners, hooks, uploads)
        app.state.background_tasks.append(runner.run_for_ever)
        _add_experiments(app, Experiments(database), owners, context, checks.safety)
    if page is not None:
        app.router.routes.append(page)
    add_docs(app)
    describe_api(app)
    app.add_exception_handler(DiffserveError, _reply)
    app.add_exception_handler(RequestValidationError, _reply_invalid_query)
    app.add_exception_handler(HTTPException, _reply_http)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    if ring is not None:
        add_login(app, ring)
        below = (f"{ROUTE}/", f"{ROUTE.removeprefix('/v1')}/")  # clients fetch image URLs without a key
        app.add_middleware(KeyGuard, ring=ring, open_below=below)
    app.add_middleware(FramingGuard)
    hosts = HostNames(config.host, config.allowed_hosts, public_url=config.public_url)
    app.add_middleware(OriginGuard, hosts=hosts, public_url=config.public_url, cors_origins=config.cors_origins)
    app.add_middleware(HeadAsGet)
    if config.trusted_user_header:
        proxies = config.trusted_proxies
        app.add_middleware(ProxiedUsers, header=config.trusted_user_header, trusted_proxies=proxies)
    app.add_middleware(PublicPath, public_url=config.public_url, trusted_proxies=config.trusted_proxies)
    app.add_middleware(Outermost, metrics=engine.metrics)
    return app


def _free_bytes(config: ServeConfig) -> dict[tuple[str, ...], float]:
    folder = Path(config.data_dir).expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return {(): float(shutil.disk_usage(there).free)}


def _add_health(app: FastAPI, engine: Engines, gate: Gate) -> None:
    @app.get("/livez", summary="Whether the process is alive")
    @app.get("/ping", summary="Whether the process is alive")
    async def livez() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", summary="Whether the server is ready for requests")
    @app.get("/health", summary="Whether the server is ready for requests")
    async def readyz() -> Response:
        if gate.is_closed:
            raise EngineUnavailable("the server is shutting down; please try again in a moment.")
        refuse_unready(engine)
        return JSONResponse({"status": "ok"})


def _add_debug(app: FastAPI, engine: Engines) -> None:
    @app.get("/debug/trace", summary="Number of requests in the engine, and the requests in the recent UNet calls")
    async def trace(request: Request) -> Response:
        if request.client is not None and not is_loopback(request.client.host):
            raise HttpError(
                403,
                "request ids are only available to clients on the server's machine; connect from there.",
                code="local_only",
            )
        num_requests = await engine.num_requests()
        return JSONResponse({"num_requests": num_requests, "unet_calls": await engine.trace()})


def _add_models(app: FastAPI, engine: Engines, config: ServeConfig) -> None:
    created = int(time.time())

    def require_models() -> None:
        if not engine.models:
            raise EngineUnavailable(
                "the engine is loading its model; please try again in a moment.", retry_after_s=engine.retry_after_s
            )

    def model_fields() -> dict[str, dict[str, Any]]:
        require_models()
        return describe_models(app.state.offers, engine.models, engine.text_info, config)

    @app.get("/v1/capabilities", summary="Fields with their bounds, models and limits")
    async def get_capabilities() -> Response:
        require_models()
        return JSONResponse(capabilities(created, app.state.offers, engine.models, engine.text_info, config))

    @app.get("/v1/models", summary="List models and aliases")
    async def list_models() -> Response:
        return JSONResponse(model_list(created, model_fields()))

    @app.get("/v1/models/{name:path}", summary="Describe a model")
    async def get_model(name: str) -> Response:
        models, name = model_fields(), name.rstrip("/")
        if name not in models and not is_alias(name):
            raise ModelNotFound(f"there is no model {show(name)}; GET /v1/models lists the names.", param="model")
        return JSONResponse(model_entry(name, created, models.get(name)))


def _add_conversations(app: FastAPI, conversations: Conversations) -> None:
    path, item_path = "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items/{item_id}"
    add = partial(_post, app, needs_engine=False)
    add("/v1/conversations", conversations.begin, ConversationBody, "Create a conversation for responses")
    app.get(path, summary="Describe a conversation")(conversations.get)
    app.delete(path, summary="Delete a conversation")(conversations.remove)
    add(path, conversations.update, MetadataBody, "Replace the metadata of a conversation")
    add(f"{path}/items", conversations.add_items, ItemsBody, "Add messages to a conversation")
    paged = {"parameters": PAGE_QUERIES}
    app.get(f"{path}/items", summary="List the items of a conversation", openapi_extra=paged)(conversations.items)
    app.get(item_path, summary="Describe an item")(conversations.get_item)
    app.delete(item_path, summary="Delete an item")(conversations.remove_item)


def _add_responses(app: FastAPI, responses: Responses) -> None:
    path = "/v1/responses/{response_id}"
    events: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}
    replay = {"parameters": REPLAY_QUERIES}
    get = app.get(path, summary="Return a stored response or its events", responses=events, openapi_extra=replay)
    get(responses.get)
    app.delete(path, summary="Delete a response")(responses.remove)
    app.post(f"{path}/cancel", summary="Cancel a background response")(responses.cancel)
    paged = {"parameters": PAGE_QUERIES}
    app.get(f"{path}/input_items", summary="List the input items of a response", openapi_extra=paged)(
        responses.input_items
    )


def _add_pictures(app: FastAPI, pictures: ImageStore) -> None:
    async def get_picture(name: str) -> Response:
        return (await FILES.run(pictures.open, name)).response()

    files = {f"image/{kind}": {"schema": {"type": "string", "format": "binary"}} for kind in ("png", "jpeg", "webp")}
    answers: dict[int | str, dict[str, Any]] = {200: {"description": "The file.", "content": files}}
    download = app.get(
        f"{ROUTE}/{{name}}", summary="Download an image by its URL", responses=answers, response_class=Response
    )
    download(get_picture)


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
        database.folder / "history",
        max_bytes=config.history_bytes,
        kept_s=config.history_days * DAY_S,
        headers={PROVENANCE: checks.marks.header},
        gone=rows.forget,
    )
    app.state.background_tasks.append(pictures.sweep_for_ever)
    is_kept = config.history_days > 0 and config.history_bytes > 0
    return ImageHistory(rows, pictures, owners, urls, is_kept=is_kept)


def _add_stored(
    app: FastAPI, database: Database, files: Files, owners: Owners, admission: Admission, metrics: Metrics
) -> None:
    """Add the routes of files and batches."""
    batches = Batches(database, files)
    watch_store(metrics, database, batches)
    endpoints = {path: endpoint for path, endpoint in app.state.endpoints.items() if path.startswith("/v1/")}
    runner = BatchRunner(app, batches, files, owners, admission, endpoints)
    FileRoutes(app, files, batches, owners)
    routes = BatchRoutes(app, batches, files, owners, runner, lambda: sorted(endpoints))
    summary = "Create a batch of requests from an uploaded file"
    _post(app, "/v1/batches", routes.create, BatchBody, summary, needs_engine=False)
    app.state.background_tasks.append(runner.run_for_ever)


def _add_jobs(app: FastAPI, jobs: DurableJobs, owners: Owners, admission: Admission, uploads: OutgoingClient) -> None:
    """Add the routes of jobs, which may call every endpoint that submits work."""
    runner = JobRunner(app, jobs, owners, admission, app.state.endpoints)
    routes = app.state.jobs = JobRoutes(app, jobs, owners, runner, app.state.offers, uploads)
    _post(app, "/v1/jobs", routes.create, JobBody, "Create a job: a request that survives restarts", needs_engine=False)
    _post(
        app, "/v1/jobs/{job_id}", routes.put, JobBody, "Create a job with an ID of your own",
        needs_engine=False, method="PUT",
    )  # fmt: skip
    _post(app, "/v1/jobs/cancel", routes.cancel_many, CancelJobsBody, "Cancel several jobs", needs_engine=False)
    app.state.background_tasks.append(runner.run_for_ever)


def _add_webhooks(app: FastAPI, endpoints: WebhookEndpoints, owners: Owners, client: OutgoingClient) -> None:
    routes = WebhookRoutes(app, endpoints, owners, client)
    path, item_path = "/v1/webhook_endpoints", "/v1/webhook_endpoints/{webhook_endpoint_id}"
    add = partial(_post, app, needs_engine=False)
    add(path, routes.create, WebhookEndpointBody, "Create a webhook endpoint")
    add(item_path, routes.update, WebhookUpdateBody, "Change a webhook endpoint")
    add(f"{item_path}/rotate_secret", routes.rotate_secret, RotateSecretBody, "Replace the secret of an endpoint")
    add(f"{item_path}/test", routes.test, WebhookTestBody, "Send a sample event to an endpoint")


def _add_experiments(
    app: FastAPI, experiments: Experiments, owners: Owners, context: ServiceContext, safety: Safety | None
) -> None:
    runner = ExperimentRunner(context, experiments, owners, safety)
    routes = ExperimentRoutes(app, experiments, owners, runner, context, safety)
    summary = "Create an experiment that compares samplers, steps and other settings"
    _post(app, "/v1/experiments", routes.create, ExperimentBody, summary, needs_engine=False)
    app.state.background_tasks.append(runner.run_for_ever)


def _post(
    app: FastAPI,
    path: str,
    endpoint: Endpoint,
    body: type[Body] | None,
    summary: str,
    *,
    uploads: Mapping[str, Any] | None = None,
    needs_engine: bool = True,
    method: Literal["POST", "PUT"] = "POST",
) -> None:
    """Add a POST or PUT route for ``endpoint``, which takes the bare request.

    The body is read and checked by ``http.bodies``, not by FastAPI: limits on size, rate and JSON shape apply before
    parsing.

    Args:
        app: The application.
        path: The path.
        endpoint: Answers requests.
        body: Type of the body, if there is one.
        summary: One line for the API description.
        uploads: Schemas of files in a multipart form, whose other fields are the body's.
        needs_engine: Whether requests are refused before their body is read while the engine is not ready.
        method: The HTTP method.
    """
    is_work = body is not None and needs_engine

    async def answer(request: Request) -> Response:
        if is_work:
            request.app.state.engine.require_ready()
        return await endpoint(request)

    async def answer_once(request: Request) -> Response:
        jobs: JobRoutes | None = app.state.jobs if is_work else None
        idempotency: Idempotency | None = app.state.idempotency if IDEMPOTENCY_KEY in request.headers else None
        if jobs is not None and prefers_async(request):
            accepted = await jobs.begin(request, path, idempotency)
            if accepted is not None:
                return accepted
        if idempotency is None:
            return await answer(request)
        if jobs is not None:
            await jobs.refuse_begun(request, path)
        return await idempotency.answer(request, answer)

    if is_work and body is not None:
        app.state.endpoints[path] = answer
        app.state.offers[path] = Offer(endpoint.asks if isinstance(endpoint, WorkEndpoint) else "image", body)

    described: dict[str, Any] = {}
    responses: dict[int | str, dict[str, Any]] = {}
    if body is not None:
        schema = body.model_json_schema(ref_template=REFS)
        app.state.body_schemas |= schema.pop("$defs", {})
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        if uploads is not None:
            json_only = {*uploads, "infotext"}
            fields = {name: field for name, field in schema["properties"].items() if name not in json_only}
            form = schema | {"title": f"{schema['title']}Form", "properties": {**uploads, **fields}}
            content[MEDIA_TYPE] = {"schema": form}
        described = {"parameters": [PARAMETER], "requestBody": {"required": True, "content": content}}
    if is_work:
        described["parameters"].append(PREFER)
        responses = {202: {"description": "The job that does the work.", "headers": ACCEPTED_HEADERS}}
    add = app.post if method == "POST" else app.put
    add(path, summary=summary, openapi_extra=described, responses=responses)(answer if body is None else answer_once)


async def _reply(request: Request, error: Exception) -> Response:
    request.scope.setdefault("state", {})["error_code"] = getattr(error, "counted_as", getattr(error, "code", ""))
    return reply_for(request.scope["path"], error).response


def _allowed(request: Request) -> str:
    """Return the methods of all routes that match the path; the router knows only those of the first."""
    there = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in there for method in getattr(route, "methods", None) or ()}))


async def _reply_invalid_query(request: Request, error: Exception) -> Response:
    """Answer invalid query parameters like invalid bodies: with status 400 and one sentence."""
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    problems = [problem | {"loc": problem["loc"][1:2]} for problem in problems]  # the name of the parameter
    return await _reply(request, explain(problems, lambda index: problems[index]["input"], {}))


async def _reply_http(request: Request, error: Exception) -> Response:
    """Answer the router's errors: unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    allow = _allowed(request) if status == 405 else None
    return await _reply(request, routing_error(status, request.method, request.scope["path"], allow=allow))
