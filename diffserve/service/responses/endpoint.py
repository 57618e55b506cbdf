"""``POST /v1/responses`` and the routes of stored responses: retrieve, delete, cancel, list input items.

A response is a text of the language model or images of the shared image service. Background responses go on after
their client disconnects; their event streams can be followed again from any event.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack, aclosing
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.bounds import check
from diffserve.api.errors import DiffserveError, InvalidRequest, ModelNotFound
from diffserve.api.text_types import TextAccepted, TextDelta, TextFinished
from diffserve.service.admission import Ticket
from diffserve.service.http.addresses import share_of
from diffserve.service.http.errors import OUR_MISTAKE, expected_error, log_failure
from diffserve.service.http.middleware import TEXT_BODY_BYTES, too_long
from diffserve.service.http.routing import bool_query, int_query
from diffserve.service.http.streams import Events, EventStreamResponse, Lasting
from diffserve.service.images.image_endpoint import ImageServiceEndpoint
from diffserve.service.images.plan import ImagePlan
from diffserve.service.images.service import NO_IMAGE, ImageService
from diffserve.service.lifecycle import (
    CANCELLED,
    Interruption,
    interruption,
    json_response,
    owner_of,
    warning_headers,
    work_until,
)
from diffserve.service.models import check_language_model, is_alias
from diffserve.service.responses.conversations import TOO_LONG, Conversations
from diffserve.service.responses.response_objects import (
    NO_TOKENS,
    CallEncoder,
    Json,
    ResponseEvents,
    TextEvents,
    completed_call,
    conversation_of,
    head_of,
    output_turns,
    response_error,
    response_of,
    tool_usage_of,
    usage_of,
)
from diffserve.service.responses.response_plan import (
    ResponsePlan,
    check_background,
    finished,
    in_tool,
    plan_image,
    plan_text,
    tool_of,
)
from diffserve.service.responses.response_store import MAX_BYTES, EventLog, ResponseStore, StoredResponse, replay
from diffserve.service.responses.schemas import ResponseBody, Tool
from diffserve.service.responses.turns import Turn, items_of, merge_warnings, page_of, prompt_of, read_turns
from diffserve.service.threads import ANSWERS, LISTINGS
from diffserve.store.errors import StoreError

MAX_EVENTS: Final = 10**9
TOO_LARGE: Final = "the response is too large to be stored; request it without background."

log = logging.getLogger("diffserve.http")


class Responses(ImageServiceEndpoint[ResponseBody, ResponsePlan]):
    """Endpoint of ``/v1/responses`` and handlers of the routes of stored responses."""

    body = ResponseBody
    ending = b""

    def __init__(self, service: ImageService, *, store: ResponseStore, conversations: Conversations) -> None:
        super().__init__(service)
        self._background_tasks: set[asyncio.Task[None]] = set()
        self.on_background_end: Callable[[str, str, str], None] | None = None  # owner, type of the event, id
        self._logs: dict[str, EventLog] = {}  # event logs of streamed background responses, by id
        self.store = store
        self.conversations = conversations

    def _refuse_if_full(self, client: str) -> None:
        """Refuse a client that has no slot for a text nor for an image; the body is not read yet."""
        if not self._admission.images.lets_in(client):
            self._admission.texts.check(client)

    async def _read(self, request: Request) -> ResponseBody:
        body = await super()._read(request)
        items = () if isinstance(body.input, str) else body.input
        parts = (part for item in items if isinstance(item.content, list) for part in item.content)
        masks = (tool.input_image_mask for tool in body.tools or ())
        pictures = [part.image_url for part in parts] + [item.result for item in items]
        pictures += [mask.image_url for mask in masks if mask is not None]
        if len(await request.body()) - sum(map(len, filter(None, pictures))) > TEXT_BODY_BYTES:
            raise too_long(TEXT_BODY_BYTES)
        return body

    async def _plan(self, body: ResponseBody, request: Request, client: str) -> ResponsePlan:
        tool, owner = tool_of(body), owner_of(request)
        check_background(body)
        await self._service.read_files(request, body)
        input_turns = read_turns(body.input, self.store.finder(owner))
        earlier = self._earlier_turns(body, owner)
        turns = (*earlier, *input_turns)
        suffix = request.state.request_id.rpartition("-")[2]
        warnings, end_ids, text, images = body.warnings, frozenset[int](), None, None
        if tool is None:
            info = check_language_model(body.model, self._engine.text_info, self._engine.models)
            text = plan_text(body, turns, input_turns, info, self._config, f"txt-{suffix}")
            text = msgspec.structs.replace(text, client=client, share=share_of(request))
            model, end_ids = info.model_id, frozenset(info.end_ids)
        else:
            image_model = self._image_model(body, tool)
            is_world = self._service.is_world_model(image_model)
            prompt = await ANSWERS.run(prompt_of, turns, is_world=is_world)
            warnings += merge_warnings(prompt, turns)
            image_body = plan_image(body, tool, turns, prompt, image_model, is_stream=bool(body.stream))
            try:
                images = await self._service.plan(image_body, request, client)
            except InvalidRequest as error:
                raise in_tool(error) from None
            except ModelNotFound as error:
                raise ModelNotFound(error.message, param="tools[0].model") from None
            model = images.request.model
            warnings += images.warnings
            if body.instructions:
                warnings.append("instructions have no effect on an image.")
        return ResponsePlan(
            head=head_of(body, f"resp_{suffix}", int(time.time()), model),
            owner=owner,
            turns=turns,
            input_span=slice(len(earlier), len(turns)),
            is_stored=body.store is not False,
            text=text,
            images=images,
            end_ids=end_ids,
            warnings=tuple(warnings),
            is_stream=bool(body.stream),
        )

    def _admit(self, plan: ResponsePlan, client: str) -> AbstractContextManager[Ticket]:
        if plan.images is not None:
            return self._service.admit(plan.images)
        assert plan.text is not None
        return self._admission.texts.entered(client, 1, priority=plan.text.priority)

    def _earlier_turns(self, body: ResponseBody, owner: str) -> tuple[Turn, ...]:
        """Return the turns of the conversation that ``body`` continues. Raises InvalidRequest or HttpError 404."""
        if body.conversation is None:
            return self.store.previous(body.previous_response_id, owner) if body.previous_response_id else ()
        message = "previous_response_id and conversation are both given; give one of them."
        check(not body.previous_response_id, message, "previous_response_id")
        return self.conversations.turns(conversation_of(body), owner)

    def _image_model(self, body: ResponseBody, tool: Tool) -> str | None:
        """Return the image model: the tool's, else the response's if that is one; None: the default.

        Any other name is the one of the language model, which is not used.
        """
        if tool.model is not None or body.model is None:
            return tool.model
        paints = is_alias(body.model) or any(model.name == body.model for model in self._engine.models)
        return body.model if paints else None

    async def _begin(self, plan: ResponsePlan, ticket: Ticket, request: Request, stack: ExitStack) -> Response | None:
        if not plan.head["background"]:
            return None
        interrupted: Interruption = asyncio.get_running_loop().create_future()
        work = secrets.token_urlsafe()  # internal id: clients cancel by the response's id and its owner's key
        stack.enter_context(self._in_flight.listed(work, interrupted))
        initial = self._store_response(plan, response_of(plan.head, "in_progress", []), work)
        record = EventLog()
        contexts = stack.pop_all()
        if plan.is_stream:
            self._logs[plan.head["id"]] = record
            contexts.callback(self._end, plan.head["id"], record)
        task = asyncio.create_task(
            self._run_and_announce(plan, ticket, interrupted, contexts, record), name="background response"
        )
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
        if plan.is_stream:
            headers = warning_headers(plan.warnings)

            async def follow_again(request: Request) -> Response:
                return await self._follow(record.follow(0), request, headers)

            response = await self._follow(record.follow(0), request, headers)
            response.lasting = Lasting(follow_again, record.joined)
            return response
        return json_response(initial, plan.warnings)

    def _end(self, response_id: str, record: EventLog) -> None:
        """Store the events of a finished background response."""
        record.close()
        del self._logs[response_id]
        self.store.note_events(response_id, tuple(record.events))

    async def _follow(
        self, events: Events, request: Request, headers: dict[str, str] | None = None
    ) -> EventStreamResponse:
        """Return a stream of ``events`` that ends when the client of ``request`` disconnects."""
        with ExitStack() as stack:
            stack.enter_context(self._engine.metrics.reading())
            interrupted = stack.enter_context(interruption(request))
            until, limit_s = stack.pop_all(), self._limit_s
            return await EventStreamResponse(events, interrupted, until, limit_s=limit_s, headers=headers).opened()

    async def _record(self, plan: ResponsePlan, ticket: Ticket, events: ResponseEvents, record: EventLog) -> None:
        """Run a response and add its events to ``record``."""
        async with aclosing(self._stream(plan, ticket, events)) as chunks:
            async for chunk in chunks:
                if record.num_bytes > MAX_BYTES:
                    raise DiffserveError(TOO_LARGE)
                record.add(chunk)

    async def _run_and_announce(
        self, plan: ResponsePlan, ticket: Ticket, interrupted: Interruption, contexts: ExitStack, record: EventLog
    ) -> None:
        """Run a background response and add the event of its end, unless the response was deleted meanwhile."""
        await self._run_in_background(plan, ticket, interrupted, contexts, record)
        name = plan.head["id"]
        if self.on_background_end is None or not self.store.has(name, plan.owner):
            return
        status = msgspec.json.decode(self.store.get(name, plan.owner).body)["status"]
        try:
            await LISTINGS.run(self.on_background_end, plan.owner, f"response.{status}", name)
        except StoreError as error:
            log_failure(log, "the event of a response is lost", error)

    async def _run_in_background(
        self, plan: ResponsePlan, ticket: Ticket, interrupted: Interruption, contexts: ExitStack, record: EventLog
    ) -> None:
        """Run a background response and store its outcome before ``contexts`` are released."""
        events = ResponseEvents(plan.head)
        with contexts:
            try:
                answered = self._record(plan, ticket, events, record) if plan.is_stream else None
                work: Coroutine[Any, Any, object] = answered or self._answer(plan, ticket)
                await work_until(interrupted, work, limit_s=self._limit_s)
                if not self.store.holds_work(plan.head["id"]):
                    return
                error = DiffserveError(TOO_LARGE)
            except DiffserveError as raised:
                error = raised
            except Exception as failure:
                log_failure(log, "a background response failed", failure)
                error = expected_error(failure) or DiffserveError(OUR_MISTAKE)
            reason = None if error.code == CANCELLED else response_error(error)
            response = response_of(plan.head, "failed" if reason else "cancelled", [], error=reason)
            self._store_response(plan, response)
            record.has_failed = True
            if plan.is_stream and not events.is_ended:
                record.add(events.opened() + events.ended(response))

    async def _answer(self, plan: ResponsePlan, ticket: Ticket) -> Response:
        try:
            if plan.images is not None:
                response = await self._answer_images(plan, plan.images, ticket)
            else:
                response = await self._answer_text(plan, ticket)
        except InvalidRequest as error:
            raise plan.translate(error) from None
        return json_response(self._store_response(plan, response), response["warnings"])

    async def _answer_images(self, plan: ResponsePlan, images: ImagePlan, ticket: Ticket) -> Json:
        generated = await self._service.run(images, ticket)
        output = [
            completed_call(images, plan.item_id("ig", result.image_index), entry, result)
            for result, entry in zip(generated.results, generated.entries, strict=True)
        ]
        used = {"usage": usage_of(NO_TOKENS), "tool_usage": tool_usage_of(images, generated.results)}
        warnings = list(dict.fromkeys([*plan.warnings, *generated.warnings]))
        return response_of(plan.head, "completed", output, **used, warnings=warnings)

    async def _answer_text(self, plan: ResponsePlan, ticket: Ticket) -> Json:
        assert plan.text is not None
        async with self._engine.submit(plan.text, partial(ticket.watch_texts, 0), is_whole=True) as job:
            async for event in job:
                if isinstance(event, TextFinished):
                    return finished(plan, event)
        raise DiffserveError("the engine finished without an answer.")

    def _events(self, plan: ResponsePlan, ticket: Ticket) -> Events:
        return self._stream(plan, ticket, ResponseEvents(plan.head))

    async def _stream(self, plan: ResponsePlan, ticket: Ticket, events: ResponseEvents) -> Events:
        output: list[Json] = []
        if plan.images is None:
            stream = self._stream_text(plan, ticket, events, output)
        else:
            stream = self._stream_images(plan, plan.images, ticket, events, output)
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    yield chunk
        except DiffserveError as error:
            translated = plan.translate(error) if isinstance(error, InvalidRequest) else error
            if events.is_open:
                yield events.failed(translated, output)
            raise translated from None

    async def _stream_text(
        self, plan: ResponsePlan, ticket: Ticket, events: ResponseEvents, output: list[Json]
    ) -> Events:
        """Yield the events of a text; ``output`` receives its items, also those of a text that fails."""
        assert plan.text is not None
        has_logprobs = plan.text.params.logprobs is not None
        message = TextEvents(events, plan.item_id("msg"), plan.end_ids, has_logprobs)
        async with self._engine.submit(plan.text, partial(ticket.watch_texts, 0)) as job:
            async for event in job:
                match event:
                    case TextAccepted():
                        yield message.opened()
                    case TextDelta():
                        chunk = message.delta(event)
                        output[:] = message.so_far()
                        if chunk:
                            yield chunk
                    case TextFinished():
                        response = finished(plan, event)
                        self._store_response(plan, response)
                        yield message.done(response["output"][0]) + events.ended(response)

    async def _stream_images(
        self, plan: ResponsePlan, images: ImagePlan, ticket: Ticket, events: ResponseEvents, output: list[Json]
    ) -> Events:
        """Yield the events of images; ``output`` receives the items if they fail."""
        ids = [plan.item_id("ig", index) for index in range(images.request.num_images)]
        calls = CallEncoder(events, images, ids)
        try:
            async with aclosing(self._service.stream(images, calls, ticket.watch)) as chunks:
                async for chunk in chunks:
                    yield chunk
            if not calls.results:
                raise DiffserveError(NO_IMAGE)
        except DiffserveError as error:
            output[:] = calls.so_far(error)
            raise
        used = {"usage": usage_of(NO_TOKENS), "tool_usage": tool_usage_of(images, calls.results)}
        warnings = list(dict.fromkeys([*plan.warnings, *calls.warnings]))
        response = response_of(plan.head, "completed", calls.output, **used, warnings=warnings)
        self._store_response(plan, response)
        yield events.ended(response)

    def _store_response(self, plan: ResponsePlan, response: Json, work: str = "") -> bytes:
        """Encode a response and store it if requested; ``work`` is the id of the request that still runs it."""
        new_turns = output_turns(response["output"])
        if plan.head["conversation"] and response["status"] in ("completed", "incomplete"):
            new = (*plan.turns[plan.input_span], *new_turns)
            if not self.conversations.add(plan.head["conversation"]["id"], plan.owner, new):
                response["warnings"].append(TOO_LONG)
        body = msgspec.json.encode(response)
        if plan.is_stored:
            turns = (*plan.turns, *new_turns)
            self.store.put(response["id"], StoredResponse(plan.owner, body, turns, plan.input_span, work))
        return body

    async def get(self, request: Request) -> Response:
        """Return a stored response, or with ``stream`` its events after ``starting_after``."""
        stored, response_id = self._find_response(request), str(request.path_params["response_id"])
        has_seen = "starting_after" in request.query_params
        if not bool_query(request, "stream"):
            message = "starting_after is only for events; add stream=true, or leave it out."
            check(not has_seen, message, "starting_after")
            return Response(stored.body, media_type="application/json")
        place = int_query(request, "starting_after", range(MAX_EVENTS), 0) + 1 if has_seen else 0
        record = self._logs.get(response_id)
        if record is not None:
            return await self._follow(record.follow(place), request)
        message = (
            "stream is only possible for a response that was created with background and stream, and whose events "
            "are stored."
        )
        check(bool(stored.events), message, "stream", "unsupported_parameter")
        return await self._follow(replay(stored.events[place:]), request)

    async def remove(self, request: Request) -> Response:
        """Delete a stored response and cancel its work."""
        response_id = str(request.path_params["response_id"])
        await self._in_flight.cancel(self._find_response(request).work)
        self.store.remove(response_id, owner_of(request))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response; a finished one is returned unchanged."""
        if not msgspec.json.decode(self._find_response(request).body)["background"]:
            message = "only a background response can be cancelled; close the connection to cancel this one."
            raise InvalidRequest(message, param="response_id")
        await self._in_flight.cancel(self._find_response(request).work)
        return Response(self._find_response(request).body, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """Return a page of the input items of a response, by ``order``, ``limit`` and ``after``."""
        stored, suffix = self._find_response(request), str(request.path_params["response_id"]).removeprefix("resp_")
        return JSONResponse(page_of(items_of(stored.turns[stored.input_span], suffix), request.query_params))

    def _find_response(self, request: Request) -> StoredResponse:
        return self.store.get(str(request.path_params["response_id"]), owner_of(request))
