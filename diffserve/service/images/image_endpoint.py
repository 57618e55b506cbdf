"""``POST /v1/images/generations``, ``edits`` and ``variations``, and how to cancel or interrupt a request."""

from __future__ import annotations

from contextlib import AbstractContextManager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import InvalidRequest
from diffserve.service.admission import Backlog, Ticket
from diffserve.service.endpoint import Endpoint, PlanT
from diffserve.service.http.bodies import BodyT, show
from diffserve.service.http.errors import HttpError
from diffserve.service.http.forms import is_form, parse_fields, read_form
from diffserve.service.http.middleware import TEXT_BODY_BYTES, too_long
from diffserve.service.http.streams import Events
from diffserve.service.images.inputs import read_repeated
from diffserve.service.images.openai_encoder import OpenAIEncoder, encode_answer
from diffserve.service.images.plan import ImagePlan
from diffserve.service.images.schemas import MAX_PICTURES, GenerateBody, StartBody
from diffserve.service.images.service import ImageService
from diffserve.service.lifecycle import PARSE_IN_THREAD_BYTES, json_response, owner_of, read_body, read_json
from diffserve.service.threads import ANSWERS


class ImageServiceEndpoint(Endpoint[BodyT, PlanT]):
    """Base class of the endpoints that generate images with the shared ``service``."""

    def __init__(self, service: ImageService) -> None:
        super().__init__(service.context)
        self._service = service

    @property
    def _backlog(self) -> Backlog:
        return self._admission.images


class ImageEndpoint(ImageServiceEndpoint[GenerateBody, ImagePlan]):
    """Image endpoint of OpenAI's API; the class ``body`` selects generation, edit or variation."""

    ending = b""

    def __init__(self, service: ImageService, body: type[GenerateBody]) -> None:
        super().__init__(service)
        self.body = body

    async def _read(self, request: Request) -> GenerateBody:
        if issubclass(self.body, StartBody):
            return await (self._read_form(request, self.body) if is_form(request) else self._read_json(request))
        body = await self._read_json(request)
        image_chars = sum(len(choice.image) for choice in (*(body.controlnets or ()), *(body.references or ())))
        if len(await request.body()) - image_chars > TEXT_BODY_BYTES:
            raise too_long(TEXT_BODY_BYTES)
        return body

    async def _read_json(self, request: Request) -> GenerateBody:
        """Read a JSON body, whose ``infotext`` fills the fields that it omits."""
        data = await read_json(request)
        if b'"infotext"' not in data:
            return await read_body(request, self.body)
        names = [model.name for model in self._engine.models]
        service = self._service
        return await ANSWERS.run(
            read_repeated, self.body, data, names, service.refused_fields, service.upscaler_networks
        )

    async def _read_form(self, request: Request, kind: type[StartBody]) -> StartBody:
        """Read a form with its uploaded files."""
        form = await read_form(request, max_files=MAX_PICTURES + 1)
        if unknown := form.files.keys() - {"image", "images", "mask"}:
            name = min(unknown)
            raise InvalidRequest(f"{name[:64]!r} is not a file field; upload files as image and mask.", param=name[:64])
        body = parse_fields(kind, form.fields)
        body.with_uploads(form.files)
        return body

    async def _plan(self, body: GenerateBody, request: Request, client: str) -> ImagePlan:
        return await self._service.plan(body, request, client)

    def _admit(self, plan: ImagePlan, client: str) -> AbstractContextManager[Ticket]:
        return self._service.admit(plan)

    async def _answer(self, plan: ImagePlan, ticket: Ticket) -> Response:
        images = await self._service.run(plan, ticket)
        is_short = sum(len(entry["b64_json"]) for entry in images.entries) <= PARSE_IN_THREAD_BYTES
        content = encode_answer(plan, images) if is_short else await ANSWERS.run(encode_answer, plan, images)
        return json_response(content, images.warnings)

    def _events(self, plan: ImagePlan, ticket: Ticket) -> Events:
        return self._service.stream(plan, OpenAIEncoder(plan), ticket.watch)

    async def cancel(self, request: Request) -> Response:
        """End the request whose id is in the path; its slots are free at the next step."""
        request_id = str(request.path_params["request_id"])
        if not await self._in_flight.cancel(request_id, owner_of(request)):
            raise _not_in_flight(request_id)
        return JSONResponse({"id": request_id, "object": "image.generation", "status": "cancelled"})

    async def interrupt(self, request: Request) -> Response:
        """End the request whose id is in the path early; its own answer has the unfinished images."""
        request_id = str(request.path_params["request_id"])
        if not self._in_flight.has(request_id, owner_of(request)):
            raise _not_in_flight(request_id)
        self._engine.interrupt(request_id)
        return JSONResponse({"id": request_id, "object": "image.generation", "status": "interrupted"})


def _not_in_flight(request_id: str) -> HttpError:
    message = f"no active image request has the id {show(request_id)}; it may have ended."
    return HttpError(404, message, code="request_not_found")
