"""The world of a model that knows a closed one: what it can paint, and every word that it was taught.

``world.json`` in a model's directory says it; a model without such a file was taught more words than can be listed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from diffserve.api.errors import ModelLoadError
from diffserve.api.prompt_syntax import encoded_text

Told = TypeVar("Told")

WORLD_FILE = "world.json"
EMBEDDED_DIRECTORY: Final = Path(__file__).resolve().parents[1] / "embedded" / "weights"
"""Of the model that ships inside."""

MOST_NAMED = 6
_WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s\x00-\x7f]")
_PICTOGRAM = "So"  # the Unicode category of what is neither letter nor punctuation: emoji and the like


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be asked for.

    objects, places, colors   as a caption names them, in the order in which people may be shown them
    words                     every word of every caption, in lower case
    """

    objects: tuple[str, ...]
    places: tuple[str, ...]
    colors: tuple[str, ...]
    words: tuple[str, ...]

    def unknown_words(self, prompt: str) -> tuple[str, ...]:
        """Those of ``prompt`` that the model was never taught."""
        return unknown_words(prompt, self.words)

    def learning(self, names: Iterable[str]) -> Vocabulary:
        """The same with the words of ``names``, which were learnt besides."""
        learnt = (word for name in names for word in _WORD.findall(name.lower()))
        return msgspec.structs.replace(self, words=tuple(dict.fromkeys((*self.words, *learnt))))


def unknown_words(prompt: str, words: Iterable[str]) -> tuple[str, ...]:
    """Return what the text encoder gets of ``prompt`` and is not among ``words``.

    Words are in lower case, each once; an emoji is a word.

    Raises:
        InvalidRequest: A weight in ``prompt`` is out of bounds.
    """
    known = set(words)
    return tuple(
        word
        for word in dict.fromkeys(_WORD.findall(encoded_text(prompt).lower().replace("_", " ")))
        if (word[0].isalnum() or unicodedata.category(word[0]) == _PICTOGRAM)
        and word not in known
        and not known.issuperset(word.split("-"))
    )


def read_vocabulary(directory: Path) -> Vocabulary | None:
    """What ``world.json`` in ``directory`` says; ``None`` where there is none. Raises ModelLoadError."""
    return read_beside(directory / WORLD_FILE, Vocabulary)


def knows_embedded_world(directory: Path) -> bool:
    """Whether the model in ``directory`` says that it paints the world of the embedded one: that is what a copy of it
    has in common with it, whole or pruned, and one that was trained by its recipe. Raises ModelLoadError."""
    return read_vocabulary(directory) == read_vocabulary(EMBEDDED_DIRECTORY)


def read_beside(file: Path, kind: type[Told]) -> Told | None:
    """What a ``file`` beside the weights says; ``None`` where there is none. Raises ModelLoadError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}; mend or remove the file.") from None


def warn_of_unknown(model_id: str, words: tuple[str, ...], *, negative: bool = False) -> str:
    """The warning about ``words`` of the prompt, or of the ``negative`` one, that ``model_id`` does not know."""
    named = ", ".join(repr(word[:40]) for word in words[:MOST_NAMED])
    more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    if negative:
        return f"{model_id} was never taught {named}{more} of the negative prompt, and cannot keep that out."
    return f"{model_id} was never taught {named}{more}, and paints without; have the prompt rewritten into its words."
