"""Follow-ups in a conversation about images: "now at night" changes the earlier prompt instead of replacing it.

Rules decide, without a language model: a text that describes an image by itself replaces the earlier prompt, any other
text is added to it. For the embedded model the result is a caption of its image world, if there is one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from diffserve.service.responses.turns import Turn

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
