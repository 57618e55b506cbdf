"""Facts in files of a model's directory: its closed vocabulary, and the steps that samplers need.

``world.json`` has the words that a model was trained on; models without it have an open vocabulary.
``fewest_steps.json`` is written by ``python -m diffserve.training.fewest_steps``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from diffserve.api.errors import ModelLoadError
from diffserve.api.prompt_schedule import without_areas
from diffserve.api.prompt_syntax import encoded_text

ContentT = TypeVar("ContentT")

WORLD_FILE = "world.json"
EMBEDDED_DIRECTORY: Final = Path(__file__).resolve().parents[1] / "embedded" / "weights"
"""Directory of the model that is part of the package."""

MOST_NAMED = 6
_WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s\x00-\x7f]")
_PICTOGRAM = "So"  # Unicode category "Symbol, other", which includes emoji


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Closed vocabulary of a model.

    Attributes:
        objects, places, colors: Names as in the training captions, in display order.
        words: All words of the training captions, in lower case.
    """

    objects: tuple[str, ...]
    places: tuple[str, ...]
    colors: tuple[str, ...]
    words: tuple[str, ...]

    def unknown_words(self, prompt: str) -> tuple[str, ...]:
        """Return the words of ``prompt`` that are not in the vocabulary."""
        return unknown_words(prompt, self.words)

    def learning(self, names: Iterable[str]) -> Vocabulary:
        """Return a copy that also contains the words of ``names``, such as those of textual inversions."""
        added = (word for name in names for word in _WORD.findall(name.lower()))
        return msgspec.structs.replace(self, words=tuple(dict.fromkeys((*self.words, *added))))


def unknown_words(prompt: str, words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of ``prompt`` that reach the text encoder and are not in ``words``.

    Returns:
        Unique words in lower case; an emoji counts as a word.

    Raises:
        InvalidRequest: A weight in ``prompt`` is out of bounds.
    """
    known_words = set(words)
    return tuple(
        word
        for word in dict.fromkeys(_WORD.findall(encoded_text(without_areas(prompt)).lower().replace("_", " ")))
        if (word[0].isalnum() or unicodedata.category(word[0]) == _PICTOGRAM)
        and word not in known_words
        and not known_words.issuperset(word.split("-"))
    )


def read_vocabulary(directory: Path) -> Vocabulary | None:
    """Read ``world.json`` in ``directory``; ``None`` if there is no such file.

    Raises:
        ModelLoadError: The file cannot be read.
    """
    return read_model_file(directory / WORLD_FILE, Vocabulary)


def knows_embedded_world(directory: Path) -> bool:
    """Return whether the model in ``directory`` has the vocabulary of the embedded model.

    This applies to copies of the embedded model, pruned copies, and models trained with the same recipe.

    Raises:
        ModelLoadError: The vocabulary cannot be read.
    """
    return read_vocabulary(directory) == read_vocabulary(EMBEDDED_DIRECTORY)


def read_model_file(file: Path, kind: type[ContentT]) -> ContentT | None:
    """Read a JSON file of a model directory as ``kind``; ``None`` if there is no such file.

    Raises:
        ModelLoadError: The file cannot be read.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}; fix or remove the file.") from None


def warn_of_unknown(model_id: str, words: tuple[str, ...], *, negative: bool = False) -> str:
    """Return the warning that ``model_id`` does not know ``words`` of the prompt.

    Args:
        model_id: Name of the model.
        words: The unknown words.
        negative: Whether the words are from the negative prompt.
    """
    listed = ", ".join(repr(word[:40]) for word in words[:MOST_NAMED])
    ending = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    effect = "so it has no effect" if len(words) == 1 else "so they have no effect"
    if negative:
        return f"{model_id} does not know {listed}{ending} of the negative prompt, {effect}."
    return f"{model_id} does not know {listed}{ending}, {effect}; use prompt rewriting or other words."


FEWEST_STEPS_FILE = "fewest_steps.json"


class FewestSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured minimum number of steps of each sampler on one model.

    Attributes:
        digest: Digest of the model.
        max_steps: Highest number of steps that was measured.
        steps: Minimum number of steps for correct images, by sampler and optional sigma schedule ("dpmpp_2m karras");
            ``None`` if no measured number is sufficient.
    """

    digest: str
    max_steps: int = msgspec.field(name="most")
    steps: dict[str, int | None]

    def warning(self, sampler: str, sigma_schedule: str | None, num_steps: int) -> str | None:
        """Return a warning if ``num_steps`` are too few; ``None`` if they are sufficient or not measured."""
        name = f"{sampler} {sigma_schedule}" if sigma_schedule else sampler
        if name not in self.steps or num_steps > self.max_steps:
            return None
        fewest = self.steps[name]
        if fewest is None:
            return (
                f"{name} gives no correct images with this model at up to {self.max_steps} steps; use another sampler."
            )
        if num_steps < fewest:
            count = f"1 step of {name} is" if num_steps == 1 else f"{num_steps} steps of {name} are"
            return f"{count} too few for this model; use at least {fewest}."
        return None


def read_fewest_steps(directory: Path) -> FewestSteps | None:
    """Read ``fewest_steps.json`` in ``directory``; ``None`` if there is no such file.

    Raises:
        ModelLoadError: The file cannot be read.
    """
    return read_model_file(directory / FEWEST_STEPS_FILE, FewestSteps)
