"""OpenAI's JSON objects and stream events of a response, its messages and its images.

::

    created, in_progress                                                    when it is in the queue
    output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done, output_item.done
    output_item.added, image_generation_call.in_progress, generating, partial_image ..., completed, output_item.done
    completed, incomplete (also if it was cancelled) or failed              with the complete object

``response.diffserve.progress`` is an extension, sent if the tool has ``progress``.
"""

from __future__ import annotations

import time
from typing import Any, Final

from diffserve.api.errors import DeadlineUnreachable, DiffserveError, InvalidRequest, ModerationBlocked, QueueFull
from diffserve.api.text_types import TextDelta, TextUsage, TokenInfo
from diffserve.api.types import Accepted, ImageFailed, ImageResult, Preview, Progress, Queued
from diffserve.service.http.bodies import FLEX
from diffserve.service.http.errors import BLOCKED, failure_message
from diffserve.service.http.streams import event
from diffserve.service.images.openai_encoder import EventEncoder, delivery_fields, image_entry, recipe
from diffserve.service.images.openai_encoder import usage as image_usage
from diffserve.service.images.plan import ImagePlan
from diffserve.service.responses.schemas import PAINTS, ConversationId, ResponseBody, TextFormat, Tool, ToolChoice
from diffserve.service.responses.turns import Turn
from diffserve.service.texts.completions import token_fields

Json = dict[str, Any]
ERROR_CODES: Final[dict[type[DiffserveError], str]] = {
    ModerationBlocked: "image_content_policy_violation",
    InvalidRequest: "invalid_prompt",
    QueueFull: "rate_limit_exceeded",
    DeadlineUnreachable: "rate_limit_exceeded",
}
"""OpenAI's code of a failed response, by the error; all others are ``server_error``."""

NO_TOKENS = TextUsage(prompt_tokens=0, output_tokens=0)
"""Usage of a response in which the language model did not run."""


def head_of(body: ResponseBody, response_id: str, created: int, model: str) -> Json:
    """Return the fields of a response object that do not depend on its outcome, without the tool's images."""
    choice, form = body.tool_choice, (body.text and body.text.format) or TextFormat()
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "model": model,
        "background": bool(body.background),
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "conversation": None if body.conversation is None else {"id": conversation_of(body)},
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": FLEX if body.service_tier == FLEX else "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump(exclude_none=True) if isinstance(choice, ToolChoice) else choice or "auto",
        "tools": [_tool_fields(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def conversation_of(body: ResponseBody) -> str:
    """Return the id of the conversation of ``body``; "" if there is none."""
    conversation = body.conversation
    return conversation.id if isinstance(conversation, ConversationId) else conversation or ""


def response_of(head: Json, status: str, output: list[Json], **fields: Any) -> Json:
    """Return the complete response object; ``fields`` replace those that are empty otherwise."""
    state = {
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "error": None,
        "incomplete_details": None,
        "output": output,
        "usage": None,
    }
    return head | state | fields


def response_error(error: DiffserveError) -> Json:
    """Return why a response failed; ``code`` is one of OpenAI's codes, ``type`` the one of this server."""
    code = next((code for kind, code in ERROR_CODES.items() if isinstance(error, kind)), "server_error")
    return {"code": code, "message": error.message, "param": error.param, "type": error.code}


def usage_of(used: TextUsage) -> Json:
    """Return the usage of the language model in the form of responses."""
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt_tokens + used.output_tokens,
    }


def tool_usage_of(plan: ImagePlan, results: list[ImageResult]) -> Json:
    """Return the usage of image generation."""
    return {"image_gen": image_usage(plan, results), "web_search": {"num_requests": 0}}


def message_of(item_id: str, status: str, content: list[Json]) -> Json:
    """Return an output message."""
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, logprobs: list[Json] | None = None) -> Json:
    """Return a text part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def logprob_of(token: TokenInfo) -> Json:
    """Return a token with its log probability and its alternatives."""
    top = [token_fields(text, logprob, []) for text, _, logprob in token.top]
    return token_fields(token.text, token.logprob, []) | {"top_logprobs": top}


def call_of(plan: ImagePlan, item_id: str, status: str) -> Json:
    """Return the call item of an image that is not finished."""
    action = "generate" if plan.start is None else "edit"
    return {"id": item_id, "type": f"{PAINTS}_call", "status": status, "result": None, "action": action}


def call_error(code: str, message: str) -> Json:
    """Return the error of a failed image; of a blocked one with OpenAI's moderation details, without categories."""
    if code != ModerationBlocked.default_code:
        return {"type": "image_generation_error", "code": code, "message": message, "param": None}
    details = {"categories": [], "moderation_stage": "output"}
    error = {"type": BLOCKED, "code": code, "message": message, "param": None}
    return error | {"moderation_details": details}


def completed_call(plan: ImagePlan, item_id: str, entry: Json, result: ImageResult) -> Json:
    """Return the call item of a finished image with its parameters."""
    fields = {name: value for name, value in entry.items() if name != "b64_json"}
    how = recipe(plan, result) | delivery_fields(plan) | fields
    picture = {"result": entry["b64_json"], "revised_prompt": result.prompt}
    return how | call_of(plan, item_id, "completed") | picture


def output_turns(output: list[Json]) -> list[Turn]:
    """Return the turns that the output adds to its conversation."""
    return [
        Turn("assistant", "".join(part["text"] for part in item["content"]), id=item["id"])
        if item["type"] == "message"
        else Turn("assistant", "", (item["result"],), item["id"], item["revised_prompt"])
        for item in output
        if item["type"] == "message" or item["result"]
    ]


def _tool_fields(tool: Tool) -> Json:
    return tool.model_dump(exclude_none=True, exclude={"input_image_mask", "controlnets"})


PROGRESS: Final = "diffserve.progress"


class ResponseEvents:
    """Numbers and encodes the events of one response; ``head`` has the fixed fields of its object."""

    def __init__(self, head: Json) -> None:
        self.head = head
        self.is_open = self.is_ended = False
        self._number = 0

    def opened(self) -> bytes:
        """Encode the start of the response; empty after the first call."""
        if self.is_open:
            return b""
        self.is_open = True
        response = response_of(self.head, "in_progress", [])
        return self.write("created", response=response) + self.write("in_progress", response=response)

    def ended(self, response: Json) -> bytes:
        """Return the last event, with the complete response; OpenAI has no event for a cancelled one."""
        self.is_ended = True
        kind = "incomplete" if response["status"] == "cancelled" else response["status"]
        return self.write(kind, response=response)

    def failed(self, error: DiffserveError, output: list[Json]) -> bytes:
        """Encode the last event of a response that failed."""
        return self.ended(response_of(self.head, "failed", output, error=response_error(error)))

    def write(self, kind: str, **fields: Any) -> bytes:
        """Encode one event with the next number."""
        kind = f"response.{kind}"
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


class TextEvents:
    """Encodes the events of a message."""

    def __init__(self, events: ResponseEvents, item_id: str, end_ids: frozenset[int], has_logprobs: bool) -> None:
        self._events = events
        self._at = {"item_id": item_id, "output_index": 0, "content_index": 0}
        self._item_id = item_id
        self._end_ids = end_ids
        self._has_logprobs = has_logprobs
        self._text = ""

    def opened(self) -> bytes:
        """Encode the start of the message."""
        item = message_of(self._item_id, "in_progress", [])
        return (
            self._events.opened()
            + self._events.write("output_item.added", output_index=0, item=item)
            + self._events.write("content_part.added", **self._at, part=text_part(""))
        )

    def delta(self, new: TextDelta) -> bytes:
        """Encode new text; empty if there is neither text nor a token to report."""
        tokens = [token for token in new.tokens if self._has_logprobs and token.token_id not in self._end_ids]
        if not new.text and not tokens:
            return b""
        self._text += new.text
        content = {"delta": new.text, "logprobs": [logprob_of(token) for token in tokens]}
        return self._events.write("output_text.delta", **self._at, **content)

    def done(self, message: Json) -> bytes:
        """Encode the end of the message."""
        [part] = message["content"]
        return (
            self._events.write("output_text.done", **self._at, text=part["text"], logprobs=part["logprobs"])
            + self._events.write("content_part.done", **self._at, part=part)
            + self._events.write("output_item.done", output_index=0, item=message)
        )

    def so_far(self) -> list[Json]:
        """Return the incomplete message as the output of a failed response."""
        return [message_of(self._item_id, "incomplete", [text_part(self._text)])]


class CallEncoder(EventEncoder):
    """Encodes image events as the events of a response; each image is an output item."""

    def __init__(self, events: ResponseEvents, plan: ImagePlan, ids: list[str]) -> None:
        super().__init__(plan)
        self._events = events
        self._ids = ids
        self._begun: set[int] = set()
        self.output = [call_of(plan, item_id, "in_progress") for item_id in ids]
        self.results: list[ImageResult] = []
        self.warnings: list[str] = []

    def queued(self, event: Accepted | Queued, **fields: Any) -> bytes | None:
        """Encode the queue position; the first call starts the response."""
        opened = self._opened()
        if not self._plan.has_progress:
            return opened or None
        left = {"seconds_left": event.seconds_left, "request_seconds_left": event.seconds_left}
        return opened + self._events.write(PROGRESS, step=0, queue_position=event.queue_position, **left, **fields)

    def progressed(self, progress: Progress) -> bytes | None:
        """Encode the completed steps; None if the last such event is too recent."""
        index = progress.image_index
        if not self._is_item(index):
            return None
        head = self._generating(index)
        if not self._plan.has_progress or not self._is_progress_due(progress):
            return head or None
        far = {"step": progress.step_index, "steps": progress.num_steps, "seconds_left": progress.seconds_left}
        request_seconds_left = progress.request_seconds_left
        return head + self._events.write(PROGRESS, **self._at(index), **far, request_seconds_left=request_seconds_left)

    def partial(self, preview: Preview) -> bytes | None:
        """Encode a preview."""
        index = preview.image_index
        if not self._is_item(index):
            return None
        number, file, fields = self._encode_preview(preview)
        partial = {"partial_image_index": number, "partial_image_b64": file, **fields}
        return self._generating(index) + self._call(index, "partial_image", **partial)

    def completed(self, result: ImageResult, warnings: list[str]) -> bytes:
        """Encode a finished image."""
        index, entry = result.image_index, image_entry(self._plan, result)
        item = self.output[index] = completed_call(self._plan, self._ids[index], entry, result)
        self.results.append(result)
        self.warnings = list(dict.fromkeys([*self.warnings, *warnings]))
        head = self._generating(index) + self._call(index, "completed")
        return head + self._events.write("output_item.done", output_index=index, item=item)

    def image_failed(self, failed: ImageFailed) -> bytes | None:
        """Encode the failure of one image; the response goes on."""
        if not self._is_item(failed.image_index):
            return None
        index, error = failed.image_index, call_error(failed.code, failure_message(failed))
        item = self.output[index] = call_of(self._plan, self._ids[index], "failed") | {"error": error}
        return self._opened() + self._events.write("output_item.done", output_index=index, item=item)

    def so_far(self, error: DiffserveError) -> list[Json]:
        """Return the output of a response that fails with ``error``: unfinished images have failed."""
        ended, failed = ("completed", "failed"), {"status": "failed", "error": call_error(error.code, error.message)}
        return [item if item["status"] in ended else item | failed for item in self.output]

    def _opened(self) -> bytes:
        if self._events.is_open:
            return b""
        encoded = self._events.opened()
        for index, item in enumerate(self.output):
            encoded += self._events.write("output_item.added", output_index=index, item=item)
            encoded += self._call(index, "in_progress")
        return encoded

    def _is_item(self, index: int) -> bool:
        """Return whether an image is an output item; ``best_of`` generates more images than are returned."""
        return index < len(self._ids)

    def _generating(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._opened() + self._call(index, "generating")

    def _call(self, index: int, kind: str, **fields: Any) -> bytes:
        return self._events.write(f"image_generation_call.{kind}", **self._at(index), **fields)

    def _at(self, index: int) -> Json:
        return {"item_id": self._ids[index], "output_index": index}
