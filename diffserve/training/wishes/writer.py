"""Writes the content of a scene as a wish: a loose sentence, a list of tags, or another language."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence

from diffserve.training.wishes.words import (
    Phrases,
    colors_for,
    countable_names,
    languages,
    many,
    names_for,
    sentences,
    words,
)
from diffserve.world.captions import COLOR_WORDS, MASSES, PLACE_WORDS, PLURALS, UNIQUE, Content, article_for, plural
from diffserve.world.scenes import COLORS

ARTICLES = ("the", "my", "one", "this", "some", "our")


def is_kept_combination(parts: Sequence[str]) -> bool:
    """Whether this combination of words (of objects and background) is held out from training: a tenth of all."""
    return len(parts) > 1 and zlib.crc32("|".join(parts).encode()) % 10 == 0


class Writer:
    """Random writer of wishes that uses the training phrases or the held-out phrases."""

    def __init__(self, rng: random.Random, *, held_out: bool) -> None:
        self.rng, self.held_out = rng, held_out

    def pick(self, wordings: Phrases) -> str:
        """Pick one wording of this writer's side."""
        return self.rng.choice(wordings.side(held_out=self.held_out))

    def chance(self, share: float) -> bool:
        """Return True with probability ``share``."""
        return self.rng.random() < share

    # Parts of a wish

    def name(self, name: str, options: tuple[str, ...] | None = None) -> str:
        """Pick a wording of an object: its own name in a third of all cases; a leading "*" means no article."""
        options = options or names_for(name)
        return options[0] if self.chance(0.3) else self.rng.choice(options)

    def noun(self, name: str, wording: str, size: str = "plain") -> str:
        """Write an object with article, size and words that a caption omits: "my cute little kitty-cat"."""
        colors = words().natural_colors.get(name, ())
        parts = [self.rng.choice(words().adjectives)] if self.chance(0.18) else []
        parts += [self.rng.choice(words().sizes[size])] if size in words().sizes else []
        parts += [self.rng.choice(colors)] if colors and self.chance(0.05) else []
        self.rng.shuffle(parts)
        return self._with_article(name, " ".join([*parts, wording.removeprefix("*")]), bare=wording.startswith("*"))

    def _with_article(self, name: str, phrase: str, *, bare: bool) -> str:
        if bare or (name in PLURALS and phrase.endswith(name)) or (name in MASSES and self.chance(0.5)):
            return phrase
        if name in UNIQUE and self.chance(0.6):
            return f"the {phrase}"
        style = self.rng.random()
        if style < 0.12:
            return phrase
        return f"{self.rng.choice(ARTICLES) if style < 0.24 else article_for(phrase)} {phrase}"

    def where(self, background: str) -> str:
        """Write a phrase for the background."""
        if background not in COLORS:
            phrases = PLACE_WORDS[background]
            return self.rng.choice(phrases if self.chance(0.35) else words().places[background])
        if self.chance(0.12):
            return self.rng.choice(words().color_associations[background])
        colors = colors_for(background)
        color = background if self.chance(0.4) else self.rng.choice(colors)
        pattern = self.rng.choice(COLOR_WORDS if self.chance(0.25) else words().color_phrases)
        return re.sub(r"\ba (?=[aeiou])", "an ", pattern.format(color))

    def objects(self, content: Content) -> tuple[str, list[str]]:
        """Write a phrase for the objects; also return the bare wordings in it."""
        if len(content.names) > 1 and len(set(content.names)) == 1:
            return self._count(content.names[0], len(content.names))
        bare = [self.name(name) for name in content.names]
        nouns = [self.noun(*pair, content.size) for pair in zip(content.names, bare, strict=True)]
        if len(nouns) == 1:
            return nouns[0], bare
        pattern = self.pick(
            sentences().together if content.relation is None else sentences().relations[content.relation]
        )
        return pattern.format(**dict(zip("abc", nouns, strict=False))), bare

    def _count(self, name: str, count: int) -> tuple[str, list[str]]:
        word = self.name(name, countable_names(name))
        pattern = self.pick(sentences().counts[count])
        while name in PLURALS and "bunch" in pattern:
            pattern = self.pick(sentences().counts[count])
        adjective = f"{self.rng.choice(words().adjectives)} " if self.chance(0.12) else ""
        plurals = f"{adjective}{plural(name) if word == name else many(word)}"
        singular = f"{article_for(adjective or word)} {adjective}{word}"
        return pattern.format(n=plurals, a=singular, w=word), [word]

    # Complete wishes

    def uncommon(self, attempt: Callable[[], tuple[str, list[str]]]) -> str:
        """Return the first attempt whose combination of words belongs to this writer's side."""
        while True:
            text, parts = attempt()
            if len(parts) < 2 or is_kept_combination(parts) == self.held_out:
                return text

    def free(self, content: Content) -> str:
        """Write a complete wish as a loose sentence."""
        return self.uncommon(lambda: self._free(content))

    def _free(self, content: Content) -> tuple[str, list[str]]:
        what, bare = self.objects(content)
        where = self.where(content.background)
        verb = self.rng.choice(sentences().verbs)
        text = self.pick(sentences().frames).format(what=what, where=where, verb=verb)
        return self.around(text), [*bare, where]

    def around(self, text: str, *, always: bool = False) -> str:
        """Add an opening, a closing and quality words to ``text`` at random; a held-out writer always opens."""
        if always or self.held_out or self.chance(0.42):
            text = f"{self.pick(sentences().openings)} {text}"
        if self.chance(0.25):
            text = self.boost(text)
        return f"{text} {self.pick(sentences().closings)}" if self.chance(0.18) else text

    def boost(self, text: str) -> str:
        """Add one to four quality words before or after ``text``."""
        boosters = ", ".join(self.pick(sentences().boosters) for _ in range(self.rng.randint(1, 4)))
        return f"{boosters}, {text}" if self.chance(0.25) else f"{text}, {boosters}"

    def tags(self, content: Content) -> str:
        """Write a list of tags: objects, background, quality words."""
        return self.uncommon(lambda: self._tags(content))

    def _tags(self, content: Content) -> tuple[str, list[str]]:
        if len(content.names) > 1 and len(set(content.names)) == 1:
            things, bare = self._count(content.names[0], len(content.names))
        else:
            bare = [self.name(name).removeprefix("*") for name in content.names]
            size = f"{self.rng.choice(words().sizes[content.size])} " if content.size in words().sizes else ""
            things = ", ".join(f"{size}{word}" for word in bare)
        tag = self.where(content.background)
        if content.background not in COLORS:
            tag = self.rng.choice(words().tags[content.background])
        text = self.pick(sentences().tag_frames).format(things=things, tag=tag)
        return self.boost(text) if self.chance(0.6) else text, [*bare, tag]

    def foreign(self, content: Content) -> str | None:
        """Write the wish in another language; None if its vocabulary lacks a word."""
        vocabulary = languages()
        language = self.rng.choice(range(len(vocabulary.openings)))
        is_sayable = content.size == "plain" and len(set(content.names)) == len(content.names) < 3
        if (
            not is_sayable
            or not {*content.names} <= {*vocabulary.objects}
            or content.background not in vocabulary.backgrounds
        ):
            return None
        pattern = vocabulary.relations[content.relation][language] if content.relation else "{a}"
        what = pattern.format(
            **dict(zip("ab", (vocabulary.objects[name][language] for name in content.names), strict=False))
        )
        opening = self.rng.choice([*vocabulary.openings.values()][language])
        return f"{opening} {what} {vocabulary.backgrounds[content.background][language]}".strip()
