"""The embedded image model's language: the constraint allows every caption and nothing else."""

from __future__ import annotations

import random
import re
from itertools import islice
from typing import Any

import pytest

from diffserve.rewriting.grammar import caption_constraint
from diffserve.rewriting.judging import TextWindow
from diffserve.runtime.decoding import TokenConstraint
from diffserve.runtime.decoding.constraint import DEAD
from diffserve.runtime.loading.components import load_tokenizer
from diffserve.runtime.loading.family import BUILT_IN
from diffserve.world.captions import Content, noun, sentence
from diffserve.world.prompt_reading import parse_sentence
from diffserve.world.scenes import OBJECTS, scenes
from tests.runtime.language import tiny

CAPTIONS = [sentence(Content.by(scene)) for scene in islice(scenes(11, held_out=True), 400)]


def end_state(constraint: TokenConstraint, ids: list[int]) -> int:
    state = constraint.start
    for token_id in ids:
        state = constraint.advance(state, token_id)
    return state


@pytest.fixture(scope="module")
def image_tokenizer() -> Any:
    return load_tokenizer(BUILT_IN["embedded"] / "tokenizer")


@pytest.fixture(params=["bytes", "clip"])
def tokenizer(request: pytest.FixtureRequest, image_tokenizer: Any) -> Any:
    return tiny.make_tokenizer() if request.param == "bytes" else image_tokenizer


def test_the_constraint_allows_every_caption_and_no_other_text(tokenizer: Any) -> None:
    constraint = caption_constraint(tokenizer, [tokenizer.eos_token_id])
    for caption in CAPTIONS:
        state = end_state(constraint, tokenizer(caption, add_special_tokens=False).input_ids)
        assert constraint.may_end(state), caption
    for text in ("a unicorn", ", a cat", "a cat on", "a cat a dog", "two cat", "a cat above a dog, a fox in the snow"):
        state = end_state(constraint, tokenizer(text, add_special_tokens=False).input_ids)
        assert state == DEAD or not constraint.may_end(state), text


def test_random_constrained_text_is_a_caption(tokenizer: Any) -> None:
    constraint, chance = caption_constraint(tokenizer, [tokenizer.eos_token_id]), random.Random(3)
    kinds = set()
    for _ in range(300):
        ids: list[int] = []
        while tokenizer.eos_token_id not in ids:
            ids.append(chance.choice(sorted(constraint.moves(end_state(constraint, ids)))))
        text = tokenizer.decode(ids, skip_special_tokens=True).replace(" ,", ",").strip()
        sentence = parse_sentence(text)
        twice = any(len(re.findall(rf"\b{noun(name)}\b", text)) > 1 for name in OBJECTS)
        assert sentence is not None or twice, text  # the caption writer prefers "two cats" to "a cat above a cat"
        kinds.add(None if sentence is None else (len(sentence.names), sentence.relation, len(set(sentence.names)) > 1))
    assert {(1, None, False), (2, None, False), (3, None, False), (2, "above", True)} <= kinds


def test_what_has_no_alternative_is_known_beforehand(image_tokenizer: Any) -> None:
    constraint = caption_constraint(image_tokenizer, [image_tokenizer.eos_token_id])

    def forced(text: str) -> str:
        state = end_state(constraint, image_tokenizer(text, add_special_tokens=False).input_ids)
        return str(image_tokenizer.decode(constraint.forced(state, 8)))

    assert forced("a cat on an orange") == f"background {image_tokenizer.eos_token}"
    assert forced("a cat to") == "the"
    assert forced("a cat to the left") == "of"
    assert forced("two cats in the night") == f"sky {image_tokenizer.eos_token}"
    assert forced("a cat on") == ""


def test_every_caption_fits_the_image_models_window(image_tokenizer: Any) -> None:
    window = TextWindow.of_tokenizer(image_tokenizer, 32)
    assert window.num_tokens == 30
    assert all(window.fits(caption) for caption in CAPTIONS)
    assert not window.fits(" ".join(CAPTIONS[:6]))
