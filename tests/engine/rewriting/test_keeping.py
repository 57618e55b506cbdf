"""What of a wish must come through: quoted texts and names, and nothing else."""

from __future__ import annotations

import pytest

from diffserve.rewriting.cleaning import find_lost, find_names, find_quotes


@pytest.mark.parametrize(
    ("wish", "texts"),
    [
        ('a sign that says "Open 24h"', ("Open 24h",)),
        ("a sign that says 'Fresh bread, daily'", ("Fresh bread, daily",)),
        ("a sign that says “Zum Bären” and one with „Hof“", ("Zum Bären", "Hof")),
        ("«Chez Marie» over the door", ("Chez Marie",)),
        ("the words ‘don’t panic’ in big friendly letters", ("don't panic",)),
        ("'don't panic'", ("don't panic",)),
        ('"Hello," she said, "Hello"', ("Hello",)),
        ("the dog's bone and the cats' bowl", ()),
        ("rabbit's favourite, I'd say", ()),
        ('a 12" pizza beside a 14" one', ()),
        ('an open quote "that never ends', ()),
        ('""', ()),
        ("rock 'n' roll", ("n",)),
        ("", ()),
    ],
)
def test_texts_in_quotation_marks_are_found(wish: str, texts: tuple[str, ...]) -> None:
    assert find_quotes(wish) == texts


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        ("portrait of Ada Lovelace in Paris", ("Ada", "Lovelace", "Paris")),
        ("A cat. Make the background green. I want it blue", ()),
        ("Ada's cat and Émile's dog in Zürich", ("Émile", "Zürich")),
        ("a HUGE cat ON A RED background", ()),
        ("A Cat In The Snow With A Dog", ()),
        ("I'd love what I've seen: Rome", ()),
        ("I'd love to see Rome", ("Rome",)),
        ('a sign "Open Now" in Rome', ("Rome",)),
        ("jean-luc with Jean-Luc", ("Jean-Luc",)),
        ("x A y B z", ()),
        ("", ()),
    ],
)
def test_names_are_capitalised_inside_a_sentence_of_small_words(wish: str, names: tuple[str, ...]) -> None:
    assert find_names(wish) == names


@pytest.mark.parametrize(
    ("prompt", "missing"),
    [
        ('ADA LOVELACE beside a sign saying "Open"', ()),
        ("ada lovelace's desk, a sign saying Open", ()),
        ('ada lovelace, a sign saying "open"', ("Open",)),
        ('adam lovelaces, "Open"', ("Ada", "Lovelace")),
        ("", ("Open", "Ada", "Lovelace")),
    ],
)
def test_quotes_are_kept_to_the_letter_and_names_as_whole_words(prompt: str, missing: tuple[str, ...]) -> None:
    assert find_lost(prompt, ("Open",), ("Ada", "Lovelace")) == missing


def test_apostrophes_and_blanks_of_any_kind_are_the_same() -> None:
    assert find_lost("a sign: don’t  panic", find_quotes('"don\'t panic"'), ()) == ()


def test_a_wish_of_a_million_characters_is_read_in_one_go() -> None:
    assert find_names("a Cat " * 200_000) == ("Cat",)
    assert find_quotes("'" * 100_000) == find_quotes('"' * 100_001) == find_quotes("“" * 100_000) == ()
