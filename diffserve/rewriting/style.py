"""Rewriting styles, read from ``configs/rewriter/<name>.toml``.

A style defines the instructions of the language model, the form of answers, and the sampling parameters.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec

from diffserve.api.errors import ConfigError, InvalidRequest, ModelNotFound
from diffserve.api.sampling_params import SamplingParams
from diffserve.settings.layers import configs_dir, nearest

STYLE_OF_FAMILY: Final[Mapping[str, str]] = {"embedded": "embedded", "sd1": "tags", "sd2": "tags", "sdxl": "prose"}

Parts = Literal["whole", "tags", "sentences"]


class Example(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A few-shot example: a user's prompt and its rewrite."""

    wish: str
    prompt: str


class PromptSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Instructions for the language model.

    Attributes:
        system: System text; "{words}" is replaced by the number of words that fit the image model's text window.
        words_per_token: English words per token of the image model, used to compute that number.
        examples: Few-shot examples.
    """

    system: str
    words_per_token: float
    examples: tuple[Example, ...]

    def system_for(self, window_tokens: int) -> str:
        """Return the system text for an image model with a text window of ``window_tokens`` tokens."""
        words = max(1, int(window_tokens * self.words_per_token))
        return self.system.replace("{words}", str(words)).strip()


class AnswerSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Form of answers and criteria for their rejection.

    Attributes:
        parts: What may be dropped from the end of an answer that is too long: comma-separated "tags", "sentences", or
            nothing ("whole").
        language: "captions" allows only canonical captions of the embedded image model, "any" allows all text.
        max_tokens: Token limit; an answer that reaches it is rejected.
        max_entropy: Mean entropy in nats per token above which the model counts as unsure.
        keep_quotes: Whether quoted text must be preserved exactly.
        keep_names: Whether capitalized names inside a sentence must be preserved.
        refusals: Lower-case beginnings of answers that refuse the request.
    """

    parts: Parts
    language: Literal["any", "captions"]
    max_tokens: int
    max_entropy: float
    keep_quotes: bool
    keep_names: bool
    refusals: tuple[str, ...]


class Drawing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters with the same fields as ``SamplingParams``."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float

    def params(self, *, max_tokens: int, seed: int) -> SamplingParams:
        """Convert to the text engine's sampling parameters.

        Raises:
            InvalidRequest: A value is out of range.
        """
        return SamplingParams(max_tokens=max_tokens, seed=seed, **msgspec.structs.asdict(self))


class Style(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A style file; ``first`` samples the first rewritten prompt of a request, ``further`` the others."""

    name: str
    prompt: PromptSide
    answer: AnswerSide
    first: Drawing
    further: Drawing

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a style file.

        Raises:
            ConfigError: The file cannot be read or is invalid; the message names the file, the key and the value.
        """
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"the style {str(path)!r} cannot be read: {error.strerror}.", param="style") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path.name} is not valid TOML: {error}.", param="style") from None
        _check_keys(path.name, tables)
        try:
            style = msgspec.convert({"name": path.stem, **tables}, cls)
        except msgspec.ValidationError as error:
            reason = str(error)[0].lower() + str(error)[1:]
            raise ConfigError(f"{path.name}: {reason.replace('$.', '')}.", param="style") from None
        _check_values(path.name, style)
        return style


def style_names() -> tuple[str, ...]:
    """Return the names of all style files."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


def load_style(name: str) -> Style:
    """Load the style ``name``.

    Raises:
        InvalidRequest: There is no such style.
        ConfigError: The style's file is invalid.
    """
    names = style_names()
    if name not in names:  # also prevents path traversal
        raise InvalidRequest(f"style is {name!r}; choose one of {', '.join(names)}.", param="style")
    return Style.read(_folder() / f"{name}.toml")


def style_for_family(family: str) -> str:
    """Return the name of the default style for an image model of ``family``."""
    return STYLE_OF_FAMILY.get(family, "prose")


def _folder() -> Path:
    return configs_dir() / "rewriter"


def _check_keys(file: str, tables: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown key, with the closest known name."""
    tables_by_name = {field.name: field.type for field in msgspec.structs.fields(Style) if field.name != "name"}
    for table, entries in tables.items():
        if table not in tables_by_name:
            raise ConfigError(f"{file}: unknown table [{table}]; {nearest(table, tables_by_name)}", param="style")
        keys = [field.name for field in msgspec.structs.fields(tables_by_name[table])]
        for key in entries if isinstance(entries, dict) else ():
            if key not in keys:
                raise ConfigError(f"{file}: unknown key {table}.{key}; {nearest(key, keys)}", param="style")


def _check_values(file: str, style: Style) -> None:
    answer = style.answer
    for name, value in (
        ("answer.max_tokens", answer.max_tokens),
        ("answer.max_entropy", answer.max_entropy),
        ("prompt.words_per_token", style.prompt.words_per_token),
    ):
        if not value > 0:
            raise ConfigError(f"{file}: {name} is {value}; it must be above 0.", param="style")
    for table, drawing in (("first", style.first), ("further", style.further)):
        try:
            drawing.params(max_tokens=answer.max_tokens, seed=0)
        except InvalidRequest as error:
            raise ConfigError(f"{file}: {table}.{error.message}", param="style") from None
    if any(phrase != phrase.lower().strip() or not phrase for phrase in answer.refusals):
        raise ConfigError(
            f"{file}: answer.refusals must be in lower case, without leading or trailing spaces.", param="style"
        )


EMBEDDED: Final = "embedded"
DIRECTORY: Final = Path(__file__).resolve().parents[1] / "embedded" / "rewriter"
"""Directory of the embedded rewriter, which ``diffserve.training.train rewriter`` trains."""


def find_rewriter(name: str) -> Path:
    """Return the directory of the language model ``name``, which is "embedded" or a path.

    Raises:
        ModelNotFound: There is no model at that place.
    """
    directory = DIRECTORY if name == EMBEDDED else Path(name).expanduser()
    if (directory / "config.json").is_file():
        return directory
    if name == EMBEDDED:
        raise ModelNotFound(
            "the embedded rewriter has no weights in this installation: train them with "
            "'python -m diffserve.training.train rewriter', or give the directory of an instruct model.",
            param="model",
        )
    raise ModelNotFound(
        f"no language model at {name!r}: give the directory of an instruct model, as transformers writes it "
        '(config.json, safetensors and a tokenizer with a chat template), or "embedded".',
        param="model",
    )
