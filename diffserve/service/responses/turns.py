"""Turns of a conversation: reading them, their form for models and clients, and the prompt that they ask for.

A follow-up such as "now at night" changes the earlier prompt. Rules decide, without a language model: a text that
describes an image by itself replaces the earlier prompt, any other text is added to it. For the embedded model the
result is a caption of its image world, if there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.text_types import ChatMessage
from diffserve.service.http.bodies import show
from diffserve.service.responses.schemas import InputPart, Item

MAX_PAGE: Final = 100
TURN_BYTES: Final = 200  # size of a turn without text
Role = Literal["user", "assistant", "system", "developer"]


class Turn(NamedTuple):
    """One turn: text, images, or both.

    Attributes:
        role: Who wrote it.
        text: The text.
        pictures: Images in base64 or as data URLs.
        id: Id of its item; "" if it has none.
        prompt: The prompt of the images; "" if unknown.
    """

    role: Role
    text: str
    pictures: tuple[str, ...] = ()
    id: str = ""
    prompt: str = ""

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        return TURN_BYTES + len(self.text) + len(self.prompt) + sum(map(len, self.pictures))


Find = Callable[[str], Turn | None]
"""Returns the turn of an item of an earlier response by its id."""


def read_turns(value: str | Sequence[Item], find: Find, name: str = "input") -> tuple[Turn, ...]:
    """Read the turns of the field ``name``. Raises InvalidRequest, which names the item that cannot be read."""
    if isinstance(value, str):
        return (Turn("user", value),)
    message = "input is an empty list; give a text or messages."
    check(bool(value), message, "input", "empty_array")
    read = [_turn(item, f"{name}[{place}]", find) for place, item in enumerate(value)]
    return tuple(turn for turn in read if turn is not None)


def messages_of(turns: Sequence[Turn], instructions: str | None) -> tuple[ChatMessage, ...]:
    """Return the messages for the language model, which reads no images; turns without text are omitted."""
    system = [ChatMessage(role="system", content=instructions)] if instructions else []
    return (*system, *(ChatMessage(role=turn.role, content=turn.text) for turn in turns if turn.text))


def pictures_of(turns: Sequence[Turn]) -> tuple[str, ...]:
    """Return the images of the latest turn that has any."""
    return next((turn.pictures for turn in reversed(turns) if turn.pictures), ())


def _turn(item: Item, place: str, find: Find) -> Turn | None:
    match item.type:
        case "reasoning":  # output of another model that the client sent back
            return None
        case "image_generation_call" if item.result:
            return Turn("assistant", "", (item.result,), item.id or "", item.revised_prompt or "")
        case "image_generation_call" | "item_reference":
            return _find_turn(item.id, place, find)
    if item.role is None:
        raise _missing(f"{place}.role", "give user, assistant, system or developer")
    if item.content is None:
        raise _missing(f"{place}.content", "give a text or parts")
    if isinstance(item.content, str):
        return Turn(item.role, item.content, id=item.id or "")
    parts = [(part, f"{place}.content[{number}]") for number, part in enumerate(item.content)]
    texts = [_text(part, name) for part, name in parts if part.type != "input_image"]
    pictures = tuple(_picture(part, name) for part, name in parts if part.type == "input_image")
    return Turn(item.role, "".join(texts), pictures, item.id or "")


def _find_turn(item_id: str | None, place: str, find: Find) -> Turn:
    if item_id is None:
        raise _missing(f"{place}.id", "give the id of an item, or the item itself")
    turn = find(item_id)
    if turn is None:
        raise InvalidRequest(
            f"{place}.id is {show(item_id)}, which is not stored (any more); send the item itself.",
            param=f"{place}.id",
            code="item_not_found",
        )
    return turn


def _text(part: InputPart, name: str) -> str:
    field = "refusal" if part.type == "refusal" else "text"
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise _missing(f"{name}.{field}", "give the text")
    return text


def _picture(part: InputPart, name: str) -> str:
    if not part.image_url:
        raise _missing(f"{name}.image_url", "give a data URL (data:image/png;base64,...), or a file_id")
    return part.image_url


def _missing(name: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is missing; {hint}.", param=name, code="missing_required_parameter")


def items_of(turns: Sequence[Turn], suffix: str) -> list[dict[str, Any]]:
    """Return ``turns`` as items; the ids of turns without one end in ``suffix``."""
    return [{"id": turn.id or f"in_{suffix}{place:02x}", **_item(turn)} for place, turn in enumerate(turns)]


def page_of(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of ``items`` by the query parameters ``order``, ``limit`` and ``after``. Raises InvalidRequest."""
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    check(order in ("asc", "desc"), f"order is {show(order)}; give asc or desc.", "order")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:4]) <= MAX_PAGE:
        raise InvalidRequest(f"limit is {show(limit)}; give a whole number from 1 to {MAX_PAGE}.", param="limit")
    listed = items if order == "asc" else items[::-1]
    places = [place for place, item in enumerate(listed) if item["id"] == after]
    check(after is None or bool(places), f"after is {show(after)}; there is no such item.", "after")
    remaining = listed[places[0] + 1 :] if places else listed
    page = remaining[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(remaining) > len(page)}


def _item(turn: Turn) -> dict[str, Any]:
    if turn.role == "assistant" and turn.pictures:
        return {"type": "image_generation_call", "status": "completed", "result": turn.pictures[0]}
    kind = "output_text" if turn.role == "assistant" else "input_text"
    part: dict[str, Any] = {"type": kind, "text": turn.text}
    if turn.role == "assistant":
        part |= {"annotations": [], "logprobs": []}
    texts = [part] if turn.text or not turn.pictures else []
    pictures = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in turn.pictures]
    return {"type": "message", "role": turn.role, "status": "completed", "content": [*texts, *pictures]}


OPENING: Final = re.compile(
    r"(?:(?:now|please|then|ok(?:ay)?|but|can you|could you|the same|same|this time|again"
    r"|(?:make|paint|draw|show|put|turn|change|set) (?:it|this|that|them|the picture|the image)(?: to| into)?"
    r")\b[\s,:]*)*",
    re.IGNORECASE,
)
"""Words at the beginning of a follow-up that do not describe an image."""

WHOLE: Final = re.compile(
    r"(?:(?:draw|paint|show|create|generate|make|imagine|render)(?: me)? )?"
    r"(?:an?|the|one|two|three|four|five|six|seven|eight|nine|ten|some|several|many|my|\d+) \w",
    re.IGNORECASE,
)
REFERENCE: Final = re.compile(r"\b(?:it|its|them|their|same|instead|also|too|more|less)\b", re.IGNORECASE)


def prompt_of(turns: Sequence[Turn], *, is_world: bool = False) -> str:
    """Return the prompt of the next image; empty if the user wrote no text.

    Args:
        turns: The conversation.
        is_world: Whether the model generates the image world of the embedded model.
    """
    prompt = latest = ""
    for turn in turns:
        if turn.role == "user" and turn.text.strip():
            is_new = bool(turn.pictures) or not prompt
            prompt = latest = turn.text if is_new else merged(prompt, turn.text, is_world=is_world)
        elif turn.role == "user" and turn.pictures:
            prompt = ""  # an uploaded image has no prompt
        elif turn.role == "assistant" and turn.pictures:
            prompt = turn.prompt or prompt
        elif turn.role == "assistant" and turn.text.strip():
            prompt = ""  # the conversation was about something else
    return latest


def merge_warnings(prompt: str, turns: Sequence[Turn]) -> list[str]:
    """Return a warning if ``prompt`` is not the last text of the user."""
    words = next((turn.text for turn in reversed(turns) if turn.role == "user" and turn.text.strip()), "")
    return [] if prompt == words else [f"the follow-up was merged with the earlier prompt: {prompt}"]


def merged(prompt: str, follow_up: str, *, is_world: bool = False) -> str:
    """Return ``prompt`` as ``follow_up`` changes it."""
    change = OPENING.sub("", follow_up.strip(), count=1).strip()
    if not change.strip(" .,!?"):
        return prompt
    if WHOLE.match(change) and not REFERENCE.search(change):
        return change
    if is_world:
        from diffserve.world.prompt_reading import merge_scenes  # takes a third of a second, and few servers need it

        if (scenes := merge_scenes(prompt, change)) is not None:
            return scenes
    return f"{prompt.rstrip(' .,;!')}, {change}"
