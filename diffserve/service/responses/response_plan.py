"""Conversion of a response body to a request for the language model or for images.

A body with the tool ``image_generation`` generates an image unless ``tool_choice`` is "none": the language model never
chooses tools. The prompt comes from ``follow_ups``. ``action`` says whether the latest image of the conversation is the
start image: if there is one (auto), never (generate) or always (edit). Instructions do not affect images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.json_schemas import ANY_OBJECT, max_tokens_of, no_json
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import LanguageModelInfo, TextRequest
from diffserve.service.http.bodies import WorkBody, parse, show
from diffserve.service.images.edit_schemas import EditBody, ImageReference
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.responses.schemas import PAINTS, ResponseBody, Tool, ToolChoice
from diffserve.service.responses.turns import Turn, messages_of, pictures_of
from diffserve.service.texts.schemas import DEFAULT_CHAT_TOKENS
from diffserve.service.texts.texts import schema_text
from diffserve.settings.config import ServeConfig

LOGPROBS: Final = "message.output_text.logprobs"
OUR_OWN: Final = frozenset({"type", "action", "input_image_mask", "model", "input_fidelity"})
FROM_ELSEWHERE: Final = (
    *("prompt", "infotext", "image", "images", "mask", "stream", "response_format", "user", "safety_identifier"),
)
"""Image fields that the response itself sets, or that have no meaning in a response."""


def check_background(body: ResponseBody) -> None:
    """Refuse a background response that is not stored, because it could not be retrieved. Raises InvalidRequest."""
    if body.background and body.store is False:
        raise InvalidRequest("store is false, and a response in the background is asked for later.", param="store")


def tool_of(body: ResponseBody) -> Tool | None:
    """Return the image tool, or None if the language model answers. Raises InvalidRequest for unsupported tools."""
    tools = body.tools or []
    for place, tool in enumerate(tools):
        if tool.type != PAINTS:
            raise InvalidRequest(
                f"tools[{place}].type is {show(tool.type)}; the tool of this server is {PAINTS}, it calls no others.",
                param=f"tools[{place}].type",
                code="unsupported_value",
            )
        if place:
            raise InvalidRequest(f"tools has {PAINTS} {len(tools)} times; give it once.", param="tools")
    choice = _choice_of(body.tool_choice)
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if not tools:
        raise InvalidRequest(
            f"tool_choice asks for a tool and tools has none; give {{'type': '{PAINTS}'}} there.", param="tool_choice"
        )
    return tools[0]


def plan_text(
    body: ResponseBody,
    turns: Sequence[Turn],
    own: Sequence[Turn],
    info: LanguageModelInfo,
    config: ServeConfig,
    request_id: str,
) -> TextRequest:
    """Return the request for the language model.

    Args:
        body: The body of the response.
        turns: The conversation, including the input.
        own: The turns of the input.
        info: The language model.
        config: Settings of the server.
        request_id: Id of the new request.

    Raises:
        InvalidRequest: The input has an image or no text, or the schema cannot be enforced.
    """
    if any(turn.pictures and turn.role == "user" for turn in own):
        raise InvalidRequest(
            "the input has a picture, and the language model reads none; to paint from it add "
            f"{{'type': '{PAINTS}'}} to tools.",
            param="input",
            code="unsupported_value",
        )
    messages = messages_of(turns, body.instructions)
    if not any(turn.text for turn in own):
        raise InvalidRequest("the input has no words; say something.", param="input", code="empty_input")
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    sampling = {name: getattr(body, name) for name in ("temperature", "top_p") if getattr(body, name) is not None}
    schema = _schema_of(body, info)
    params = SamplingParams(
        **sampling,
        max_tokens=max_tokens_of(schema, body.max_output_tokens or DEFAULT_CHAT_TOKENS),
        seed=None if body.seed in (None, -1) else body.seed,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        json_schema=schema,
    )
    return TextRequest(
        messages=messages,
        params=params,
        deltas=bool(body.stream),
        **body.urgency(config.request_timeout_s),
        request_id=request_id,
    )


def _schema_of(body: ResponseBody, info: LanguageModelInfo) -> str | None:
    """Return the JSON Schema that the text must follow, or None. Raises InvalidRequest if it cannot be enforced."""
    text_format = None if body.text is None else body.text.format
    if text_format is None or text_format.type == "text":
        return None
    if not info.speaks_json:
        raise no_json(info.model_id, "text.format")
    return (
        ANY_OBJECT if text_format.type == "json_object" else schema_text(text_format.json_schema, "text.format.schema")
    )


def plan_image(
    body: WorkBody, tool: Tool, turns: Sequence[Turn], prompt: str, model: str | None, *, is_stream: bool
) -> GenerateBody:
    """Return the body of ``/v1/images/generations``, or of ``edits`` if there is a start image.

    Args:
        body: The body of the response.
        tool: Parameters of the image.
        turns: The conversation.
        prompt: The prompt, from ``follow_ups.prompt_of``.
        model: Name of the image model.
        is_stream: Whether the answer is a stream.

    Raises:
        InvalidRequest: A field cannot be used; the error names fields of the response.
    """
    if not prompt:
        raise InvalidRequest("the input has no words of the user's; say what to paint.", param="input")
    extra = tool.model_extra or {}
    for name in FROM_ELSEWHERE:
        if name in extra:
            message = f"tools[0].{name} is not taken within a response; leave it out."
            raise InvalidRequest(message, param=f"tools[0].{name}", code="unsupported_parameter")
    pictures = () if tool.action == "generate" else pictures_of(turns)
    if tool.action == "edit" and not pictures:
        raise InvalidRequest(
            "tools[0].action is edit and the conversation has no picture; send one as input_image.", param="input"
        )
    fields = tool.model_dump(exclude=set(OUR_OWN))
    fields |= {"prompt": prompt, "model": model, "stream": is_stream, "response_format": "b64_json"}
    fields["progress"] = extra.get("progress", False)
    fields |= {name: value for name in WorkBody.model_fields if (value := getattr(body, name)) is not None}
    if not pictures:
        if tool.input_image_mask is not None:
            message = "tools[0].input_image_mask needs a picture that it is of; send one as input_image."
            raise InvalidRequest(message, param="tools[0].input_image_mask")
        return _parse_body(GenerateBody, fields)
    edit = _parse_body(EditBody, fields | {"input_fidelity": tool.input_fidelity})
    mask = tool.input_image_mask and tool.input_image_mask.image_url
    start_images = {
        "images": [ImageReference.model_construct(image_url=url) for url in pictures],
        "mask": ImageReference.model_construct(image_url=mask) if mask else None,
    }
    return edit.model_copy(update=start_images)


def _parse_body(kind: type[GenerateBody], fields: dict[str, Any]) -> GenerateBody:
    """Validate ``fields`` as a body of ``kind``; errors name fields of the response."""
    try:
        return parse(kind, msgspec.json.encode({name: value for name, value in fields.items() if value is not None}))
    except InvalidRequest as error:
        raise in_tool(error) from None


def in_tool(error: InvalidRequest) -> InvalidRequest:
    """Return ``error`` about a body of ``plan_image`` with the field names of the response."""
    if error.param in (None, "prompt"):
        return InvalidRequest(error.message, param="input", code=error.code)
    if error.param in ("image", "mask"):
        param = "input" if error.param == "image" else "tools[0].input_image_mask"
        return InvalidRequest(error.message, param=param, code=error.code)
    message = f"tools[0].{error.message}" if error.message.startswith(error.param) else error.message
    return InvalidRequest(message, param=f"tools[0].{error.param}", code=error.code)


def _choice_of(choice: str | ToolChoice | None) -> str:
    """Return the choice as "none", "auto" or "paint". Raises InvalidRequest for an unsupported choice."""
    match choice:
        case None | "auto":
            return "auto"
        case "none":
            return "none"
        case "required" | ToolChoice(type="image_generation"):
            return "paint"
        case ToolChoice(type="allowed_tools", tools=allowed, mode=mode):
            if not any(tool.get("type") == PAINTS for tool in allowed or ()):
                return "none"
            return "paint" if mode == "required" else "auto"
    kind = choice.type if isinstance(choice, ToolChoice) else choice
    raise InvalidRequest(
        f"tool_choice is {show(kind)}; give auto, required, none, or {{'type': '{PAINTS}'}}.",
        param="tool_choice",
        code="unsupported_value",
    )
