"""A conversation as the model was taught to read it: its own chat template, which came with its tokenizer.

transformers runs the template in a sandbox. What a template cannot say is refused in its own words, but for two things
that are said differently by different models: "developer" is the newer name of "system", and a template that knows no
system text gets it at the head of the first turn of the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from diffserve.api.errors import InvalidRequest
from diffserve.api.text_types import ChatMessage

MOST_REASON_CHARS: Final = 200

Turns = list[dict[str, str]]


def render(tokenizer: Any, messages: Sequence[ChatMessage], model_id: str) -> str:
    """``messages`` as text that ends where the model's answer begins; special tokens are spelled out in it.

    Raises InvalidRequest where the model has no chat template, and where its template takes no such conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest(
            f"the model {model_id!r} has no chat template; send a prompt in place of messages, or load one that chats.",
            param="messages",
        )
    turns = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in messages
    ]
    refused: Exception | None = None
    for said in filter(None, (turns, fold_system(turns))):
        try:
            text: str = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            return text
        except Exception as error:  # a template raises what it likes
            refused = error
    reason = (str(refused).splitlines() or [type(refused).__name__])[0][:MOST_REASON_CHARS]
    raise InvalidRequest(
        f"the model's chat template does not take these messages: {reason.rstrip('.')}.", param="messages"
    ) from refused


def fold_system(turns: Turns) -> Turns | None:
    """``turns`` with the system texts at the head of the first turn of the user; None where one of the two is missing.

    >>> fold_system([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}])
    [{'role': 'user', 'content': 'be brief\\n\\nhello'}]
    """
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    others = [turn for turn in turns if turn["role"] != "system"]
    first = next((index for index, turn in enumerate(others) if turn["role"] == "user"), None)
    if not system or first is None:
        return None
    head = {"role": "user", "content": "\n\n".join([*system, others[first]["content"]])}
    return [*others[:first], head, *others[first + 1 :]]
