"""Requests that repeat a picture: ``infotext`` fills the fields that a body leaves out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.media.infotext_recipe import parse_sent, request_of
from diffserve.service.http.bodies import check_shape, parse, show
from diffserve.service.images.edit_schemas import StartBody
from diffserve.service.images.schemas import GenerateBody

OTHER_NAMES: Final = {
    "steps": ("num_inference_steps",),
    "cfg_scale": ("guidance_scale",),
    "sampler": ("sampler", "sigma_schedule"),
    "sampler_name": ("sampler", "sigma_schedule"),
    "scheduler": ("sampler", "sigma_schedule"),
    "width": ("size",),
    "height": ("size",),
}
"""Fields of a body that stand for recorded ones."""


def read_repeated(
    kind: type[GenerateBody], data: bytes, models: Collection[str], refused: Callable[[str | None], Collection[str]]
) -> GenerateBody:
    """Read a body, whose ``infotext`` fills what it leaves out.

    Args:
        kind: The class of the body.
        data: The body as JSON.
        models: Names of the models that are served.
        refused: Returns the fields that a model does not take.

    Raises:
        InvalidRequest: Something in the body or in its infotext cannot be used.
    """
    check_shape(data)
    try:
        sent: Any = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return parse(kind, data)  # which says what is wrong
    text = sent.get("infotext") if isinstance(sent, dict) else None
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"infotext is {show(text)}; it must be text.", param="infotext")
    if not text:
        return parse(kind, data)
    del sent["infotext"]
    read = parse_sent(text)
    name = sent.get("model") or read.fields.get("Model")
    refusals = refused(name if isinstance(name, str) and name in models else None)
    recorded = request_of(read, has_start=issubclass(kind, StartBody), refused=refusals, models=models)
    replaced = {other for field in sent for other in OTHER_NAMES.get(field, (field,)) if sent[field] is not None}
    fields = {field: value for field, value in recorded.fields.items() if field not in replaced}
    sent = {field: value for field, value in sent.items() if value is not None}
    body = parse(kind, msgspec.json.encode({"prompt_rewriter": "off", **fields, **sent}))
    body.take_warnings(recorded.warnings)
    return body


def refuse_infotext(body: GenerateBody) -> None:
    """Refuse an infotext that nothing has read, as in a form.

    Raises:
        InvalidRequest: There is one.
    """
    if body.infotext:
        message = "infotext is taken in a JSON body of /v1/images/generations, edits and variations; give the fields."
        raise InvalidRequest(message, param="infotext", code="unsupported_parameter")
