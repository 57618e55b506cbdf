r"""Prompt templates: alternatives in braces and wildcards from a folder of text files. No torch.

``{a|b|c}`` chooses an alternative, ``{2::a|b}`` with weights, ``{2$$a|b|c}`` two different ones joined by commas, and
``{1-3$$ and $$a|b|c}`` one to three joined by " and ". ``__colors__`` chooses a line of ``colors.txt``, and
``__style/ink__`` one of ``style/ink.txt``; lines are templates themselves, and empty lines and lines that begin with #
are ignored. ``\{``, ``\}``, ``\|`` and ``\__`` are literal, and so is ``|`` inside square brackets, where it is
alternation (``prompt_schedule``).
A seed determines a random choice; combinations are numbered from 0, the last alternative changing first.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from diffserve.api.bounds import check, is_relative_name
from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import REQUEST_FIELDS, TemplateMode
from diffserve.models.model_files import find_below, is_valid_name

SUFFIX: Final = ".txt"
MAX_COMBINATIONS: Final = 10_000
MAX_DEPTH: Final = 8
"""Braces and wildcards inside one another, those in the lines of wildcards included."""
MAX_VISITS: Final = 100_000
"""Braces, wildcards and alternatives that one template may read in all."""
MAX_PICKED: Final = 16
"""Alternatives that braces with a number may choose."""
MAX_FILE_BYTES: Final = 1 << 22
MAX_RESOLVED_CHARS: Final = 32_000
SEEDS_DRAWN: Final = 2**32
"""Number of seeds of which one is drawn for a template without a seed."""

_MARK: Final = re.compile(r"\\__|\\.|\\$|[{}|\[\]]|__[\w\-./](?:[\w\-./ ]{0,126}?[\w\-./])??__", re.DOTALL)
_UNESCAPED: Final = re.compile(r"\\([{}]|__)")
_WEIGHT: Final = re.compile(r"\s*(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})::")
_COUNT: Final = re.compile(r"\s*(\d{0,4})\s*(-?)\s*(\d{0,4})\s*\$\$")
_SHOWN_CHARS: Final = 60


class Wildcard(NamedTuple):
    """A place for a line of a file, by its name without ``.txt``."""

    name: str


@dataclass(frozen=True)
class Choice:
    """Braces: ``least`` to ``most`` of ``options``, joined by ``separator``."""

    options: tuple[Items, ...]
    weights: tuple[float, ...]
    least: int = 1
    most: int = 1
    separator: str = ", "


Items = tuple["str | Wildcard | Choice", ...]


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
        found = find_below(Path(self.folder).expanduser(), _is_text_file)
        files = {file.removesuffix(SUFFIX): path for file, path in found.items()}
        return {name: path for name, path in files.items() if is_valid_name(name)}

    def lines(self, name: str) -> Choice:
        """Return the lines of a file as alternatives.

        Raises:
            InvalidRequest: There is no such file below the folder, or it cannot be used.
        """
        place = f"the template names __{name[:_SHOWN_CHARS]}__; "
        check(bool(self.folder), place + "no folder of wildcards is configured: start with --wildcard-dir.", "prompt")
        check(is_relative_name(name), place + "give a path below the folder, such as colors or style/ink.", "prompt")
        files = self._files()
        path = files.get(name)
        if path is None:
            known = ", ".join([*files][:8]) or "none"
            raise InvalidRequest(f"{place}there is no {name[:_SHOWN_CHARS]}.txt (wildcards: {known}).", param="prompt")
        try:
            status = path.stat()
            check(status.st_size <= MAX_FILE_BYTES, f"{place}its file has more than {MAX_FILE_BYTES} bytes.", "prompt")
            lines = _read_lines(path, status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise InvalidRequest(f"{place}its file cannot be read ({error.strerror}).", param="prompt") from None
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


def parse_template(template: str) -> Items:
    """Parse ``template`` into texts, wildcards and choices.

    Raises:
        InvalidRequest: A brace is not closed or not opened, braces are nested too deep, or a number before ``$$`` is
            out of range.
    """
    stack: list[_Braces] = [_Braces(0)]
    end = 0
    for match in _MARK.finditer(template):
        mark, top = match[0], stack[-1]
        top.options[-1].append(template[end : match.start()])
        end = match.end()
        if mark == "{":
            message = f"the template has braces nested more than {MAX_DEPTH} deep; nest fewer, or write \\{{."
            check(len(stack) <= MAX_DEPTH, message, "prompt")
            stack.append(_Braces(match.start()))
        elif mark == "}":
            place = f"the template closes a brace at character {match.start() + 1}"
            check(len(stack) > 1, f"{place} that it does not open; write \\}} for a brace.", "prompt")
            stack.pop()
            stack[-1].options[-1].append(_choice(top.options, template[top.start : match.end()]))
        elif mark == "|" and len(stack) > 1 and not top.num_square:
            top.options.append([])
        elif mark == "\\|" and len(stack) > 1 and not top.num_square:
            top.options[-1].append("|")
        elif mark.startswith("__"):
            top.options[-1].append(Wildcard(mark[2:-2].strip()))
        else:
            top.num_square = max(0, top.num_square + {"[": 1, "]": -1}.get(mark, 0))
            top.options[-1].append(mark)
    shown = template[stack[-1].start :][:_SHOWN_CHARS]
    message = f"the template opens a brace that it does not close: {shown!r}; close it, or write \\{{ for a brace."
    check(len(stack) == 1, message, "prompt")
    return _joined([*stack[0].options[0], template[end:]])


@dataclass
class _Braces:
    """Open braces: their place, their alternatives so far, and the number of open square brackets."""

    start: int
    options: list[list[str | Wildcard | Choice]] = field(default_factory=lambda: [[]])
    num_square: int = 0


def _joined(items: Sequence[str | Wildcard | Choice]) -> Items:
    """Return ``items`` with neighboring texts joined, and escapes of braces and wildcards removed."""
    joined: list[str | Wildcard | Choice] = []
    for is_text, group in itertools.groupby(items, lambda item: isinstance(item, str)):
        if is_text:
            text = _UNESCAPED.sub(r"\1", "".join(map(str, group)))
            joined += [text] * bool(text)
        else:
            joined += group
    return tuple(joined)


def _choice(options: Sequence[list[str | Wildcard | Choice]], shown: str) -> Choice:
    """Return the choice of braces whose source text is ``shown``."""
    least, most, separator = 1, 1, ", "
    options = [list(_joined(option)) for option in options]
    first = options[0][0] if options[0] else ""
    count = _COUNT.match(first) if isinstance(first, str) else None
    if count is not None:
        text = str(options[0][0])[count.end() :] if options[0] else ""
        if "$$" in text:
            separator, _, text = text.partition("$$")
        options[0][:1] = [text]
        low, dash, high = count.groups()
        most = int(high) if high else min(len(options), MAX_PICKED) if dash else int(low or 1)
        least = int(low) if low else 0 if dash else 1
        message = (
            f"the template asks for {count[0].strip('$ ')} of {len(options)} alternatives in {shown[:_SHOWN_CHARS]!r}; "
            f"give at most {min(len(options), MAX_PICKED)}, the smaller number first."
        )
        check(least <= most <= min(len(options), MAX_PICKED), message, "prompt")
    weights: list[float] = []
    for option in options:
        weight = _WEIGHT.match(option[0]) if option and isinstance(option[0], str) else None
        if weight is not None:
            option[0] = str(option[0])[weight.end() :]
        weights.append(1.0 if weight is None else float(weight[1]))
    check(any(weights), f"all weights in {shown[:_SHOWN_CHARS]!r} are 0; give one alternative more.", "prompt")
    return Choice(tuple(map(tuple, options)), tuple(weights), least, most, separator)


class _Reader:
    """Reads choices and wildcards of one template, with limits on their number and depth."""

    def __init__(self, wildcards: Wildcards) -> None:
        self._wildcards = wildcards
        self._files: dict[str, Choice] = {}
        self._num_visits = 0

    def choice_of(self, item: Wildcard | Choice, depth: int) -> Choice:
        """Return the alternatives of ``item``. Raises InvalidRequest beyond the limits."""
        deep = f"the template has braces and wildcards nested more than {MAX_DEPTH} deep{_named(item)}; nest fewer."
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
        count = choice.least + int(self._rng.random() * (choice.most - choice.least + 1))
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
            sums = [1, *[0] * choice.most]  # of the products of every k options
            for option in choice.options:
                count = self.count(option, depth + 1)
                for size in range(choice.most, 0, -1):
                    sums[size] += sums[size - 1] * count
            self._counts[item] = sum(sums[choice.least : choice.most + 1])
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
        for picked in _subsets(len(choice.options), choice.least, choice.most):
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


def _subsets(count: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the subsets of ``least`` to ``most`` of ``count`` places, in order."""
    return itertools.chain.from_iterable(itertools.combinations(range(count), size) for size in range(least, most + 1))


def _named(item: Wildcard | Choice) -> str:
    return f" at __{item.name[:_SHOWN_CHARS]}__" if isinstance(item, Wildcard) else ""


def _is_text_file(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and not os.path.isdir(path)


@lru_cache(maxsize=64)
def _read_lines(path: Path, _num_bytes: int, _changed_ns: int) -> tuple[str, ...]:
    """Return the lines of a file; cached until its size or modification time changes."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8-sig", errors="replace").splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


@lru_cache(maxsize=64)
def _choice_of_lines(lines: tuple[str, ...]) -> Choice:
    """Return the alternatives that ``lines`` are; a line may begin with a weight and ``::``."""
    options, weights = [], []
    for line in lines:
        weight = _WEIGHT.match(line)
        options.append(parse_template(line[weight.end() :] if weight else line))
        weights.append(float(weight[1]) if weight else 1.0)
    return Choice(tuple(options), tuple(weights))
