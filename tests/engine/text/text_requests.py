"""Requests of the text engine, and what transformers' own ``generate`` answers them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextDelta, TextEvent, TextFinished, TextRequest
from tests.runtime.language import tiny


def greedy(prompt_ids: Sequence[int], max_tokens: int = 24, **params: Any) -> TextRequest:
    """Return a greedy request; ``params`` are sampling parameters or fields of the request."""
    request_fields = {name: params.pop(name) for name in list(params) if name in TextRequest.__struct_fields__}
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
    return TextRequest(token_ids=tuple(prompt_ids), params=settings, **request_fields)


def token_ids_of(answer: TextFinished, index: int = 0) -> list[int]:
    """Return the tokens of one text of an answer."""
    return list(answer.results[index].token_ids)


@lru_cache(maxsize=32)
def _network(kind: str) -> Any:
    return tiny.make_network(kind)


@lru_cache(maxsize=512)
def _expected(
    kind: str, prompt_ids: tuple[int, ...], max_tokens: int, settings: tuple[tuple[str, Any], ...]
) -> list[int]:
    return tiny.generate(_network(kind), prompt_ids, max_tokens, **dict(settings))


def expected(kind: str, prompt_ids: Sequence[int], max_tokens: int = 24, **settings: Any) -> list[int]:
    """Return the output of transformers' ``generate`` (cached)."""
    return _expected(kind, tuple(prompt_ids), max_tokens, tuple(sorted(settings.items())))


def of_type(events: Sequence[TextEvent], kind: type[Any]) -> list[Any]:
    """Return the events of one type."""
    return [event for event in events if isinstance(event, kind)]


def text_of(events: Sequence[TextEvent], index: int = 0) -> str:
    """Return the concatenated deltas of one text."""
    return "".join(delta.text for delta in of_type(events, TextDelta) if delta.text_index == index)
