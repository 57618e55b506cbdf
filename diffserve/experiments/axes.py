"""Axes of a sweep: lists of values in A1111's syntax, and request fields, models and precisions of the cells.

A value is a number, a word, or for numbers a range as in A1111's X/Y/Z plot: ``10-50 (+10)`` counts in steps of 10,
``1-3 [5]`` takes 5 numbers with equal distances, and ``1-5`` counts in steps of 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import HIRES, REQUEST_FIELDS
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.sizes import parse_size
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.models.loras import Lora
from diffserve.models.templates import Wildcards, combination, count_combinations
from diffserve.settings.config import DTYPE_ALIASES, DTYPES, replace_removed_dtype
from diffserve.settings.layers import split_name

Value = int | float | str
Settings = tuple[tuple[str, Value], ...]
"""Names and values of a cell's engine and request fields, apart from sampler, steps and guidance scale."""

PROMPT: Final = "prompt"
PROMPT_PARAM: Final = "axes.prompt"
"""Name of the prompt axis in errors; "prompt" alone would be a field of an image request."""
"""The axis of a prompt matrix: each combination of its templates is the prompt of its own cells."""

MODEL: Final = "model"
PRECISION: Final = "precision"
ENGINE_AXES: Final = (MODEL, PRECISION)
"""Axes whose values need an engine of their own, in contrast to request fields."""

PRECISIONS: Final = tuple(name for name in DTYPES if name != "auto")

MAX_AXIS_VALUES = 100
"""Maximum number of distinct values of an axis."""

MAX_AXIS_CHARS = 10_000
MAX_DIGITS = 18
MAX_SHOWN_CHARS = 40
LORA: Final = "lora:"
MAIN_AXES: Final = {
    "sampler": "samplers",
    "samplers": "samplers",
    "num_inference_steps": "steps",
    "steps": "steps",
    "guidance_scale": "guidance",
    "guidance": "guidance",
}
"""Other names of the axes that have options of their own."""

NOT_AXES: Final = {
    "seed": "all cells share their seeds; set their number instead",
    "strength": "a sweep has no start image",
    "best_of": "it selects images, so cells would have no pairs",
    "similarity_threshold": "its images depend on those generated before",
    "token_merging": "it has no effect",
    "template": "a sweep takes resolved prompts",
    "outpaint": "a sweep has no start image",
    **dict.fromkeys(
        (name for name in REQUEST_FIELDS if name.startswith(HIRES)), "a sweep compares images of one size in one pass"
    ),
}
"""Request fields that cannot be an axis, and why."""

TARGETS: Final = frozenset({
    "size", "variation_seed", "variation_strength", "clip_skip", "guidance_rescale", "micro_conditioning", "switch_at",
    "noise_source", MODEL, PROMPT,
})  # fmt: skip
"""Fields that change the image that more steps converge to; each of their values has converged images of its own.

The others (spacing, sigma schedule, eta, guidance interval, cache interval, precision) approximate the same image.
"""

NO_WILDCARDS: Final = Wildcards("")
RANGE: Final = re.compile(r"(-?[\d.]+)\s*-\s*(-?[\d.]+)\s*(?:\(\s*([+-]?[\d.]+)\s*\)|\[\s*(\d+)\s*\])?")


def target_of(settings: Settings) -> Settings:
    """Return the settings that change the image that more steps converge to."""
    return tuple((name, value) for name, value in settings if name in TARGETS or name.startswith(LORA))


def write_settings(settings: Settings) -> str:
    """Return settings as text such as ``, eta 0.5, lora:sepia 1``; "" without settings."""
    return "".join(
        f", {name} {value:g}" if isinstance(value, float) else f", {name} {value}" for name, value in settings
    )


def request_fields(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of ``DiffusionParams`` and of ``GenerationRequest`` that ``settings`` mean.

    Raises:
        InvalidRequest: A size, interval, size conditioning or LoRA is malformed.
    """
    diffusion: dict[str, Any] = {}
    request: dict[str, Any] = {}
    settings = tuple((name, value) for name, value in settings if name not in ENGINE_AXES)
    loras = tuple(Lora(name.removeprefix(LORA), float(value)) for name, value in settings if name.startswith(LORA))
    for name, value in settings:
        if name == "size":
            request["width_px"], request["height_px"] = parse_size(str(value)) or (None, None)
        elif name == PROMPT:
            request[name] = value
        elif name == "guidance_interval":
            diffusion[name] = _interval(str(value))
        elif name == "micro_conditioning":
            diffusion[name] = MicroConditioning.read(str(value))
        elif not name.startswith(LORA):
            diffusion[name] = value
    return (diffusion | {"loras": loras} if loras else diffusion), request


def _interval(text: str) -> tuple[float, float]:
    parts = text.split("-")
    if len(parts) != 2:
        message = f"guidance_interval has {quote(text)}; write FROM-TO, for example 0.2-0.8."
        raise InvalidRequest(message, param="guidance_interval")
    return _number(parts[0], "guidance_interval"), _number(parts[1], "guidance_interval")


def read_axis(text: str) -> tuple[str, str]:
    """Split an axis such as "eta=0,0.5,1" into the field and the text of its values.

    Raises:
        InvalidRequest: There is no "=", or the field cannot be an axis.
    """
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--")
    field = name if name.startswith(LORA) else name.replace("-", "_").lower()
    if not equals:
        raise InvalidRequest(
            f"--axis is {quote(text)}; write it as NAME=VALUES, for example eta=0,0.5,1.", param="axis"
        )
    check_axis_name(field)
    return MAIN_AXES.get(field, field), values


def check_axis_name(name: str) -> None:
    """Check that ``name`` can be an axis.

    Raises:
        InvalidRequest: It is unknown or cannot be an axis.
    """
    if name in NOT_AXES:
        raise InvalidRequest(f"{name} cannot be an axis: {NOT_AXES[name]}.", param="axis")
    if name not in (PROMPT, *REQUEST_FIELDS, *MAIN_AXES, *ENGINE_AXES) and not name.startswith(LORA):
        fields = (field for field in REQUEST_FIELDS if field not in NOT_AXES)
        axes = ", ".join([PROMPT, *fields, "lora:NAME", *ENGINE_AXES])
        raise InvalidRequest(f"{quote(name)} is not an axis; the axes are {axes}.", param="axis")


def read_values(name: str, text: str, wildcards: Wildcards = NO_WILDCARDS) -> tuple[Value, ...]:
    """Parse the values of an axis; those of ``model`` are its names.

    Args:
        name: Name of the axis.
        text: Its values.
        wildcards: Files that the templates of the axis ``prompt`` may name.

    Raises:
        InvalidRequest: A value is not of the field's type.
    """
    if name == PROMPT:
        try:
            return read_templates(text, wildcards)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=PROMPT_PARAM, code=error.code) from None
    if name == MODEL:
        return tuple(read_models(text))
    if name == PRECISION:
        return tuple(DTYPE_ALIASES.get(part, replace_removed_dtype(part, name)) for part in split_axis(text, name))
    kind = float if name.startswith(LORA) else REQUEST_FIELDS[name].type
    if kind is int:
        return whole_numbers(text, name)
    return numbers(text, name) if kind is float else split_axis(text, name)


def read_templates(text: str, wildcards: Wildcards) -> tuple[str, ...]:
    """Return all combinations of the templates of ``text``, one template in each line.

    Args:
        text: The templates, such as "a {red|blue} fox".
        wildcards: Files that they may name.

    Raises:
        InvalidRequest: There is no template, one is malformed, or there are more than ``MAX_AXIS_VALUES`` combinations.
    """
    if len(text) > MAX_AXIS_CHARS:
        message = f"{PROMPT} has {len(text)} characters; at most {MAX_AXIS_CHARS} are allowed."
        raise InvalidRequest(message, param=PROMPT)
    templates = [line.strip() for line in text.splitlines() if line.strip()]
    counts = [count_combinations(template, wildcards) for template in templates]
    if not 1 <= sum(counts) <= MAX_AXIS_VALUES:
        message = f"{PROMPT} has {sum(counts)} combinations; between 1 and {MAX_AXIS_VALUES} are allowed."
        raise InvalidRequest(message, param=PROMPT)
    return tuple(
        combination(template, index, wildcards)
        for template, count in zip(templates, counts, strict=True)
        for index in range(count)
    )


def read_models(text: str) -> dict[str, str]:
    """Parse the axis ``model`` into paths by name: each value is NAME=PATH, or a path with its last part as the name.

    Raises:
        InvalidRequest: A value is empty, or two models have the same name.
    """
    paths: dict[str, str] = {}
    for part in split_axis(text, MODEL):
        name, path = split_name(part)
        place = Path(path).expanduser().absolute()
        name = name or (place.stem if place.suffix == ".safetensors" else place.name)
        if name in paths:
            message = f"two models of the axis are called {quote(name)}; give one another name: NAME=PATH."
            raise InvalidRequest(message, param=MODEL)
        paths[name] = path
    return paths


def check_axes(axes: Mapping[str, tuple[Value, ...]]) -> None:
    """Check names and values of the axes that have no options of their own.

    Raises:
        InvalidRequest: A name is unknown, or there are no values, too many, or one that requests do not allow.
    """
    for name, values in axes.items():
        check_axis_name(name)
        if name in MAIN_AXES:
            raise InvalidRequest(f"{name} is not an axis of fields; set {MAIN_AXES[name]}.", param="axis")
        if not values:
            raise InvalidRequest(f"{name} is empty; a sweep needs at least one value on every axis.", param=name)
        if len(set(values)) > MAX_AXIS_VALUES:
            raise InvalidRequest(
                f"{name} has {len(set(values))} values; at most {MAX_AXIS_VALUES} are allowed.", param=name
            )
        unknown = next((str(value) for value in values if name == PRECISION and value not in PRECISIONS), None)
        if unknown is not None:
            raise InvalidRequest(
                f"precision has {quote(unknown)}; choose from {', '.join(PRECISIONS)}.", param=PRECISION
            )
        for value in values:
            diffusion, request = request_fields(((name, value),))
            DiffusionParams(**diffusion)
            if name == PROMPT:
                GenerationRequest(**request)


def split_axis(text: str, name: str) -> tuple[str, ...]:
    """Split a comma-separated axis into its values.

    Raises:
        InvalidRequest: A value is empty, or ``text`` is longer than ``MAX_AXIS_CHARS``.
    """
    if len(text) > MAX_AXIS_CHARS:
        raise InvalidRequest(f"{name} has {len(text)} characters; at most {MAX_AXIS_CHARS} are allowed.", param=name)
    values = tuple(part.strip() for part in text.split(","))
    if not all(values):
        what = "is empty" if not any(values) else f"is {quote(text)}, which has an empty value"
        raise InvalidRequest(f"{name} {what}; write values with commas between them.", param=name)
    return values


def whole_numbers(text: str, name: str) -> tuple[int, ...]:
    """Parse an axis of whole numbers such as "5,10,20-50 (+10)".

    Raises:
        InvalidRequest: A value is not a whole number, has more than ``MAX_DIGITS`` digits, or is an empty range.
    """
    return tuple(value for part in split_axis(text, name) for value in _whole_numbers(part, name))


def _whole_numbers(part: str, name: str) -> Iterator[int]:
    interval = RANGE.fullmatch(part)
    if interval is None:
        yield _whole_number(part, name)
        return
    start, end = (_whole_number(interval[group], name) for group in (1, 2))
    if interval[4] is not None:
        yield from (int(value) for value in _spaced(start, end, interval[4], part, name))
    else:
        yield from map(int, _counted(start, end, _whole_number(interval[3] or "1", name), part, name))


def _whole_number(value: str, name: str) -> int:
    digits = value.removeprefix("-").removeprefix("+")
    if not digits.isdecimal():
        raise InvalidRequest(f"{name} has {quote(value)}, which is not a whole number.", param=name)
    if len(digits) > MAX_DIGITS:
        raise InvalidRequest(
            f"{name} has {quote(value)} of {len(digits)} digits; at most {MAX_DIGITS} are allowed.", param=name
        )
    return int(value)


def numbers(text: str, name: str) -> tuple[float, ...]:
    """Parse an axis of numbers such as "1,3,5-7.5 (+0.5)".

    Raises:
        InvalidRequest: A value is not a number, or an empty range.
    """
    return tuple(value for part in split_axis(text, name) for value in _numbers(part, name))


def _numbers(part: str, name: str) -> Iterator[float]:
    interval = RANGE.fullmatch(part)
    if interval is None:
        yield _number(part, name)
        return
    start, end = (_number(interval[group], name) for group in (1, 2))
    if interval[4] is not None:
        values = _spaced(start, end, interval[4], part, name)
    else:
        values = _counted(start, end, _number(interval[3] or "1", name), part, name)
    yield from (float(f"{value:.10g}") for value in values)


def _number(value: str, name: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidRequest(f"{name} has {quote(value)}, which is not a number.", param=name) from None


def _counted(start: float, end: float, step: float, part: str, name: str) -> list[float]:
    """Return the numbers from ``start`` to ``end`` in steps of ``step``."""
    num = int((end - start) / step + 1e-9) + 1 if step and (end - start) / step >= 0 else 0
    _check_range(num, part, name)
    return [start + index * step for index in range(num)]


def _spaced(start: float, end: float, count: str, part: str, name: str) -> list[float]:
    """Return ``count`` numbers with equal distances from ``start`` to ``end``."""
    num = int(count[: MAX_DIGITS + 1])
    _check_range(num, part, name)
    return [start + (end - start) * index / max(num - 1, 1) for index in range(num)]


def _check_range(num: int, part: str, name: str) -> None:
    if num < 1:
        raise InvalidRequest(
            f"{name} has {quote(part)}, which is an empty range; write FROM-TO, FROM-TO (+STEP) or FROM-TO [COUNT].",
            param=name,
        )
    if num > MAX_AXIS_VALUES:
        message = f"{name} has {quote(part)}, a range of {num} values; at most {MAX_AXIS_VALUES} are allowed."
        raise InvalidRequest(message, param=name)


def quote(text: str) -> str:
    """Return ``text`` in quotes, truncated to ``MAX_SHOWN_CHARS`` characters."""
    return repr(text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…")
