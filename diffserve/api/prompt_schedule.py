"""Prompt editing, alternation and composition in A1111's syntax, without torch: the texts that each step reads.

Editing: ``[from:to:when]`` reads ``from`` until step ``when`` and ``to`` afterwards; ``[to:when]`` adds words and
``[from::when]`` removes them. ``when`` with a decimal point is a fraction of the steps, else a number of steps.
Alternation: ``[a|b]`` reads ``a`` and ``b`` in turn, a step each. Composition: ``a AND b :0.7`` evaluates the UNet for
each part and adds the weighted differences from the unconditional output (Liu et al. 2022, arXiv 2206.01714). A part
with ``MASK(0 0.5, 0 1)`` acts in that area only: left and right, top and bottom, in fractions of the image. Everything
else, ``[word]`` included, is left unchanged for ``prompt_syntax``; a backslash escapes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diffserve.api.bounds import check

MAX_PARTS: Final = 8
"""Parts of a prompt that AND joins; each is a row of the UNet at every step."""
MAX_TEXTS: Final = 32
"""Distinct texts that a prompt with editing or alternation may have over its steps, in all parts together."""
MAX_CONSTRUCTS: Final = 64
"""Brackets with editing or alternation in a prompt."""
MAX_DEPTH: Final = 8
"""Brackets with editing or alternation inside one another."""
MAX_PART_WEIGHT: Final = 10.0
MAX_JUDGED: Final = 128
"""Distinct texts of a prompt that a filter reads."""
JUDGED_STEPS: Final = 240
"""Number of steps with many divisors, for the texts that a filter reads."""

_MARK: Final = re.compile(r"\\.|<\w+:[^<>]+>|[\[\]()|:]", re.DOTALL)
_WHEN: Final = re.compile(r"\s*[+-]?(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})\s*")
_AND: Final = re.compile(r"(?<!\\)\bAND\b")
_MASK: Final = re.compile(r"(?<!\\)\bMASK\(([^()]*)\)")
_AREA: Final = re.compile(r"\s*(\S+)\s+(\S+)\s*,\s*(\S+)\s+(\S+)\s*")
_FRACTION: Final = re.compile(r"(?:0|1|[01]?\.\d{1,9})")
_WEIGHT: Final = re.compile(r"[+-]?(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})")
_SHOWN_CHARS: Final = 60


@dataclass(frozen=True)
class _Edit:
    """``before`` in the first steps and ``after`` in the others; ``when`` is the text of the number."""

    before: _Items
    after: _Items
    when: str
    depth: int

    def items_at(self, step: int, num_steps: int) -> _Items:
        number = float(self.when)
        first = int(round(number * num_steps, 6)) if "." in self.when else int(number)
        return self.before if step < first else self.after


@dataclass(frozen=True)
class _Alternation:
    """``options`` in turn."""

    options: tuple[_Items, ...]
    depth: int

    def items_at(self, step: int, num_steps: int) -> _Items:
        return self.options[step % len(self.options)]


_Items = tuple["str | _Edit | _Alternation", ...]


@dataclass
class _Frame:
    """An open bracket: its mark, its place in the list of items, and the places of the separators in it."""

    mark: str
    start: int
    bars: list[int]
    colons: list[int]


class Area(NamedTuple):
    """Rectangle of an image in fractions of its width and height, from 0 to 1."""

    left: float
    right: float
    top: float
    bottom: float

    def slices(self, height: int, width: int) -> tuple[slice, slice]:
        """Return the rows and columns of a latent of ``height`` and ``width`` that are in the area, at least one."""
        rows = _cells(self.top, self.bottom, height)
        return rows, _cells(self.left, self.right, width)


class PartText(NamedTuple):
    """One part of a prompt without AND, MASK and its weight; ``area`` is ``None`` for the entire image."""

    text: str
    weight: float = 1.0
    area: Area | None = None


class PromptPart(NamedTuple):
    """One part of a prompt: its weight, its area (``None``: the entire image), and its text at each step."""

    weight: float
    area: Area | None
    texts: tuple[str, ...]


def prompt_parts(prompt: str, num_steps: int) -> tuple[PromptPart, ...]:
    """Return the parts of ``prompt`` that AND joins, each with its text at each of ``num_steps`` steps.

    Raises:
        InvalidRequest: There are too many parts, texts, or brackets of editing and alternation, or a wrong MASK.
    """
    return tuple(
        PromptPart(part.weight, part.area, texts_by_step(part.text, num_steps, "prompt"))
        for part in split_parts(prompt)
    )


def num_parts(prompt: str) -> int:
    """Return the number of parts of ``prompt``, 1 without AND."""
    return len(_AND.findall(prompt)) + 1


def is_composed(prompt: str) -> bool:
    """Return whether ``prompt`` has several parts or an area."""
    return bool(_AND.search(prompt) or _MASK.search(prompt))


def without_areas(prompt: str) -> str:
    """Return ``prompt`` without the areas of its parts."""
    return _MASK.sub("", prompt)


def split_parts(prompt: str) -> tuple[PartText, ...]:
    """Split ``prompt`` at AND into texts with weights and areas; one without AND and MASK is unchanged and weighs 1.

    Raises:
        InvalidRequest: There are more than ``MAX_PARTS`` parts, a weight is beyond ``MAX_PART_WEIGHT``, or a MASK is
            wrong.
    """
    if not is_composed(prompt):
        return (PartText(prompt),)
    texts = _AND.split(prompt)
    message = f"the prompt has {len(texts)} parts joined by AND; give at most {MAX_PARTS}, or write \\AND for the word."
    check(len(texts) <= MAX_PARTS, message, "prompt")
    return tuple(map(_part, texts))


def _part(text: str) -> PartText:
    """Split "a dog MASK(0 0.5, 0 1) :0.7" into text, weight and area."""
    masks = _MASK.findall(text)
    check(len(masks) <= 1, f"the part {_shown(text)} of the prompt has {len(masks)} areas; give one.", "prompt")
    words, colon, number = without_areas(text).rpartition(":")
    area = _area(masks[0]) if masks else None
    if not colon or not _WEIGHT.fullmatch(number.strip()) or words.endswith("\\"):
        return PartText(without_areas(text).strip(), 1.0, area)
    weight = float(number)
    message = f"the part {_shown(text)} of the prompt has the weight {weight:g}; keep it within {MAX_PART_WEIGHT:g}."
    check(abs(weight) <= MAX_PART_WEIGHT, message, "prompt")
    return PartText(words.strip(), weight, area)


def _area(text: str) -> Area:
    """Parse "0 0.5, 0 1": left and right, top and bottom."""
    match = _AREA.fullmatch(text)
    numbers = match.groups() if match is not None else ()
    is_area = bool(numbers) and all(map(_FRACTION.fullmatch, numbers))
    area = Area(*map(float, numbers)) if is_area else Area(0, 0, 0, 0)
    message = (
        f"MASK({text[:_SHOWN_CHARS]}) in the prompt is not an area; write left and right, then top and bottom, from 0 "
        r"to 1, as in MASK(0 0.5, 0 1), or \MASK( for the text."
    )
    check(area.left < area.right <= 1 and area.top < area.bottom <= 1, message, "prompt")
    return area


def _cells(start: float, stop: float, size: int) -> slice:
    first = min(round(start * size), size - 1)
    return slice(first, max(round(stop * size), first + 1))


def _shown(text: str) -> str:
    return repr(text.strip()[:_SHOWN_CHARS])


def texts_by_step(text: str, num_steps: int, name: str) -> tuple[str, ...]:
    """Return what ``text`` is at each of ``num_steps`` steps, with its editing and alternation applied.

    Args:
        text: A prompt without AND.
        num_steps: Number of steps.
        name: "prompt" or "negative_prompt", for errors.

    Raises:
        InvalidRequest: Too many brackets of editing and alternation, or too deep ones.
    """
    items = _parse(text, name)
    if all(isinstance(item, str) for item in items):
        return (text,) * num_steps
    return tuple("".join(_written(items, step, num_steps)) for step in range(num_steps))


def is_scheduled(prompt: str, negative: str) -> bool:
    """Return whether the prompt has editing, alternation, AND or MASK, or the negative one editing or alternation.

    Raises:
        InvalidRequest: As ``texts_by_step``.
    """
    texts = ((prompt, "prompt"), (negative, "negative_prompt"))
    if is_composed(prompt):
        return True
    return any(not isinstance(item, str) for text, name in texts if "[" in text for item in _parse(text, name))


def texts_read(prompt: str, name: str, step_counts: Iterable[int]) -> tuple[str, ...]:
    """Return the distinct texts that editing, alternation, AND and MASK make of ``prompt``, for a filter of prompts.

    Args:
        prompt: The prompt; one without them has no texts but itself, and the result is empty.
        name: "prompt" or "negative_prompt", which has no AND and no MASK.
        step_counts: Numbers of steps to consider; those of ``JUDGED_STEPS`` are added, in which every editing and
            alternation has its turn.

    Raises:
        InvalidRequest: As ``prompt_parts``, or more than ``MAX_JUDGED`` texts.
    """
    is_negative = name == "negative_prompt"
    if not (is_scheduled("", prompt) if is_negative else is_scheduled(prompt, "")):
        return ()
    parts = (PartText(prompt),) if is_negative else split_parts(prompt)
    counts = dict.fromkeys((*step_counts, JUDGED_STEPS))
    texts = dict.fromkeys(text for part in parts for count in counts for text in texts_by_step(part.text, count, name))
    message = (
        f"the {name.replace('_', ' ')} can have more than {MAX_JUDGED} different texts; use fewer alternatives [a|b] "
        "or fewer edits [from:to:when]."
    )
    check(len(texts) <= MAX_JUDGED, message, name)
    return tuple(texts)


def check_num_texts(texts: Sequence[str], name: str) -> None:
    """Check the number of distinct texts of a prompt.

    Raises:
        InvalidRequest: There are more than ``MAX_TEXTS``.
    """
    count = len(set(texts))
    message = (
        f"the {name.replace('_', ' ')} has {count} different texts over its steps; at most {MAX_TEXTS} are allowed: "
        "use fewer alternatives [a|b] or fewer edits [from:to:when]."
    )
    check(count <= MAX_TEXTS, message, name)


def _written(items: _Items, step: int, num_steps: int) -> Iterable[str]:
    """Yield the pieces of the text of ``items`` at ``step``, from 0."""
    for item in items:
        if isinstance(item, str):
            yield item
        else:
            yield from _written(item.items_at(step, num_steps), step, num_steps)


def _parse(text: str, name: str) -> _Items:
    """Parse editing and alternation; brackets of other kinds stay text.

    One list holds all items. A bracket that closes as editing or alternation replaces its items by one node, so that
    the time is linear in the length of the text.
    """
    items: list[str | _Edit | _Alternation] = []
    frames: list[_Frame] = []
    end, num_constructs = 0, 0
    for match in _MARK.finditer(text):
        if match.start() > end:
            items.append(text[end : match.start()])
        mark, end = match[0], match.end()
        items.append(mark)
        place = len(items) - 1
        if mark in ("[", "("):
            frames.append(_Frame(mark, place, [], []))
        elif frames and mark == "|":
            frames[-1].bars.append(place)
        elif frames and mark == ":":
            frames[-1].colons.append(place)
        elif frames and frames[-1].mark + mark in ("[]", "()"):
            frame = frames.pop()
            node = _node(items, frame) if mark == "]" else None
            if node is not None:
                num_constructs += 1
                _check_brackets(name, num_constructs, node.depth)
                items[frame.start :] = [node]
    return (*items, *([text[end:]] if end < len(text) else []))


def _check_brackets(name: str, count: int, depth: int) -> None:
    what = f"the {name.replace('_', ' ')} has"
    fix = r"write \[ for a literal bracket."
    check(
        count <= MAX_CONSTRUCTS,
        f"{what} more than {MAX_CONSTRUCTS} brackets of editing or alternation; use fewer, or {fix}",
        name,
    )
    check(
        depth <= MAX_DEPTH,
        f"{what} brackets of editing or alternation nested more than {MAX_DEPTH} deep; nest fewer, or {fix}",
        name,
    )


def _node(items: Sequence[str | _Edit | _Alternation], frame: _Frame) -> _Edit | _Alternation | None:
    """Return the editing or alternation that the bracket ``frame`` at the end of ``items`` is, or ``None``."""
    first, last = frame.start + 1, len(items) - 1  # its contents, without both brackets
    if frame.bars:
        depth = _depth(items[first:last])
        edges = [frame.start, *frame.bars, last]
        options = tuple(tuple(items[start + 1 : stop]) for start, stop in itertools.pairwise(edges))
        return _Alternation(options, depth)
    if not frame.colons:
        return None
    *earlier, colon = frame.colons[-2:]
    when = items[colon + 1]
    if colon + 2 != last or not isinstance(when, str) or not _WHEN.fullmatch(when):
        return None
    depth = _depth(items[first:last])
    if not earlier:
        return _Edit((), tuple(items[first:colon]), when, depth)
    return _Edit(tuple(items[first : earlier[0]]), tuple(items[earlier[0] + 1 : colon]), when, depth)


def _depth(contents: Sequence[str | _Edit | _Alternation]) -> int:
    """Return how deep a bracket with ``contents`` is nested, counted from the inside."""
    return 1 + max((item.depth for item in contents if not isinstance(item, str)), default=0)
