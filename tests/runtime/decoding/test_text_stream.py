"""Text from tokens: what decoding at once gives, early, never half a character, never a piece of a stop text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffserve.runtime.decoding import TextStream
from diffserve.runtime.decoding.text_stream import PATIENCE_TOKENS, REPLACEMENT, StopStrings
from tests.runtime.decoding.tiny_tokenizers import KINDS, say, spell, tiny_tokenizer

TEXTS = (
    "a red cat on the mat",
    "the sunny cat, the fox's dog and  two spaces",
    "naïve 😀 café €5 猫 👩‍👩‍👧 end",
    "zzz qqq 42, 'quoted' -- dashes.\nnew line",
    "😀",
)


def stream(tokenizer: Any, ids: list[int], **options: Any) -> tuple[TextStream, list[str]]:
    """Return a stream after ``ids`` were pushed to it, and the piece that each push returned."""
    text_stream = TextStream(tokenizer, **options)
    return text_stream, [text_stream.push(token_id) for token_id in ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_what_decoding_at_once_gives(kind: str, text: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = spell(tokenizer, text)
    text_stream, pieces = stream(tokenizer, ids)
    assert all(REPLACEMENT not in piece for piece in pieces)
    assert "".join([*pieces, text_stream.finish()]) == text_stream.text == say(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_shown_as_soon_as_it_is_certain(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = spell(tokenizer, "a red cat é on")
    text_stream = TextStream(tokenizer)
    for count, token_id in enumerate(ids, start=1):
        text_stream.push(token_id)
        assert text_stream.text == say(tokenizer, ids[:count]).rstrip(REPLACEMENT) or say(
            tokenizer, ids[:count]
        ).endswith(REPLACEMENT)


@pytest.mark.parametrize("kind", KINDS)
def test_no_character_is_shown_before_its_last_byte(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = spell(tokenizer, "a 😀")
    text_stream, pieces = stream(tokenizer, ids)
    assert [piece.strip() for piece in pieces[-4:]] == ["", "", "", "😀"]
    assert text_stream.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_cut_off_by_the_end_is_left_out(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    text_stream, _ = stream(tokenizer, spell(tokenizer, "cat 😀")[:-1])
    text_stream.finish()
    assert text_stream.text.rstrip() == "cat"


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_continued_prompt_keeps_the_space_between(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    prompt, ids = spell(tokenizer, "the dog"), spell(tokenizer, "the dog sat on")
    text_stream, _ = stream(tokenizer, ids[len(prompt) :], context_ids=prompt)
    assert text_stream.text == " sat on"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_not_shown(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = spell(tokenizer, "a cat sat")
    end = tokenizer.eos_token_id
    text_stream, _ = stream(tokenizer, [end, *ids[:1], *[end] * 40, *ids[1:], end])
    text_stream.finish()
    assert text_stream.text == say(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_text_do_not_wait_for_ever(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    lone = spell(tokenizer, "😀")[-4]  # the first byte of a character, again and again
    text_stream, pieces = stream(tokenizer, [lone] * 200)
    shown = "".join(pieces)
    assert set(shown) == {REPLACEMENT}
    assert len(shown) >= 200 - 2 * PATIENCE_TOKENS
    text_stream.push(spell(tokenizer, "cat")[-1])
    assert text_stream.finish() == "" or text_stream.text
    assert text_stream.text.rstrip()[-1] == "t"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("on the",), "a red cat "),
        (("t on", "cat on"), "a red "),
        (("red mat", "mat"), "a red cat on the "),
        (("never",), "a red cat on the mat"),
        (("mate",), "a red cat on the mat"),
        (("a",), ""),
    ],
)
def test_text_ends_before_a_stop_text_across_tokens(kind: str, stop: tuple[str, ...], expected: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    text_stream, pieces = stream(tokenizer, spell(tokenizer, "a red cat on the mat"), stop=stop)
    tail = text_stream.finish()
    assert "".join([*pieces, tail]) == text_stream.text == expected
    assert (text_stream.stopped_by is not None) == (expected != "a red cat on the mat")


def test_what_may_begin_a_stop_text_waits() -> None:
    tokenizer = tiny_tokenizer("byte_level")
    text_stream, pieces = stream(tokenizer, spell(tokenizer, "a red cat"), stop=(" red dog",))
    assert pieces == ["a", "", " red cat"]
    assert text_stream.finish() == ""


def test_nothing_is_shown_after_a_stop_text() -> None:
    tokenizer = tiny_tokenizer("byte_level")
    text_stream, _ = stream(tokenizer, spell(tokenizer, "a cat on the mat on the mat"), stop=("on",))
    assert (text_stream.text, text_stream.stopped_by, text_stream.finish()) == ("a cat ", "on", "")


def test_a_stop_text_in_the_very_last_piece_is_found() -> None:
    stops = StopStrings(["ab"])
    assert (stops.feed("xa"), stops.feed("b"), stops.found) == ("x", "", "ab")


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Cut at the stop text whose last character comes first; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=5), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_how_a_text_is_cut_into_pieces_does_not_matter(pieces: list[str], stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    shown = "".join(stop_strings.feed(piece) for piece in pieces)
    assert reference("".join(pieces), stops)[0].startswith(shown)
    assert (shown + stop_strings.release(), stop_strings.found) == reference("".join(pieces), stops)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.text(max_size=30).filter(lambda text: REPLACEMENT not in text))
def test_any_text_comes_back(kind: str, text: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = spell(tokenizer, text)
    text_stream, pieces = stream(tokenizer, ids)
    expected = say(tokenizer, ids)
    assert "".join([*pieces, text_stream.finish()]) == expected or REPLACEMENT in expected
