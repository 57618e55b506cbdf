"""Prompt templates: the prompts that a template resolves to, at random or by number. No torch.

``template_syntax`` describes templates. A seed determines a random choice; combinations are numbered from 0, the last
alternative changing first.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from diffserve.api.bounds import check, is_relative_name
from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import REQUEST_FIELDS, TemplateMode
from diffserve.models.model_files import find_below, is_valid_name
from diffserve.models.template_syntax import (
    MAX_DEPTH,
    SHOWN_CHARS,
    Choice,
    Items,
    Wildcard,
    parse_template,
    split_weight,
)

SUFFIX: Final = ".txt"
MAX_COMBINATIONS: Final = 10_000
MAX_VISITS: Final = 100_000
"""Braces, wildcards and alternatives that one template may read in all."""
MAX_FILE_BYTES: Final = 1 << 22
MAX_RESOLVED_CHARS: Final = 32_000
SEEDS_DRAWN: Final = 2**32
"""Number of seeds of which one is drawn for a template without a seed."""


@dataclass
class Wildcards:
    """The text files of a folder, by their paths below it without ``.txt``; "" is no folder."""

    folder: str

    def names(self) -> list[str]:
        """Return the names of all files; none without a folder."""
        if not self.folder:
            return []
        return [*self._files()]

    def _files(self) -> dict[str, Path]:
        """Return the files by name."""
        paths = find_below(Path(self.folder).expanduser(), _is_text_file)
        files = {file.removesuffix(SUFFIX): path for file, path in paths.items()}
        return {name: path for name, path in files.items() if is_valid_name(name)}

    def lines(self, name: str) -> Choice:
        """Return the lines of a file as alternatives.

        Raises:
            InvalidRequest: There is no such file below the folder, or it cannot be used.
        """
        place = f"the template names __{name[:SHOWN_CHARS]}__; "
        check(bool(self.folder), place + "no folder of wildcards is configured: start with --wildcard-dir.", "prompt")
        check(is_relative_name(name), place + "give a path below the folder, such as colors or style/ink.", "prompt")
        files = self._files()
        path = files.get(name)
        if path is None:
            names = ", ".join([*files][:8]) or "none"
            raise InvalidRequest(f"{place}there is no {name[:SHOWN_CHARS]}.txt (wildcards: {names}).", param="prompt")
        try:
            status = path.stat()
            check(status.st_size <= MAX_FILE_BYTES, f"{place}its file has more than {MAX_FILE_BYTES} bytes.", "prompt")
            lines = _read_lines(path, status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise InvalidRequest(f"{place}its file cannot be read ({error.strerror}).", param="prompt") from None
        except UnicodeDecodeError as error:
            message = f"{place}its file is not UTF-8 text (at byte {error.start}); convert it to UTF-8."
            raise InvalidRequest(message, param="prompt") from None
        check(bool(lines), place + "its file has no lines: add some, one alternative each.", "prompt")
        return _choice_of_lines(lines)


def template_fields(
    template: str,
    mode: TemplateMode,
    seed: int | None,
    num_images: int,
    wildcards: Wildcards,
    convert: Callable[[str], str] = str,
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ``GenerationRequest`` for the prompts of ``template``, and warnings.

    Args:
        template: The prompt of a client.
        mode: What to do with it; with "off" it is the prompt, unchanged.
        seed: Seed of the first image; image i has seed + i. ``None``: drawn here if the choices need it.
        num_images: Number of images to generate, at least 1.
        wildcards: Files that the template may name.
        convert: Converts a resolved prompt to A1111's prompt syntax.

    Raises:
        InvalidRequest: The mode is unknown, or as ``resolve_templates``.
    """
    REQUEST_FIELDS["template"].check("template", mode)
    if mode == "off":
        return {"prompt": convert(template), "seed": seed}, []
    if seed is None:
        seed = secrets.randbelow(SEEDS_DRAWN - num_images)
    resolved, warnings = resolve_templates(template, mode, [seed + index for index in range(num_images)], wildcards)
    prompts = tuple(map(convert, resolved))
    image_prompts = prompts if len(set(prompts)) > 1 else ()
    return {"prompt": prompts[0], "image_prompts": image_prompts, "template": template, "seed": seed}, warnings


def resolve_templates(
    template: str, mode: TemplateMode, seeds: Sequence[int], wildcards: Wildcards
) -> tuple[list[str], list[str]]:
    """Return the prompt of each image, and warnings.

    Args:
        template: The template.
        mode: "random": each image's choices follow from its seed; "combinatorial": image i gets combination i, and
            after the last one the first again.
        seeds: Seeds of the images.
        wildcards: Files that the template may name.

    Raises:
        InvalidRequest: The template is malformed, has too many combinations, or names a file that cannot be used.
    """
    parsed = parse_template(template)
    if mode == "random":
        return [_written(parsed, Picker(wildcards, random.Random(seed)).text(parsed)) for seed in seeds], []
    count = count_combinations(template, wildcards)
    prompts = [combination(template, index % count, wildcards) for index in range(len(seeds))]
    if count <= len(seeds):
        return prompts, []
    warning = f"the template has {count} combinations; {len(seeds)} of them, from the first on, were painted."
    return prompts, [warning]


def combination(template: str, index: int, wildcards: Wildcards) -> str:
    """Return combination ``index`` of ``template``, from 0.

    Raises:
        InvalidRequest: As ``count_combinations``.
    """
    parsed = parse_template(template)
    return _written(parsed, Combinations(wildcards).text(parsed, index))


def count_combinations(template: str, wildcards: Wildcards) -> int:
    """Return the number of combinations of ``template``.

    Raises:
        InvalidRequest: There are more than ``MAX_COMBINATIONS``, or the template cannot be used.
    """
    count = Combinations(wildcards).count(parse_template(template))
    shown = str(count) if count < 10**12 else "more than 10^12"
    message = (
        f"the template has {shown} combinations; at most {MAX_COMBINATIONS} are allowed: use template random, or fewer "
        "alternatives."
    )
    check(count <= MAX_COMBINATIONS, message, "prompt")
    return count


def _written(parsed: Items, text: str) -> str:
    """Return a resolved text; white space that empty alternatives leave is joined."""
    message = f"the resolved template has more than {MAX_RESOLVED_CHARS} characters; shorten it."
    check(len(text) <= MAX_RESOLVED_CHARS, message, "prompt", "string_above_max_length")
    return re.sub(r" {2,}", " ", text).strip() if any(not isinstance(item, str) for item in parsed) else text


class _Reader:
    """Reads choices and wildcards of one template, with limits on their number and depth."""

    def __init__(self, wildcards: Wildcards) -> None:
        self._wildcards = wildcards
        self._files: dict[str, Choice] = {}
        self._num_visits = 0

    def choice_of(self, item: Wildcard | Choice, depth: int) -> Choice:
        """Return the alternatives of ``item``. Raises InvalidRequest beyond the limits."""
        deep = (
            f"the template has braces and wildcards nested more than {MAX_DEPTH} deep{_at_wildcard(item)}; nest fewer."
        )
        check(depth < MAX_DEPTH, deep, "prompt")
        if isinstance(item, Choice):
            return item
        if item.name not in self._files:
            self._files[item.name] = self._wildcards.lines(item.name)
        return self._files[item.name]

    def visit(self, count: int = 1) -> None:
        """Count what is read. Raises InvalidRequest if it is too much."""
        self._num_visits += count
        message = f"the template reads more than {MAX_VISITS} alternatives and wildcards; use fewer, or shorter files."
        check(self._num_visits <= MAX_VISITS, message, "prompt")


class Picker(_Reader):
    """Resolves a template by random choices; only ``Random.random`` is used, whose sequence Python guarantees."""

    def __init__(self, wildcards: Wildcards, rng: random.Random) -> None:
        super().__init__(wildcards)
        self._rng = rng

    def text(self, items: Items, depth: int = 0) -> str:
        """Return the text of ``items``."""
        return "".join(item if isinstance(item, str) else self._picked(item, depth) for item in items)

    def _picked(self, item: Wildcard | Choice, depth: int) -> str:
        self.visit()
        choice = self.choice_of(item, depth)
        count = choice.min_picked + int(self._rng.random() * (choice.max_picked - choice.min_picked + 1))
        left = list(range(len(choice.options)))
        picked = []
        for _ in range(count):
            place = self._place([choice.weights[index] for index in left])
            picked.append(self.text(choice.options[left.pop(place)], depth + 1))
        return choice.separator.join(picked)

    def _place(self, weights: Sequence[float]) -> int:
        """Return an index with a probability in proportion to ``weights``; with equal ones if all are 0."""
        sums = list(itertools.accumulate(weights))
        if not sums[-1]:
            return int(self._rng.random() * len(weights))
        point = self._rng.random() * sums[-1]
        return next(index for index, total in enumerate(sums) if point < total)


class Combinations(_Reader):
    """Counts and numbers the combinations of a template; weights have no effect."""

    def __init__(self, wildcards: Wildcards) -> None:
        super().__init__(wildcards)
        self._counts: dict[Wildcard | Choice, int] = {}

    def count(self, items: Items, depth: int = 0) -> int:
        """Return the number of texts of ``items``."""
        total = 1
        for item in items:
            if not isinstance(item, str):
                total *= self._count(item, depth)
        return total

    def _count(self, item: Wildcard | Choice, depth: int) -> int:
        choice = self.choice_of(item, depth)
        if item not in self._counts:
            self.visit(len(choice.options))
            sums = [1, *[0] * choice.max_picked]  # of the products of every k options
            for option in choice.options:
                count = self.count(option, depth + 1)
                for size in range(choice.max_picked, 0, -1):
                    sums[size] += sums[size - 1] * count
            self._counts[item] = sum(sums[choice.min_picked : choice.max_picked + 1])
        return self._counts[item]

    def text(self, items: Items, index: int, depth: int = 0) -> str:
        """Return text number ``index`` of ``items``."""
        texts: list[str] = []
        for item in reversed(items):
            if isinstance(item, str):
                texts.append(item)
            else:
                index, place = divmod(index, self._count(item, depth))
                texts.append(self._text(self.choice_of(item, depth), place, depth + 1))
        return "".join(reversed(texts))

    def _text(self, choice: Choice, index: int, depth: int) -> str:
        for picked in _subsets(len(choice.options), choice.min_picked, choice.max_picked):
            self.visit()
            counts = [self.count(choice.options[place], depth) for place in picked]
            size = 1
            for count in counts:
                size *= count
            if index < size:
                texts = []
                for place, count in zip(reversed(picked), reversed(counts), strict=True):
                    index, part = divmod(index, count)
                    texts.append(self.text(choice.options[place], part, depth))
                return choice.separator.join(reversed(texts))
            index -= size
        raise IndexError("the index is beyond the number of combinations")


class WildcardChecker(_Reader):
    """Checks files of wildcards: whichever lines are chosen, a template that names a file must resolve."""

    def __init__(self, wildcards: Wildcards) -> None:
        super().__init__(wildcards)
        self._levels: dict[str, int] = {}  # of braces and wildcards inside one another, by file

    def check(self, name: str) -> None:
        """Check the file ``name`` and the files that its lines name.

        Raises:
            InvalidRequest: A file cannot be used, or its lines lead back to it.
        """
        self._levels_of(Wildcard(name), (), 0)

    def _levels_of(self, item: Wildcard | Choice, path: tuple[str, ...], depth: int) -> int:
        """Return the levels of ``item``; the files ``path`` lead to it."""
        if isinstance(item, Wildcard):
            if item.name in path:
                cycle = " -> ".join(f"{name}.txt" for name in (*path[path.index(item.name) :], item.name))
                message = f"__{item.name}__ includes itself ({cycle}); remove it from one of these files."
                raise InvalidRequest(message, param="prompt")
            path = (*path, item.name)
            depth += self._levels.get(item.name, 1) - 1
        choice = self.choice_of(item, depth)
        if isinstance(item, Wildcard) and item.name in self._levels:
            return self._levels[item.name]
        inner = (part for option in choice.options for part in option if not isinstance(part, str))
        levels = 1 + max((self._levels_of(part, path, depth + 1) for part in inner), default=0)
        if isinstance(item, Wildcard):
            self._levels[item.name] = levels
        return levels


def _subsets(count: int, min_size: int, max_size: int) -> Iterator[tuple[int, ...]]:
    """Yield the subsets of ``min_size`` to ``max_size`` of ``count`` places, in order."""
    return itertools.chain.from_iterable(
        itertools.combinations(range(count), size) for size in range(min_size, max_size + 1)
    )


def _at_wildcard(item: Wildcard | Choice) -> str:
    return f" at __{item.name[:SHOWN_CHARS]}__" if isinstance(item, Wildcard) else ""


def _is_text_file(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and not os.path.isdir(path)


@lru_cache(maxsize=64)
def _read_lines(path: Path, _num_bytes: int, _changed_ns: int) -> tuple[str, ...]:
    """Return the lines of a file; cached until its size or modification time changes."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


@lru_cache(maxsize=64)
def _choice_of_lines(lines: tuple[str, ...]) -> Choice:
    """Return the alternatives that ``lines`` are; a line may begin with a weight and ``::``."""
    options, weights = [], []
    for line in lines:
        weight, text = split_weight(line)
        options.append(parse_template(text))
        weights.append(weight)
    return Choice(tuple(options), tuple(weights))
