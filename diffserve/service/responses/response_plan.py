"""Conversion of a response body to a request for the language model or for images.

A body with the tool ``image_generation`` generates an image unless ``tool_choice`` is "none": the language model never
chooses tools. The prompt comes from ``turns``. ``action`` says whether the latest image of the conversation is the
start image: if there is one (auto), never (generate) or always (edit). Instructions do not affect images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.json_schemas import max_tokens_of
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import LanguageModelInfo, TextFinished, TextRequest
from diffserve.service.endpoint import RequestPlan
from diffserve.service.http.bodies import WorkBody, parse, show
from diffserve.service.images.plan import ImagePlan
from diffserve.service.images.schemas import EditBody, GenerateBody, ImageReference
from diffserve.service.responses.response_objects import Json, logprob_of, message_of, response_of, text_part, usage_of
from diffserve.service.responses.schemas import PAINTS, ResponseBody, TextFormat, Tool, ToolChoice
from diffserve.service.responses.turns import Turn, messages_of, pictures_of
from diffserve.service.texts.completion_plan import schema_text
from diffserve.service.texts.completions import timings_of
from diffserve.service.texts.schemas import DEFAULT_CHAT_TOKENS
from diffserve.settings.config import ServeConfig

LOGPROBS: Final = "message.output_text.logprobs"
OUR_OWN: Final = frozenset({"type", "action", "input_image_mask", "model", "input_fidelity"})
FROM_ELSEWHERE: Final = (
    *("prompt", "infotext", "image", "images", "mask", "stream", "response_format", "user", "safety_identifier"),
)
"""Image fields that the response itself sets, or that have no meaning in a response."""


class ResponsePlan(RequestPlan, frozen=True, kw_only=True):
    """A resolved response: a request of the language model, or the plan of images.

    Attributes:
        head: The fields of the response object that do not depend on its outcome.
        owner: Id of the key of its client.
        turns: The conversation with the input.
        input_span: The turns of the input.
        is_stored: Whether the response can be retrieved later.
        text: The request of the language model, unless images are generated.
        images: The plan of the images, unless the language model answers.
        end_ids: Tokens that end a text and are not part of it.
    """

    head: Json
    owner: str
    turns: tuple[Turn, ...]
    input_span: slice
    is_stored: bool
    text: TextRequest | None = None
    images: ImagePlan | None = None
    end_ids: frozenset[int] = frozenset()

    @property
    def num_images(self) -> int:
        """Number of images that the request makes, for the quota of its key."""
        return 0 if self.images is None else self.images.num_images

    def item_id(self, kind: str, index: int = 0) -> str:
        """Return the id of an output item: kind "msg" for a message, "ig" for an image."""
        return f"{kind}_{self.head['id'].removeprefix('resp_')}{index:02x}"

    def translate(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error of the engine with the parameter name of the response."""
        if self.images is not None:
            return in_tool(error)
        param = "input" if error.param in ("messages", "prompt") else error.param
        return InvalidRequest(error.message, param=param, code=error.code)


def check_background(body: ResponseBody) -> None:
    """Refuse a background response that is not stored, because it could not be retrieved. Raises InvalidRequest."""
    message = "store is false, but a background response must be stored; leave store out."
    check(not body.background or body.store is not False, message, "store")


def tool_of(body: ResponseBody) -> Tool | None:
    """Return the image tool, or None if the language model answers. Raises InvalidRequest for unsupported tools."""
    tools = body.tools or []
    for place, tool in enumerate(tools):
        message = f"tools[{place}].type is {show(tool.type)}; this server only supports {PAINTS}."
        check(tool.type == PAINTS, message, f"tools[{place}].type", "unsupported_value")
        if place:
            raise InvalidRequest(f"tools has {PAINTS} {len(tools)} times; give it once.", param="tools")
    choice = _choice_of(body.tool_choice)
    if choice == "none" or (choice == "auto" and not tools):
        return None
    message = f"tool_choice requires a tool, but tools is empty; add {{'type': '{PAINTS}'}} to tools."
    check(bool(tools), message, "tool_choice")
    return tools[0]


def plan_text(
    body: ResponseBody,
    turns: Sequence[Turn],
    input_turns: Sequence[Turn],
    info: LanguageModelInfo,
    config: ServeConfig,
    request_id: str,
) -> TextRequest:
    """Return the request for the language model.

    Args:
        body: The body of the response.
        turns: The conversation, including the input.
        input_turns: The turns of the input.
        info: The language model.
        config: Settings of the server.
        request_id: Id of the new request.

    Raises:
        InvalidRequest: The input has an image or no text, or the schema cannot be enforced.
    """
    message = (
        "the input has an image, and the language model reads text only; to edit the image add "
        f"{{'type': '{PAINTS}'}} to tools."
    )
    check(not any(turn.pictures and turn.role == "user" for turn in input_turns), message, "input", "unsupported_value")
    messages = messages_of(turns, body.instructions)
    check(any(turn.text for turn in input_turns), "the input has no text; write a message.", "input", "empty_input")
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    sampling = {name: getattr(body, name) for name in ("temperature", "top_p") if getattr(body, name) is not None}
    form = (body.text and body.text.format) or TextFormat()
    json_schema = form.json_schema if form.type == "json_schema" else None
    schema = schema_text(form.type, json_schema, info, "text.format", "text.format.schema")
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


def plan_image(
    body: WorkBody, tool: Tool, turns: Sequence[Turn], prompt: str, model: str | None, *, is_stream: bool
) -> GenerateBody:
    """Return the body of ``/v1/images/generations``, or of ``edits`` if there is a start image.

    Args:
        body: The body of the response.
        tool: Parameters of the image.
        turns: The conversation.
        prompt: The prompt, from ``turns.prompt_of``.
        model: Name of the image model.
        is_stream: Whether the answer is a stream.

    Raises:
        InvalidRequest: A field cannot be used; the error names fields of the response.
    """
    check(bool(prompt), "the input has no user text; describe the image.", "input")
    extra = tool.model_extra or {}
    for name in FROM_ELSEWHERE:
        message = f"tools[0].{name} is not supported in a response; leave it out."
        check(name not in extra, message, f"tools[0].{name}", "unsupported_parameter")
    pictures = () if tool.action == "generate" else pictures_of(turns)
    message = "tools[0].action is edit, but the conversation has no image; send one as input_image."
    check(tool.action != "edit" or bool(pictures), message, "input")
    fields = tool.model_dump(exclude=set(OUR_OWN))
    fields |= {"prompt": prompt, "model": model, "stream": is_stream, "response_format": "b64_json"}
    fields["progress"] = extra.get("progress", False)
    fields |= {name: value for name in WorkBody.model_fields if (value := getattr(body, name)) is not None}
    if not pictures:
        message = "tools[0].input_image_mask needs an image to edit; send one as input_image."
        check(tool.input_image_mask is None, message, "tools[0].input_image_mask")
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


def finished(plan: ResponsePlan, event: TextFinished) -> Json:
    """Return the response object of a finished text."""
    assert plan.text is not None
    [result] = event.results
    is_whole = result.finish_reason == "stop"
    status = "completed" if is_whole else "incomplete"
    tokens = [token for token in result.tokens if token.token_id not in plan.end_ids]
    has_logprobs = plan.text.params.logprobs is not None
    part = text_part(result.text, [logprob_of(token) for token in tokens] if has_logprobs else None)
    return response_of(
        plan.head,
        status,
        [message_of(plan.item_id("msg"), status, [part])],
        incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
        usage=usage_of(event.usage),
        timings=timings_of([event]),
        warnings=list(plan.warnings),
    )
