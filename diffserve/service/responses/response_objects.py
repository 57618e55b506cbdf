"""OpenAI's JSON objects of a response: the response itself, its messages and its images."""

from __future__ import annotations

import time
from typing import Any, Final

from diffserve.api.errors import DeadlineUnreachable, DiffserveError, InvalidRequest, ModerationBlocked, QueueFull
from diffserve.api.text_types import TextUsage, TokenInfo
from diffserve.api.types import ImageResult
from diffserve.service.http.bodies import FLEX
from diffserve.service.http.errors import BLOCKED
from diffserve.service.images.openai_encoder import delivery_fields, recipe
from diffserve.service.images.openai_encoder import usage as image_usage
from diffserve.service.images.plan import ImagePlan
from diffserve.service.responses.schemas import PAINTS, ConversationId, ResponseBody, TextFormat, Tool, ToolChoice
from diffserve.service.responses.turns import Turn
from diffserve.service.texts.answers import bounded

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
    top = [_token(text, logprob) for text, _, logprob in token.top]
    return _token(token.text, token.logprob) | {"top_logprobs": top}


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


def _token(text: str, logprob: float) -> Json:
    is_complete = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": bounded(logprob), "bytes": list(text.encode()) if is_complete else []}
