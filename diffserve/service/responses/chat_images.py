"""Image generation in ``/v1/chat/completions``, in the format of OpenRouter.

It is selected by "image" in ``modalities`` or by ``:image`` after the model name. The prompt and the start image are
chosen as in responses. The message of the answer has ``images`` as data URLs; the body may also have the fields of
``/v1/images/generations``.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.text_types import MAX_MESSAGES
from diffserve.media.images import MEDIA_TYPES
from diffserve.service.admission import Ticket
from diffserve.service.http.bodies import WorkBody, parse, show
from diffserve.service.http.middleware import TEXT_BODY_BYTES, too_long
from diffserve.service.http.streams import DONE, Events, event
from diffserve.service.images.image_endpoint import ImageEndpoint
from diffserve.service.images.openai_encoder import Collector, usage
from diffserve.service.images.plan import ImagePlan
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.images.service import ImageService
from diffserve.service.lifecycle import in_thread_if_long, json_response, read_json
from diffserve.service.models import find_model, is_alias
from diffserve.service.responses.response_plan import plan_image
from diffserve.service.responses.schemas import PAINTS, Tool
from diffserve.service.responses.turns import Turn, prompt_of
from diffserve.service.texts.schemas import REFUSED, ChatBody
from diffserve.service.threads import ANSWERS

SUFFIX: Final = ":image"
WHO_ASKS: Final = {"user", "safety_identifier"}
OF_CHATS: Final = WHO_ASKS | REFUSED.keys() | ChatBody.model_fields.keys() - GenerateBody.model_fields.keys()
"""Chat fields that have no effect on images."""

_ASPECT: Final = re.compile(r"([1-9][0-9]?):([1-9][0-9]?)")


class _RequestedOutput(msgspec.Struct):
    model: Any = None
    modalities: Any = None


class Url(BaseModel):
    """URL of an image: a data URL, or an https URL of a configured host."""

    model_config = ConfigDict(strict=True)
    url: str


class PicturePart(BaseModel):
    """Part of a message: text or a start image."""

    model_config = ConfigDict(strict=True)
    type: Literal["text", "image_url"]
    text: str = ""
    image_url: Url | None = None


Parts = Annotated[list[PicturePart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class PictureMessage(BaseModel):
    """Message of the conversation; ``images`` are those of an earlier answer."""

    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts | None = None
    images: Parts | None = None
    revised_prompt: str | None = None


class PictureChatBody(WorkBody):
    """Chat body that requests an image."""

    hints: ClassVar[dict[str, str]] = {"messages": "give at least one message with role and content"}
    refused: ClassVar[Mapping[str, str]] = {name: REFUSED[name] for name in ("tools", "functions")}

    messages: Annotated[list[PictureMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    model: Annotated[str, Field(max_length=256)] | None = None
    modalities: Annotated[list[Literal["text", "image"]], Field(max_length=2)] | None = None
    stream: bool | None = None
    image_config: dict[str, Any] | None = None


def wants_image(data: bytes) -> bool:
    """Return whether the chat body ``data`` requests an image; the body may be invalid."""
    if b"image" not in data:
        return False
    try:
        request = msgspec.json.decode(data, type=_RequestedOutput)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False
    has_modality = isinstance(request.modalities, list) and "image" in request.modalities
    return has_modality or (isinstance(request.model, str) and request.model.endswith(SUFFIX))


class ChatImages(ImageEndpoint):
    """Endpoint of chat bodies that request images."""

    ending = DONE

    def __init__(self, service: ImageService) -> None:
        super().__init__(service, GenerateBody)

    async def _read(self, request: Request) -> GenerateBody:
        data = await read_json(request)
        body = await in_thread_if_long(data, parse, PictureChatBody, data)
        _check_format((body.model_extra or {}).get("response_format"))
        turns = [_turn(message, place) for place, message in enumerate(body.messages)]
        if len(data) - sum(len(picture) for turn in turns for picture in turn.pictures) > TEXT_BODY_BYTES:
            raise too_long(TEXT_BODY_BYTES)
        try:
            painter = self._painter_name(body)
            prompt = await ANSWERS.run(prompt_of, turns, is_world=self._service.is_world_model(painter))
            return plan_image(body, self._tool(body), turns, prompt, painter, is_stream=bool(body.stream))
        except InvalidRequest as error:
            param = "messages" if error.param == "input" else (error.param or "").removeprefix("tools[0].")
            reason = error.message.replace("tools[0].", "").replace("the input ", "the conversation ")
            raise InvalidRequest(reason, param=param or None, code=error.code) from None

    def _painter_name(self, body: PictureChatBody) -> str | None:
        """Return the image model of the request; None, the default, if it names none or a language model."""
        name, language = (body.model or "").removesuffix(SUFFIX), self._engine.text_info
        speaks = is_alias(name, "text") or (language is not None and name == language.model_id)
        is_own = any(model.name == name for model in self._engine.models)
        return None if not name or (speaks and not is_own) else name

    def _tool(self, body: PictureChatBody) -> Tool:
        """Return the image parameters of the body. Raises InvalidRequest."""
        fields = {name: value for name, value in (body.model_extra or {}).items() if name not in OF_CHATS}
        size = self._size(body)
        try:
            return Tool.model_validate({**({} if size is None else {"size": size}), **fields, "type": PAINTS})
        except ValidationError as error:
            name = str(error.errors(include_url=False)[0]["loc"][0])
            message = f"{name} is {show(fields.get(name))}, which is not allowed; see /v1/images/generations."
            raise InvalidRequest(message, param=name, code="invalid_value") from None

    def _size(self, body: PictureChatBody) -> str | None:
        """Return the size for ``image_config.aspect_ratio`` with about as many pixels as the native size, or None."""
        aspect = (body.image_config or {}).get("aspect_ratio")
        if aspect is None:
            return None
        match = _ASPECT.fullmatch(aspect) if isinstance(aspect, str) else None
        if match is None:
            message = f"image_config.aspect_ratio is {show(aspect)}; write two whole numbers, such as 16:9."
            raise InvalidRequest(message, param="image_config.aspect_ratio", code="invalid_value")
        info = find_model(self._painter_name(body), self._engine.models, self._engine.text_info)
        across, multiple = math.sqrt(int(match[1]) / int(match[2])), info.size_multiple_px
        side = max(math.sqrt(math.prod(info.good_sizes[0])), self._config.min_size_px * max(across, 1 / across))
        return "x".join(str(round(side * part / multiple) * multiple) for part in (across, 1 / across))

    async def _answer(self, plan: ImagePlan, ticket: Ticket) -> Response:
        generated = await self._service.run(plan, ticket)
        choices = [
            {"index": index, "message": message, "logprobs": None, "finish_reason": "stop"}
            for index, message in enumerate(_messages(plan, generated))
        ]
        answer = _head(plan, generated, "chat.completion") | {"choices": choices, "usage": _usage(plan, generated)}
        return json_response(msgspec.json.encode(answer | {"warnings": generated.warnings}), generated.warnings)

    async def _events(self, plan: ImagePlan, ticket: Ticket) -> Events:
        generated = await self._service.run(plan, ticket)
        head, messages = _head(plan, generated, "chat.completion.chunk"), _messages(plan, generated)
        for index, message in enumerate(messages):
            new = {name: value for name, value in message.items() if name != "annotations"}
            for delta, reason in ((new, None), ({}, "stop")):
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
                is_last = reason is not None and index == len(messages) - 1
                yield event(head | {"choices": [choice], "usage": _usage(plan, generated) if is_last else None})


def _check_format(response_format: object) -> None:
    kind = response_format.get("type", "text") if isinstance(response_format, dict) else "text"
    message = (
        f"response_format.type is {show(kind)}, but images are requested, which have no text format; leave "
        "response_format out."
    )
    check(kind == "text", message, "response_format", "unsupported_parameter")


def _turn(message: PictureMessage, place: int) -> Turn:
    content = message.content
    parts = [*(message.images or ())] + (content if isinstance(content, list) else [])
    for part in parts:
        if part.type == "image_url" and part.image_url is None:
            name = f"messages[{place}].content"
            raise InvalidRequest(
                f"{name} has an image without image_url.", param=name, code="missing_required_parameter"
            )
    words = content if isinstance(content, str) else "\n".join(part.text for part in parts if part.type == "text")
    pictures = tuple(part.image_url.url for part in parts if part.image_url is not None)
    return Turn(message.role, words, pictures, prompt=message.revised_prompt or "")


def _messages(plan: ImagePlan, generated: Collector) -> Sequence[dict[str, Any]]:
    head = f"data:{MEDIA_TYPES[plan.image_format]};base64,"
    return [
        {
            "role": "assistant",
            "content": "",
            "refusal": None,
            "annotations": [],
            "images": [{"type": "image_url", "image_url": {"url": head + entry["b64_json"]}, "index": 0}],
            **{name: entry[name] for name in ("seed", "variation_seed") if name in entry},
            "revised_prompt": result.prompt,
        }
        for result, entry in zip(generated.results, generated.entries, strict=True)
    ]


def _head(plan: ImagePlan, generated: Collector, kind: str) -> dict[str, Any]:
    suffix = plan.request.request_id.rpartition("-")[2]
    model = generated.results[0].model
    return {"id": f"chatcmpl-{suffix}", "object": kind, "created": int(time.time()), "model": model}


def _usage(plan: ImagePlan, generated: Collector) -> dict[str, Any]:
    """Return the usage with the field names of chat completions."""
    used = usage(plan, generated.results)
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
    return {names.get(name, name): value for name, value in used.items() if name != "input_tokens_details"}
