"""Allowed words: masks, states and forced tokens, with tokenizers of every kind."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

import pytest
import torch

from diffserve.api.errors import ConfigError
from diffserve.api.sampling_params import SamplingParams
from diffserve.runtime.decoding import (
    Choice,
    Phrase,
    SamplingState,
    TokenConstraint,
    allowed_sentences,
    choose,
)
from diffserve.runtime.decoding import constraint as constraint_module
from diffserve.runtime.decoding.constraint import DEAD, Arc
from tests.runtime.decoding.tiny_tokenizers import KINDS, say, spell, tiny_tokenizer
from tests.runtime.decoding.word_constraints import allowed_words, word_constraint

WORDS = ("a", "red", "cat", "dog", "fox", "sun", "sunny", "on", "the", "next to", "café")
MARKS = (",", "'s")
END = 9


def state_after(constraint: TokenConstraint, token_ids: Sequence[int]) -> int:
    state = constraint.start
    for token_id in token_ids:
        state = constraint.advance(state, token_id)
    return state


def words_of(kind: str) -> TokenConstraint:
    tokenizer = tiny_tokenizer(kind)
    return allowed_words(tokenizer, WORDS, attached=MARKS, end_ids=[tokenizer.eos_token_id])


def read(kind: str, text: str) -> list[str]:
    """Return the words of ``text``; fail if it has anything but words, single spaces between them, and marks."""
    gap = " " if kind == "clip" else ""  # CLIP's decoder puts a space before everything
    word = f"(?:{'|'.join(map(re.escape, WORDS))})(?:{gap}(?:{'|'.join(map(re.escape, MARKS))}))*"
    word = word.replace("'s", "' ?s") if kind == "clip" else word
    assert re.fullmatch(f"{word}(?: {word})*", text), text
    return re.findall("|".join(sorted(WORDS, key=len, reverse=True)), text)


def test_the_mask_is_the_set_of_tokens_that_continue_some_text() -> None:
    words = [[1], [1, 2], [2, 1, 1], [3, 2]]  # [1] begins [1, 2], and [1][2, 1, 1] begins like [1, 2][1][1]
    constraint = word_constraint(words, words, end_ids=[END])
    texts = {
        tuple(itertools.chain(*combination, [END]))
        for count in range(1, 6)
        for combination in itertools.product(words, repeat=count)
    }
    prefixes = {text[:length] for text in texts for length in range(5)}
    for prefix in prefixes:
        state = state_after(constraint, prefix)
        expected = {text[len(prefix)] for text in texts if text[: len(prefix)] == prefix and len(text) > len(prefix)}
        assert set(constraint.mask(state, 10).nonzero().flatten().tolist()) == expected
        assert constraint.may_end(state) == (END in expected)
    visited = len(constraint._sets)
    state_after(constraint, [1, 2, 1, 1, 3, 2, 1, 1, 2] * 20)
    assert len(constraint._sets) == visited < len(prefixes)


def test_first_words_and_later_words_are_spelled_apart() -> None:
    constraint = word_constraint([[1], [2]], [[11], [12, 13]], end_ids=[END])
    assert set(constraint.moves(constraint.start)) == {1, 2}
    assert set(constraint.moves(state_after(constraint, [1]))) == {11, 12, END}
    assert set(constraint.moves(state_after(constraint, [1, 12]))) == {13}
    assert state_after(constraint, [1, 2]) == DEAD == constraint.advance(DEAD, 1)
    assert not constraint.mask(DEAD, 20).any()
    assert not constraint.mask(state_after(constraint, [1, END]), 20).any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_of_the_words_is_allowed_as_the_tokenizer_spells_it(kind: str) -> None:
    tokenizer, constraint, chance = tiny_tokenizer(kind), words_of(kind), random.Random(1)
    for _ in range(60):
        words = chance.choices(WORDS, k=chance.randint(1, 6))
        text = " ".join(word + chance.choice(["", "", *MARKS]) for word in words)
        state = state_after(constraint, spell(tokenizer, text))
        assert constraint.may_end(state), text


@pytest.mark.parametrize("kind", KINDS)
def test_constrained_text_is_made_of_the_words(kind: str) -> None:
    tokenizer, constraint = tiny_tokenizer(kind), words_of(kind)
    vocab_size, token_ids = len(tokenizer), set()
    rows = [
        SamplingState(
            SamplingParams(temperature=temperature, seed=seed, max_tokens=30),
            [1],
            end_ids=[tokenizer.eos_token_id],
            constraint=constraint,
        )
        for seed, temperature in enumerate([1.0] * 30 + [0.0] * 3)
    ]
    for step in range(30):
        alive = [row for row in rows if row.finish_reason is None]
        logits = torch.randn(len(alive), vocab_size, generator=torch.Generator().manual_seed(step))
        for row, choice in zip(alive, choose(logits, alive), strict=True):
            assert isinstance(choice, Choice)
            row.append(choice.token_id)
    for row in rows:
        if row.finish_reason == "stop":
            words = read(kind, say(tokenizer, row.output_ids))
            assert words
            token_ids.update(words)
    assert len(token_ids) > len(WORDS) // 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_several_answers_is_given_in_full(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    answers = ("the cat", "the dog sat", "a fox")
    phrases = [Phrase("start", answer, "end") for answer in answers]
    ends = {"ends": ["end"], "end_ids": [tokenizer.eos_token_id]}
    constraint = allowed_sentences(tokenizer, phrases, start="start", **ends)
    for answer in answers:
        row = SamplingState(SamplingParams(temperature=0), [1], constraint=constraint, end_ids=[tokenizer.eos_token_id])
        logits = torch.zeros(1, len(tokenizer))
        logits[0, spell(tokenizer, answer)] = 5.0
        while row.finish_reason is None:
            (choice,) = choose(logits, [row])
            assert isinstance(choice, Choice)
            row.append(choice.token_id)
        assert say(tokenizer, row.output_ids) in answers
        assert row.finish_reason == "stop"
    assert set(constraint.moves(state_after(constraint, spell(tokenizer, "the cat")))) == {tokenizer.eos_token_id}


def test_tokens_without_an_alternative_are_forced() -> None:
    constraint = word_constraint([[1, 2, 3, 4], [5]], end_ids=[END])
    after_one = state_after(constraint, [1])
    assert constraint.forced(constraint.start, 5) == []
    assert constraint.forced(after_one, 2) == [2, 3]
    assert constraint.forced(after_one, 10) == [2, 3, 4, END]


def test_a_draft_is_cut_where_it_leaves_the_words() -> None:
    constraint = word_constraint([[1, 2], [5]], [[1, 2], [5]], end_ids=[END])
    row = SamplingState(SamplingParams(), [7], end_ids=[END], constraint=constraint)
    assert row.crop([1, 2, 5, 6, 1]) == [1, 2, 5]
    assert row.crop([2, 5]) == []
    assert row.crop([5, END, 5]) == [5, END]


def test_the_least_length_gives_way_when_only_the_end_is_allowed() -> None:
    constraint = word_constraint([[1]], end_ids=[END])
    row = SamplingState(SamplingParams(temperature=0, min_tokens=5), [7], end_ids=[END], constraint=constraint)
    outputs = []
    while row.finish_reason is None:
        (choice,) = choose(torch.zeros(1, 10), [row])
        assert isinstance(choice, Choice)
        outputs.append(choice.token_id)
        row.append(choice.token_id)
    assert outputs == [1, END]


def test_the_least_length_holds_where_there_is_more_to_say() -> None:
    constraint = word_constraint([[1]], [[1]], end_ids=[END])
    row = SamplingState(SamplingParams(temperature=0, min_tokens=2), [7], end_ids=[END], constraint=constraint)
    assert row.allowed(10).nonzero().flatten().tolist() == [1]
    row.append(1)
    assert row.allowed(10).nonzero().flatten().tolist() == [1]
    row.append(1)
    assert row.allowed(10).nonzero().flatten().tolist() == [1, END]


def test_masks_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_module, "KEPT_MASK_BYTES", 25)
    constraint = word_constraint([[1, 2, 3, 4]], end_ids=[END])
    assert constraint.mask(constraint.start, 10) is constraint.mask(constraint.start, 10)
    states = [state_after(constraint, [1, 2, 3][:count]) for count in range(4)]
    masks = [constraint.mask(state, 10) for state in states]
    assert constraint.mask(states[3], 10) is masks[3]
    assert constraint.mask(states[0], 10) is not masks[0]
    assert torch.equal(constraint.mask(states[0], 10), masks[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [(("cat", "  "), "cannot spell '  '"), (("cat", ""), "cannot spell ''")],
)
def test_words_outside_the_language_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        allowed_words(tiny_tokenizer("byte_level"), words, end_ids=[0])


def test_a_mark_that_melts_into_the_word_before_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="joins 'ny' to the word before it"):
        constraint_module._spell_after(tiny_tokenizer("clip"), ["sun"], "ny")


def test_a_constraint_with_an_empty_word_or_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="an end token"):
        word_constraint([[1]], end_ids=[])
    with pytest.raises(ConfigError, match="no tokens"):
        word_constraint([[1], []], end_ids=[END])


PHRASES = (
    Phrase("start", "a cat", "thing"),
    Phrase("start", "the dog", "thing"),
    Phrase("thing", "and", "more"),
    Phrase("thing", ",", "more"),
    Phrase("more", "a fox", "thing"),
    Phrase("more", "the sun", "thing"),
    Phrase("thing", "on the mat", "place"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_follow_the_phrases_of_a_graph_and_end_where_it_ends(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    end = tokenizer.eos_token_id
    constraint = allowed_sentences(tokenizer, PHRASES, start="start", ends=["thing", "place"], end_ids=[end])
    for text in ("a cat", "the dog on the mat", "a cat and a fox", "the dog, the sun and a fox on the mat"):
        assert constraint.may_end(state_after(constraint, spell(tokenizer, text))), text
    for text in ("the dog and", "a cat on the mat and a fox", "a fox", "and a cat", "a cat a fox", "a cat on"):
        assert not constraint.may_end(state_after(constraint, spell(tokenizer, text))), text


def test_a_graph_says_what_leads_on_and_what_is_forced() -> None:
    arcs = [Arc("a", [1, 2], "b"), Arc("a", [1, 3], "c"), Arc("b", [4], "c"), Arc("c", [5], "a")]
    constraint = TokenConstraint(arcs, start="a", ends=["c"], end_ids=[END])
    assert constraint.forced(constraint.start, 5) == [1]
    assert set(constraint.moves(state_after(constraint, [1]))) == {2, 3}
    assert constraint.forced(state_after(constraint, [1, 2]), 5) == [4]
    assert set(constraint.moves(state_after(constraint, [1, 3]))) == {5, END}
    assert state_after(constraint, [1, 3, 5]) == constraint.start


def test_a_graph_with_a_dead_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing can follow 'b'"):
        TokenConstraint([Arc("a", [1], "b")], start="a", ends=["c"], end_ids=[END])
    with pytest.raises(ConfigError, match="nothing can follow 'a'"):
        TokenConstraint([], start="a", ends=["c"], end_ids=[END])


def test_what_followed_in_most_observed_texts_is_usual() -> None:
    constraint = word_constraint([[1], [2]], [[3], [4], [5]], end_ids=[END])
    assert constraint.usual(constraint.start) is None
    constraint.observe([[1, 3, END], [1, 3, 3, END], [2, 4, END], [1, 5, END]])
    assert constraint.usual(constraint.start) == 1
    after_one = state_after(constraint, [1])
    assert constraint.usual(after_one) is None, "the end came four times of nine, 3 three times"
    assert constraint.usual(DEAD) is None
