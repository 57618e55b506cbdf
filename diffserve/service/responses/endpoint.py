"""``POST /v1/responses``: read, check, ask the language model or have it painted, tell, and keep; and those that are
kept: ``GET`` and ``DELETE /v1/responses/{id}``, ``GET /v1/responses/{id}/input_items``; and ``POST .../cancel`` for one
that is made in the background, while nobody waits for it. One that is told there too, as a stream, goes on when its
client hangs up, and ``GET /v1/responses/{id}?stream=true&starting_after=N`` tells what came after event N.

What is asked for, a text or a picture, says ``planning``. Pictures are painted by the endpoints of pictures, under
their bounds and in their queue.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import DiffserveError, InvalidRequest, ModelNotFound
from diffserve.api.text_types import TextAccepted, TextDelta, TextFinished, TextRequest
from diffserve.service.admission import Admission, Ticket, share_of
from diffserve.service.endpoint import Checked, Endpoint, Place
from diffserve.service.engine.engines import Engines
from diffserve.service.http.errors import OUR_MISTAKE, expected_error, log_failure
from diffserve.service.http.middleware import TEXT_BODY_BYTES, too_long
from diffserve.service.http.routing import bool_query, int_query
from diffserve.service.http.streams import Events, EventStreamResponse, Lasting
from diffserve.service.images.edit_schemas import EditBody
from diffserve.service.images.edits import read_start
from diffserve.service.images.generations import Generations
from diffserve.service.images.painting import CheckedImages, Start
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.lifecycle import (
    CANCELLED,
    Gate,
    Interruption,
    interruption,
    json_response,
    owner_of,
    warning_headers,
    work_until,
)
from diffserve.service.models import check_language_model, find_model, is_alias
from diffserve.service.responses.answers import (
    NOTHING_SAID,
    Json,
    conversation_of,
    head_of,
    logprob_of,
    message_of,
    output_turns,
    painted_call,
    response_error,
    response_of,
    text_part,
    tool_usage_of,
    usage_of,
)
from diffserve.service.responses.conversation import Turn, items_of, page_of, read_turns
from diffserve.service.responses.conversations import TOO_LONG, Conversations
from diffserve.service.responses.event_log import EventLog, retold
from diffserve.service.responses.events import CallEvents, ResponseEvents, TextEvents
from diffserve.service.responses.follow_ups import merge_warnings, prompt_of
from diffserve.service.responses.kept import MAX_BYTES, KeptResponse, KeptResponses
from diffserve.service.responses.planning import check_background, in_tool, plan_picture, plan_text, tool_of
from diffserve.service.responses.schemas import ResponseBody, Tool
from diffserve.service.texts.answers import timings_of
from diffserve.service.threads import ANSWERS
from diffserve.settings.config import ServeConfig

MAX_EVENTS: Final = 10**9
TOO_LARGE: Final = "the response is too large to be kept; ask for it without background."

log = logging.getLogger("diffserve.http")


class CheckedResponse(Checked, frozen=True, kw_only=True):
    """A checked body: a request of the language model, or one of the painter.

    head     what the object says whatever becomes of it
    owner    whose it is
    turns    the conversation, ``asked`` with this of them
    end_ids  the tokens that end a text, which are not part of it
    """

    head: Json
    owner: str
    turns: tuple[Turn, ...]
    asked: slice
    is_kept: bool
    text: TextRequest | None = None
    painting: CheckedImages | None = None
    end_ids: frozenset[int] = frozenset()

    def item_id(self, kind: str, index: int = 0) -> str:
        """A name for what the response says ("msg") or paints ("ig")."""
        return f"{kind}_{self.head['id'].removeprefix('resp_')}{index:02x}"

    def blame(self, error: InvalidRequest) -> InvalidRequest:
        """What the engine says of its request, in terms of the response."""
        if self.painting is not None:
            return in_tool(error)
        param = "input" if error.param in ("messages", "prompt") else error.param
        return InvalidRequest(error.message, param=param, code=error.code)


class ToolPainter(Generations):
    """Paints what responses ask for."""

    def paints_world(self, model: str | None) -> bool:
        """Return whether ``model`` paints the picture world of the embedded one."""
        try:
            return find_model(model, self._engine.models, self._engine.text_info).world is not None
        except DiffserveError:
            return False  # the check of the request says why

    async def read_files(self, body: ResponseBody, request: Request) -> None:
        """Put the pictures into ``body`` that it names by files. Raises InvalidRequest."""
        await self._checks.files.fill(request, body)

    async def check(self, body: GenerateBody, request: Request, client: str) -> tuple[CheckedImages, Place]:
        """See ``Endpoint``. Raises InvalidRequest in terms of the response."""
        try:
            return await self._check(body, request, client)
        except InvalidRequest as error:
            raise in_tool(error) from None
        except ModelNotFound as error:
            raise ModelNotFound(error.message, param="tools[0].model") from None

    async def _start(self, body: GenerateBody, request: Request, client: str) -> tuple[GenerateBody, Start | None]:
        if not isinstance(body, EditBody):
            return body, None
        return await self._decoded(request, client, partial(read_start, body))


class Responses(Endpoint[ResponseBody, CheckedResponse]):
    """The endpoint. ``painter``: its requests and these are cancelled at one address."""

    body = ResponseBody
    ending = b""

    def __init__(
        self,
        engine: Engines,
        config: ServeConfig,
        gate: Gate,
        admission: Admission,
        *,
        painter: ToolPainter,
        kept: KeptResponses,
        conversations: Conversations,
    ) -> None:
        super().__init__(engine, config, gate, admission)
        self._painter = painter
        self._in_flight = painter._in_flight
        self._behind: set[asyncio.Task[None]] = set()
        self._logs: dict[str, EventLog] = {}  # of those that are made and told in the background, by their ids
        self.kept = kept
        self.conversations = conversations

    def _refuse_if_full(self, client: str) -> None:
        """Whether a text or a picture is asked for, the body will say: here only where neither would be let in."""
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

    async def _check(self, body: ResponseBody, request: Request, client: str) -> tuple[CheckedResponse, Place]:
        tool, owner = tool_of(body), owner_of(request)
        check_background(body)
        await self._painter.read_files(body, request)
        own = read_turns(body.input, self.kept.finder(owner))
        before = self._before(body, owner)
        turns = (*before, *own)
        suffix = request.state.request_id.rpartition("-")[2]
        warnings, end_ids, text, painting = body.warnings, frozenset[int](), None, None
        place: Place
        if tool is None:
            info = check_language_model(body.model, self._engine.text_info, self._engine.models)
            text = plan_text(body, turns, own, info, self._config, f"txt-{suffix}")
            text = msgspec.structs.replace(text, client=client, share=share_of(request))
            place = self._admission.texts.entered(client, 1, priority=text.priority)
            model, end_ids = info.model_id, frozenset(info.end_ids)
        else:
            painter = self._painter_name(body, tool)
            prompt = await ANSWERS.run(prompt_of, turns, is_world=self._painter.paints_world(painter))
            warnings += merge_warnings(prompt, turns)
            picture_body = plan_picture(body, tool, turns, prompt, painter, is_stream=bool(body.stream))
            painting, place = await self._painter.check(picture_body, request, client)
            model = painting.request.model
            warnings += painting.warnings
            if body.instructions:
                warnings.append("instructions change nothing of a picture.")
        checked = CheckedResponse(
            head=head_of(body, f"resp_{suffix}", int(time.time()), model),
            owner=owner,
            turns=turns,
            asked=slice(len(before), len(turns)),
            is_kept=body.store is not False,
            text=text,
            painting=painting,
            end_ids=end_ids,
            warnings=tuple(warnings),
            is_stream=bool(body.stream),
        )
        return checked, place

    def _before(self, body: ResponseBody, owner: str) -> tuple[Turn, ...]:
        """What was said before ``body``. InvalidRequest, or HttpError 404."""
        if body.conversation is None:
            return self.kept.previous(body.previous_response_id, owner) if body.previous_response_id else ()
        if body.previous_response_id:
            said = "previous_response_id is given beside conversation; give one of them."
            raise InvalidRequest(said, param="previous_response_id")
        return self.conversations.turns(conversation_of(body), owner)

    def _painter_name(self, body: ResponseBody, tool: Tool) -> str | None:
        """The model that paints: the tool's, else the response's where that is one. Any other name is that of the
        language model, which is not asked.
        """
        if tool.model is not None or body.model is None:
            return tool.model
        paints = is_alias(body.model) or any(model.name == body.model for model in self._engine.models)
        return body.model if paints else None

    async def _begin(
        self, checked: CheckedResponse, ticket: Ticket, request: Request, stack: ExitStack
    ) -> Response | None:
        if not checked.head["background"]:
            return None
        interrupted: Interruption = asyncio.get_running_loop().create_future()
        work = secrets.token_urlsafe()  # known to nobody: it is cancelled by the response's id and its owner's key
        stack.enter_context(self._in_flight.listed(work, interrupted))
        begun = self._keep(checked, response_of(checked.head, "in_progress", []), work)
        record = EventLog()
        held = stack.pop_all()
        if checked.is_stream:
            self._logs[checked.head["id"]] = record
            held.callback(self._end, checked.head["id"], record)
        task = asyncio.create_task(self._make(checked, ticket, interrupted, held, record), name="background response")
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)
        if checked.is_stream:
            headers = warning_headers(checked.warnings)

            async def again(request: Request) -> Response:
                return await self._followed(record.follow(0), request, headers)

            response = await self._followed(record.follow(0), request, headers)
            response.lasting = Lasting(again, record.whole)
            return response
        return json_response(begun, checked.warnings)

    def _end(self, response_id: str, record: EventLog) -> None:
        """What made a response in the background is over, and all of it is in ``record``."""
        record.close()
        del self._logs[response_id]
        self.kept.note_events(response_id, tuple(record.events))

    async def _followed(
        self, events: Events, request: Request, headers: dict[str, str] | None = None
    ) -> EventStreamResponse:
        """``events`` as they come, for as long as the client of ``request`` listens."""
        with ExitStack() as stack:
            stack.enter_context(self._engine.metrics.reading())
            interrupted = stack.enter_context(interruption(request))
            until, limit_s = stack.pop_all(), self._limit_s
            return await EventStreamResponse(events, interrupted, until, limit_s=limit_s, headers=headers).opened()

    async def _tell(self, checked: CheckedResponse, ticket: Ticket, events: ResponseEvents, record: EventLog) -> None:
        """Have a response be made and told in ``record``."""
        async with aclosing(self._told(checked, ticket, events)) as chunks:
            async for chunk in chunks:
                if record.num_bytes > MAX_BYTES:
                    raise DiffserveError(TOO_LARGE)
                record.add(chunk)

    async def _make(
        self, checked: CheckedResponse, ticket: Ticket, interrupted: Interruption, held: ExitStack, record: EventLog
    ) -> None:
        """A response in the background, which is kept, whatever becomes of it, before ``held`` is let go."""
        events = ResponseEvents(checked.head)
        with held:
            try:
                answered = self._tell(checked, ticket, events, record) if checked.is_stream else None
                work: Coroutine[Any, Any, object] = answered or self._answer(checked, ticket)
                await work_until(interrupted, work, limit_s=self._limit_s)
                if not self.kept.holds_work(checked.head["id"]):
                    return
                error = DiffserveError(TOO_LARGE)
            except DiffserveError as said:
                error = said
            except Exception as failure:
                log_failure(log, "a response in the background failed", failure)
                error = expected_error(failure) or DiffserveError(OUR_MISTAKE)
            reason = None if error.code == CANCELLED else response_error(error)
            response = response_of(checked.head, "failed" if reason else "cancelled", [], error=reason)
            self._keep(checked, response)
            record.has_failed = True
            if checked.is_stream and not events.is_ended:
                record.add(events.opened() + events.ended(response))

    async def _answer(self, checked: CheckedResponse, ticket: Ticket) -> Response:
        try:
            response = await (self._said if checked.painting is None else self._painted)(checked, ticket)
        except InvalidRequest as error:
            raise checked.blame(error) from None
        return json_response(self._keep(checked, response), response["warnings"])

    async def _painted(self, checked: CheckedResponse, ticket: Ticket) -> Json:
        painting = checked.painting
        assert painting is not None
        painted = await self._painter.painted(painting, ticket)
        output = [
            painted_call(painting, checked.item_id("ig", result.image_index), entry, result)
            for result, entry in zip(painted.results, painted.entries, strict=True)
        ]
        used = {"usage": usage_of(NOTHING_SAID), "tool_usage": tool_usage_of(painting, painted.results)}
        warnings = list(dict.fromkeys([*checked.warnings, *painted.warnings]))
        return response_of(checked.head, "completed", output, **used, warnings=warnings)

    async def _said(self, checked: CheckedResponse, ticket: Ticket) -> Json:
        assert checked.text is not None
        async with self._engine.submit(checked.text, partial(ticket.watch_texts, 0), is_whole=True) as job:
            async for told in job:
                if isinstance(told, TextFinished):
                    return finished(checked, told)
        raise DiffserveError("the engine finished without an answer.")

    def _events(self, checked: CheckedResponse, ticket: Ticket) -> Events:
        return self._told(checked, ticket, ResponseEvents(checked.head))

    async def _told(self, checked: CheckedResponse, ticket: Ticket, events: ResponseEvents) -> Events:
        telling = self._telling_text if checked.painting is None else self._telling_pictures
        output: list[Json] = []
        try:
            async with aclosing(telling(checked, ticket, events, output)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except DiffserveError as error:
            said = checked.blame(error) if isinstance(error, InvalidRequest) else error
            if events.is_open:
                yield events.failed(said, output)
            raise said from None

    async def _telling_text(
        self, checked: CheckedResponse, ticket: Ticket, events: ResponseEvents, output: list[Json]
    ) -> Events:
        """``output``: what there is when it breaks off."""
        assert checked.text is not None
        has_logprobs = checked.text.params.logprobs is not None
        message = TextEvents(events, checked.item_id("msg"), checked.end_ids, has_logprobs)
        async with self._engine.submit(checked.text, partial(ticket.watch_texts, 0)) as job:
            async for told in job:
                match told:
                    case TextAccepted():
                        yield message.opened()
                    case TextDelta():
                        chunk = message.delta(told)
                        output[:] = message.so_far()
                        if chunk:
                            yield chunk
                    case TextFinished():
                        response = finished(checked, told)
                        self._keep(checked, response)
                        yield message.done(response["output"][0]) + events.ended(response)

    async def _telling_pictures(
        self, checked: CheckedResponse, ticket: Ticket, events: ResponseEvents, output: list[Json]
    ) -> Events:
        """The same of pictures."""
        painting = checked.painting
        assert painting is not None
        ids = [checked.item_id("ig", index) for index in range(painting.request.num_images)]
        calls = CallEvents(events, painting, ids)
        try:
            async with aclosing(self._painter.told(painting, ticket, calls)) as chunks:
                async for chunk in chunks:
                    yield chunk
            if not calls.results:
                raise DiffserveError("the engine finished without a picture.")
        except DiffserveError as error:
            output[:] = calls.so_far(error)
            raise
        used = {"usage": usage_of(NOTHING_SAID), "tool_usage": tool_usage_of(painting, calls.results)}
        warnings = list(dict.fromkeys([*checked.warnings, *calls.warnings]))
        response = response_of(checked.head, "completed", calls.output, **used, warnings=warnings)
        self._keep(checked, response)
        yield events.ended(response)

    def _keep(self, checked: CheckedResponse, response: Json, work: str = "") -> bytes:
        """``response`` as JSON, which is kept where that is wanted. ``work``: the request that still makes it."""
        said = output_turns(response["output"])
        if checked.head["conversation"] and response["status"] in ("completed", "incomplete"):
            new = (*checked.turns[checked.asked], *said)
            if not self.conversations.add(checked.head["conversation"]["id"], checked.owner, new):
                response["warnings"].append(TOO_LONG)
        body = msgspec.json.encode(response)
        if checked.is_kept:
            turns = (*checked.turns, *said)
            self.kept.put(response["id"], KeptResponse(checked.owner, body, turns, checked.asked, work))
        return body

    async def get(self, request: Request) -> Response:
        """A response that is kept, or its events, from the one after ``starting_after`` on."""
        found, response_id = self._found(request), str(request.path_params["response_id"])
        has_seen = "starting_after" in request.query_params
        if not bool_query(request, "stream"):
            if has_seen:
                said = "starting_after is about events: ask for them with stream=true, or leave it out."
                raise InvalidRequest(said, param="starting_after")
            return Response(found.body, media_type="application/json")
        place = int_query(request, "starting_after", range(MAX_EVENTS), 0) + 1 if has_seen else 0
        record = self._logs.get(response_id)
        if record is not None:
            return await self._followed(record.follow(place), request)
        if not found.events:
            said = "stream is for a response that was asked for with background and stream, and whose events are kept."
            raise InvalidRequest(said, param="stream", code="unsupported_parameter")
        return await self._followed(retold(found.events[place:]), request)

    async def remove(self, request: Request) -> Response:
        """Forget one, and end what still makes it."""
        response_id = str(request.path_params["response_id"])
        await self._in_flight.cancel(self._found(request).work)
        self.kept.remove(response_id, owner_of(request))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End what makes one in the background; one that is over stays as it is."""
        if not msgspec.json.decode(self._found(request).body)["background"]:
            said = "only a response in the background can be cancelled; hang up where you wait for one."
            raise InvalidRequest(said, param="response_id")
        await self._in_flight.cancel(self._found(request).work)
        return Response(self._found(request).body, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """What one was asked with, the last first as OpenAI has it unless ``order`` is asc; ``limit`` of them, those
        that come ``after`` an id.
        """
        found, suffix = self._found(request), str(request.path_params["response_id"]).removeprefix("resp_")
        return JSONResponse(page_of(items_of(found.turns[found.asked], suffix), request.query_params))

    def _found(self, request: Request) -> KeptResponse:
        return self.kept.get(str(request.path_params["response_id"]), owner_of(request))


def finished(checked: CheckedResponse, told: TextFinished) -> Json:
    """A text as a whole response."""
    assert checked.text is not None
    [result] = told.results
    is_whole = result.finish_reason == "stop"
    status = "completed" if is_whole else "incomplete"
    tokens = [token for token in result.tokens if token.token_id not in checked.end_ids]
    has_logprobs = checked.text.params.logprobs is not None
    part = text_part(result.text, [logprob_of(token) for token in tokens] if has_logprobs else None)
    return response_of(
        checked.head,
        status,
        [message_of(checked.item_id("msg"), status, [part])],
        incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
        usage=usage_of(told.usage),
        timings=timings_of([told]),
        warnings=list(checked.warnings),
    )
