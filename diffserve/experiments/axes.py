"""An axis of a comparison as people write it: values with commas between them."""

from __future__ import annotations

from diffserve.errors import InvalidRequest

MAX_AXIS_CHARS = 10_000
MAX_DIGITS = 18
MAX_SHOWN_CHARS = 40


def split_axis(text: str, name: str) -> tuple[str, ...]:
    """The values of an axis written with commas. Raises :class:`InvalidRequest` where one is missing, and for more than
    ``MAX_AXIS_CHARS`` characters."""
    if len(text) > MAX_AXIS_CHARS:
        raise InvalidRequest(f"{name} has {len(text)} characters; at most {MAX_AXIS_CHARS} are read.", param=name)
    values = tuple(part.strip() for part in text.split(","))
    if not all(values):
        what = "is empty" if not any(values) else f"is {quote(text)}, which leaves a value out"
        raise InvalidRequest(f"{name} {what}; write values with commas between them.", param=name)
    return values


def whole_numbers(text: str, name: str) -> tuple[int, ...]:
    """An axis of whole numbers of at most ``MAX_DIGITS``: "5,10,20". Raises :class:`InvalidRequest` for anything
    else."""
    values = split_axis(text, name)
    for value in values:
        digits = value.removeprefix("-")
        if not digits.isdecimal():
            raise InvalidRequest(f"{name} has {quote(value)}, which is not a whole number.", param=name)
        if len(digits) > MAX_DIGITS:
            raise InvalidRequest(
                f"{name} has {quote(value)} of {len(digits)} digits; at most {MAX_DIGITS} are read.", param=name
            )
    return tuple(int(value) for value in values)


def numbers(text: str, name: str) -> tuple[float, ...]:
    """An axis of numbers: "1,3,7.5". Raises :class:`InvalidRequest` for anything else."""
    return tuple(_number(value, name) for value in split_axis(text, name))


def _number(value: str, name: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidRequest(f"{name} has {quote(value)}, which is not a number.", param=name) from None


def quote(text: str) -> str:
    """The beginning of ``text`` in quotes."""
    return repr(text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…")
