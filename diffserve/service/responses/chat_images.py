"""Pictures in a conversation of ``/v1/chat/completions``, as OpenRouter has them and LobeChat asks for them: a body
with "image" in ``modalities``, or a model's name with ``:image`` behind it, is answered by who paints.

What is generated, and from what, is decided as in responses: the last words of the user, merged with the earlier prompt
where they change it, from the latest picture. The
answer's message has ``images``, each as a data URL. Beside OpenAI's fields of a conversation the body takes those of
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

from diffserve.api.errors import InvalidRequest
from diffserve.api.text_types import MAX_MESSAGES
from diffserve.media.images import MEDIA_TYPES
from diffserve.service.admission import Backlog, Ticket
from diffserve.service.endpoint import AdmissionSlot, Endpoint
from diffserve.service.http.bodies import WorkBody, parse, show
from diffserve.service.http.middleware import TEXT_BODY_BYTES, too_long
from diffserve.service.http.streams import DONE, Events, event
from diffserve.service.images.openai_encoder import usage
from diffserve.service.images.plan import ImagePlan
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.images.service import GeneratedImages, ImageService
from diffserve.service.lifecycle import in_thread_if_long, json_response, read_json
from diffserve.service.models import find_model, is_alias
from diffserve.service.responses.follow_ups import prompt_of
from diffserve.service.responses.response_plan import plan_image
from diffserve.service.responses.schemas import PAINTS, Tool
from diffserve.service.responses.turns import Turn
from diffserve.service.texts.schemas import REFUSED, ChatBody
from diffserve.service.threads import ANSWERS

SUFFIX: Final = ":image"
WHO_ASKS: Final = {"user", "safety_identifier"}
OF_CHATS: Final = WHO_ASKS | REFUSED.keys() | ChatBody.model_fields.keys() - GenerateBody.model_fields.keys()
"""Fields of a conversation that mean nothing to who paints."""

_ASPECT: Final = re.compile(r"([1-9][0-9]?):([1-9][0-9]?)")


class _Asked(msgspec.Struct):
    model: Any = None
    modalities: Any = None


class Url(BaseModel):
    """Of a picture: a data URL, or an address where those are fetched."""

    model_config = ConfigDict(strict=True)
    url: str


class PicturePart(BaseModel):
    """Words, or a picture to begin from."""

    model_config = ConfigDict(strict=True)
    type: Literal["text", "image_url"]
    text: str = ""
    image_url: Url | None = None


Parts = Annotated[list[PicturePart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class PictureMessage(BaseModel):
    """One turn; ``images``: those that an answer had, sent back."""

    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts | None = None
    images: Parts | None = None
    revised_prompt: str | None = None


class PictureChatBody(WorkBody):
    """A conversation that wants a picture."""

    hints: ClassVar[dict[str, str]] = {"messages": "give at least one message with role and content"}
    refused: ClassVar[Mapping[str, str]] = {name: REFUSED[name] for name in ("tools", "functions")}

    messages: Annotated[list[PictureMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    model: Annotated[str, Field(max_length=256)] | None = None
    modalities: Annotated[list[Literal["text", "image"]], Field(max_length=2)] | None = None
    stream: bool | None = None
    image_config: dict[str, Any] | None = None


def wants_image(data: bytes) -> bool:
    """Whether the body ``data`` of a conversation, which need not be valid, asks for one."""
    if b"image" not in data:
        return False
    try:
        asked = msgspec.json.decode(data, type=_Asked)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False
    has_modality = isinstance(asked.modalities, list) and "image" in asked.modalities
    return has_modality or (isinstance(asked.model, str) and asked.model.endswith(SUFFIX))


class ChatImages(Endpoint[GenerateBody, ImagePlan]):
    """Paints what conversations ask for."""

    body = GenerateBody
    ending = DONE

    def __init__(self, service: ImageService) -> None:
        super().__init__(service.engine, service.config, service.gate, service.admission, in_flight=service.in_flight)
        self._service = service

    @property
    def _backlog(self) -> Backlog:
        return self._admission.images

    async def _plan(self, body: GenerateBody, request: Request, client: str) -> tuple[ImagePlan, AdmissionSlot]:
        plan = await self._service.plan(body, request, client)
        return plan, self._service.admit(plan)

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
            said = error.message.replace("tools[0].", "").replace("the input ", "the conversation ")
            raise InvalidRequest(said, param=param or None, code=error.code) from None

    def _painter_name(self, body: PictureChatBody) -> str | None:
        """The model that paints; names of language models mean whichever does."""
        name, language = (body.model or "").removesuffix(SUFFIX), self._engine.text_info
        speaks = is_alias(name, "text") or (language is not None and name == language.model_id)
        is_own = any(model.name == name for model in self._engine.models)
        return None if not name or (speaks and not is_own) else name

    def _tool(self, body: PictureChatBody) -> Tool:
        """How it is to be generated."""
        fields = {name: value for name, value in (body.model_extra or {}).items() if name not in OF_CHATS}
        size = self._size(body)
        try:
            return Tool.model_validate({**({} if size is None else {"size": size}), **fields, "type": PAINTS})
        except ValidationError as error:
            name = str(error.errors(include_url=False)[0]["loc"][0])
            said = f"{name} is {show(fields.get(name))}; that is not taken, see /v1/images/generations."
            raise InvalidRequest(said, param=name, code="invalid_value") from None

    def _size(self, body: PictureChatBody) -> str | None:
        """``image_config.aspect_ratio``, with as many pixels as the model's own size has."""
        aspect = (body.image_config or {}).get("aspect_ratio")
        if aspect is None:
            return None
        match = _ASPECT.fullmatch(aspect) if isinstance(aspect, str) else None
        if match is None:
            said = f"image_config.aspect_ratio is {show(aspect)}; write two whole numbers, such as 16:9."
            raise InvalidRequest(said, param="image_config.aspect_ratio", code="invalid_value")
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
        told = _head(plan, generated, "chat.completion") | {"choices": choices, "usage": _usage(plan, generated)}
        return json_response(msgspec.json.encode(told | {"warnings": generated.warnings}), generated.warnings)

    async def _events(self, plan: ImagePlan, ticket: Ticket) -> Events:
        generated = await self._service.run(plan, ticket)
        head, messages = _head(plan, generated, "chat.completion.chunk"), _messages(plan, generated)
        for index, message in enumerate(messages):
            new = {name: value for name, value in message.items() if name != "annotations"}
            for delta, reason in ((new, None), ({}, "stop")):
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
                is_last = reason is not None and index == len(messages) - 1
                yield event(head | {"choices": [choice], "usage": _usage(plan, generated) if is_last else None})


def _check_format(wanted: object) -> None:
    kind = wanted.get("type", "text") if isinstance(wanted, dict) else "text"
    if kind != "text":
        said = f"response_format.type is {show(kind)}, and a picture is asked for, which follows none; leave one out."
        raise InvalidRequest(said, param="response_format", code="unsupported_parameter")


def _turn(message: PictureMessage, place: int) -> Turn:
    content = message.content
    parts = [*(message.images or ())] + (content if isinstance(content, list) else [])
    for part in parts:
        if part.type == "image_url" and part.image_url is None:
            name = f"messages[{place}].content"
            raise InvalidRequest(
                f"{name} has a picture without image_url.", param=name, code="missing_required_parameter"
            )
    words = content if isinstance(content, str) else "\n".join(part.text for part in parts if part.type == "text")
    pictures = tuple(part.image_url.url for part in parts if part.image_url is not None)
    return Turn(message.role, words, pictures, prompt=message.revised_prompt or "")


def _messages(plan: ImagePlan, generated: GeneratedImages) -> Sequence[dict[str, Any]]:
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


def _head(plan: ImagePlan, generated: GeneratedImages, kind: str) -> dict[str, Any]:
    suffix = plan.request.request_id.rpartition("-")[2]
    model = generated.results[0].model
    return {"id": f"chatcmpl-{suffix}", "object": kind, "created": int(time.time()), "model": model}


def _usage(plan: ImagePlan, generated: GeneratedImages) -> dict[str, Any]:
    """Tokens in the words of conversations."""
    used = usage(plan, generated.results)
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
    return {names.get(name, name): value for name, value in used.items() if name != "input_tokens_details"}
