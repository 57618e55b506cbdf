"""Differences between a wish and a prompt by words."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ui.create.rewriting import MAX_CHARS, MAX_WORDS, WordRun, _words, difference, difference_html

TEXTS = st.text(alphabet=st.sampled_from("ab ,.<&é'-\n"), max_size=40)


def words(pieces: tuple[WordRun, ...], without: str) -> str:
    return "".join("".join(piece.text for piece in pieces if piece.kind != without).split())


@given(TEXTS, TEXTS)
def test_no_word_is_lost_or_invented(old: str, new: str) -> None:
    pieces = difference(old, new)
    assert words(pieces, "added") == "".join(old.split())
    assert words(pieces, "removed") == "".join(new.split())


@given(TEXTS, TEXTS)
def test_changes_are_marked(old: str, new: str) -> None:
    has_changed = any(piece.kind != "same" for piece in difference(old, new))
    assert ("<ins>" in difference_html(old, new) or "<del>" in difference_html(old, new)) == has_changed


@given(TEXTS)
def test_a_text_does_not_differ_from_itself(text: str) -> None:
    assert {piece.kind for piece in difference(text, text)} <= {"same"}


@given(TEXTS, TEXTS)
def test_adjacent_pieces_differ_in_kind(old: str, new: str) -> None:
    kinds = [piece.kind for piece in difference(old, new)]
    assert all(kind != other for kind, other in itertools.pairwise(kinds))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("2 doggos on teh beach", "two dogs on the beach", "-2 doggos |+two dogs |=on |-teh |+the |=beach"),
        ("a cat", "a cat, at night", "=a cat|+, at night"),
        ("a red cat", "a cat", "=a |-red |=cat"),
        ("cat", "dog", "-cat |+dog"),
        ("", "an owl", "+an owl"),
        ("an owl", "", "-an owl"),
        ("", "", ""),
    ],
)
def test_words_are_compared_individually(old: str, new: str, expected: str) -> None:
    marks = {"same": "=", "added": "+", "removed": "-"}
    assert "|".join(marks[piece.kind] + piece.text for piece in difference(old, new)) == expected


def test_markup_in_a_text_is_escaped() -> None:
    shown = difference_html("<b>a</b> & b", "<script>alert(1)</script> & b")
    assert "<b>" not in shown
    assert "<script>" not in shown
    assert "&lt;" in shown
    assert "&amp;" in shown


def test_very_long_texts_are_not_compared_by_words() -> None:
    old, new = "a " * (MAX_WORDS + 1), "b " * (MAX_WORDS + 1)
    assert difference(old, new) == (WordRun("removed", old), WordRun("added", new))


@pytest.mark.parametrize("text", ["a " * MAX_CHARS, "x" * 10 * MAX_CHARS])
def test_a_text_that_is_too_long_is_not_even_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ui.create.rewriting._WORDS", None)
    assert difference("a fox", text) == (WordRun("removed", "a fox"), WordRun("added", text))
    assert difference(text, text) == (WordRun("same", text),)


def test_splitting_stops_at_the_word_limit() -> None:
    pieces = _words("a " * (MAX_WORDS + 500))
    assert len(pieces) == MAX_WORDS + 1
