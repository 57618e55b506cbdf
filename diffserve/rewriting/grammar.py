"""Grammar of the embedded image model's captions, as a constraint on the rewriter's output.

The canonical captions form a small graph of phrases. ::

                                   .- left of, above ... -> (other) -- noun --.
    (start) -- noun --> (thing) ---+- "between" or "," -> (pair) -- noun --> (and) -- "and" --> (other)
       |                           '------------- place ------------------.   |
       '-- sized noun, number and plural --> (all) <----------------------+---'
                                               '-------- place --------> (caption)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any, Final

from diffserve.runtime.decoding import Phrase, TokenConstraint, allowed_sentences
from diffserve.world.captions import (
    INVERSE,
    NUMBER_WORDS,
    RELATION_WORDS,
    Content,
    noun,
    plural,
    sentence,
    words_of_background,
)
from diffserve.world.scenes import BACKGROUNDS, OBJECTS, SIZES_PX, scenes

START, THING, OTHER, PAIR, AND, ALL, CAPTION = "start", "thing", "other", "pair", "and", "all", "caption"
PLAIN: Final = "plain"
NUM_SAMPLE_CAPTIONS: Final = 400
SAMPLE_SEED: Final = 5


def caption_phrases() -> Iterator[Phrase]:
    """Yield every phrase of the canonical captions with the node before it and the node after it."""
    for name in OBJECTS:
        yield Phrase(START, noun(name), THING)
        yield Phrase(OTHER, noun(name), ALL)
        yield Phrase(PAIR, noun(name), AND)
        yield from (Phrase(START, noun(name, size), ALL) for size in SIZES_PX if size != PLAIN)
        yield from (Phrase(START, f"{words[0]} {plural(name)}", ALL) for words in NUMBER_WORDS.values())
    for relation in INVERSE:
        yield Phrase(THING, RELATION_WORDS[relation][0].removeprefix("{a} ").removesuffix(" {b}"), OTHER)
    yield from (Phrase(THING, together, PAIR) for together in ("between", ","))
    yield Phrase(AND, "and", OTHER)
    yield from (Phrase(node, words_of_background(place), CAPTION) for place in BACKGROUNDS for node in (THING, ALL))


def caption_constraint(tokenizer: Any, end_ids: Collection[int]) -> TokenConstraint:
    """Build a constraint that allows only canonical captions.

    The constraint is trained on sample captions, so that speculative drafts follow frequent phrases.

    Args:
        tokenizer: Tokenizer of the language model.
        end_ids: Token ids that may end an answer.

    Raises:
        ConfigError: The tokenizer cannot encode the captions.
    """
    constraint = allowed_sentences(tokenizer, caption_phrases(), start=START, ends=[CAPTION], end_ids=end_ids)
    captions = [
        sentence(Content.by(scene)) for scene in islice(scenes(SAMPLE_SEED, held_out=False), NUM_SAMPLE_CAPTIONS)
    ]
    spelled = tokenizer(captions, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    constraint.observe([*ids, end_id] for ids in spelled for end_id in sorted(end_ids)[:1])
    return constraint
