"""Style: how wishes become prompts of one kind, read from ``configs/rewriter/<name>.toml``, where every value stands.

A style says what the model is told, what an answer looks like and when it is not taken, and how tokens are drawn.
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
    """A wish and a prompt that grants it, said to the model before the real wish."""

    wish: str
    prompt: str


class PromptSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model is told.

    system           the system text; "{words}" becomes the number of words that fit the image model's text window
    words_per_token  English words in a token of the image model, to turn the window into that number
    """

    system: str
    words_per_token: float
    examples: tuple[Example, ...]

    def system_for(self, window_tokens: int) -> str:
        """The system text for an image model that reads ``window_tokens`` tokens of a prompt."""
        words = max(1, int(window_tokens * self.words_per_token))
        return self.system.replace("{words}", str(words)).strip()


class AnswerSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer looks like, and when it is not taken.

    parts        what may be dropped from the end of too long an answer: comma-separated "tags", "sentences", or
                 nothing ("whole")
    language     "captions": only canonical captions of the embedded image model may be said; "any": no limit
    max_tokens   an answer that has not ended by then is endless
    max_entropy  mean nats a token above which the model counts as unsure
    keep_quotes  whether text in quotation marks must come through letter by letter
    keep_names   whether capitalised names inside a sentence must come through
    refusals     beginnings of answers that decline, in lower case
    """

    parts: Parts
    language: Literal["any", "captions"]
    max_tokens: int
    max_entropy: float
    keep_quotes: bool
    keep_names: bool
    refusals: tuple[str, ...]


class Drawing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn; the fields mean what they mean in ``SamplingParams``."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float

    def params(self, *, max_tokens: int, seed: int) -> SamplingParams:
        """As the text engine takes them. Raises InvalidRequest for a value that cannot be."""
        return SamplingParams(max_tokens=max_tokens, seed=seed, **msgspec.structs.asdict(self))


class Style(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of ``configs/rewriter/``. ``first`` draws the first prompt of a wish, ``further`` all others."""

    name: str
    prompt: PromptSide
    answer: AnswerSide
    first: Drawing
    further: Drawing

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a style's file; raises ConfigError naming the file, the key and the value."""
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
    """Every style there is a file for."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


def load_style(name: str) -> Style:
    """The style ``name``; raises InvalidRequest naming those there are, ConfigError when its file is wrong."""
    known = style_names()
    if name not in known:  # also what keeps a name from being a path
        raise InvalidRequest(f"style is {name!r}; choose one of {', '.join(known)}.", param="style")
    return Style.read(_folder() / f"{name}.toml")


def style_for_family(family: str) -> str:
    """The name of the style whose prompts an image model of ``family`` reads best."""
    return STYLE_OF_FAMILY.get(family, "prose")


def _folder() -> Path:
    return configs_dir() / "rewriter"


def _check_keys(file: str, tables: Mapping[str, Any]) -> None:
    """A key that is not known is an error that names the nearest."""
    known = {field.name: field.type for field in msgspec.structs.fields(Style) if field.name != "name"}
    for table, entries in tables.items():
        if table not in known:
            raise ConfigError(f"{file}: unknown table [{table}]; {nearest(table, known)}", param="style")
        keys = [field.name for field in msgspec.structs.fields(known[table])]
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
        raise ConfigError(f"{file}: answer.refusals must be in lower case, without blanks around.", param="style")


EMBEDDED: Final = "embedded"
DIRECTORY: Final = Path(__file__).resolve().parents[1] / "embedded" / "rewriter"
"""The embedded rewriter, trained by ``diffserve.training.train rewriter``."""


def find_rewriter(name: str) -> Path:
    """The directory of the model called ``name``: "embedded", or a path. Raises ModelNotFound with the way out."""
    directory = DIRECTORY if name == EMBEDDED else Path(name).expanduser()
    if (directory / "config.json").is_file():
        return directory
    if name == EMBEDDED:
        raise ModelNotFound(
            "the rewriter that ships inside has no weights in this installation: train them with "
            "'python -m diffserve.training.train rewriter', or give the directory of an instruct model.",
            param="model",
        )
    raise ModelNotFound(
        f"no language model at {name!r}: give the directory of an instruct model, as transformers writes it "
        '(config.json, safetensors and a tokenizer with a chat template), or "embedded".',
        param="model",
    )
