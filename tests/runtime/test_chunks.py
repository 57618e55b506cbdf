"""Cutting prompts into windows of the text encoder; none of it needs torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.prompt_syntax import parse_prompt
from diffserve.runtime.text.prompt import MAX_CHUNKS, Chunk, SpecialTokens, chunk_prompt

START, END, PAD, COMMA = 900, 901, 902, 500
SPECIAL = SpecialTokens(START, END, PAD, COMMA)


def tokenize(text: str) -> list[int]:
    """One token for each word that is a number, COMMA for a comma."""
    return [COMMA if word == "," else int(word) for word in text.replace(",", " , ").split()]


def chunk(prompt: str, window: int = 77) -> list[Chunk]:
    return chunk_prompt(parse_prompt(prompt), tokenize, SPECIAL, window)


def words(count: int, first: int = 0) -> str:
    return " ".join(str(first + index) for index in range(count))


def body(part: Chunk) -> Sequence[int]:
    return part.ids[1 : part.ids.index(END)]


def test_a_short_prompt_is_one_padded_window() -> None:
    (only,) = chunk("1 2 3", window=8)
    assert only.ids == (START, 1, 2, 3, END, PAD, PAD, PAD)
    assert only.weights == (1.0,) * 8


def test_the_empty_prompt_is_one_window_of_marks() -> None:
    assert chunk("", window=5) == [Chunk((START, END, PAD, PAD, PAD), (1.0,) * 5)]


def test_weights_go_to_their_tokens_and_never_to_the_marks() -> None:
    (only,) = chunk("1 (2 3:1.5) 4", window=8)
    assert only.weights == (1.0, 1.0, 1.5, 1.5, 1.0, 1.0, 1.0, 1.0)


def test_75_tokens_fill_a_window_and_the_76th_opens_another() -> None:
    assert [len(body(part)) for part in chunk(words(75))] == [75]
    assert [len(body(part)) for part in chunk(words(76))] == [75, 1]
    assert all(len(part.ids) == len(part.weights) == 77 for part in chunk(words(300)))


def test_no_token_is_lost_or_moved_past_another() -> None:
    prompt = ", ".join(words(7, 10 * index) for index in range(40))
    parts = chunk(prompt)
    assert [token for part in parts for token in body(part)] == tokenize(prompt)


def test_a_cut_moves_back_to_a_comma_at_most_20_tokens_away() -> None:
    assert [len(body(part)) for part in chunk(f"{words(60)}, {words(30)}")] == [61, 30]
    assert [len(body(part)) for part in chunk(f"{words(55)}, {words(30)}")] == [56, 30]
    assert [len(body(part)) for part in chunk(f"{words(54)}, {words(30)}")] == [75, 10]


def test_break_pads_the_window_and_starts_another() -> None:
    assert [list(body(part)) for part in chunk("1 2 BREAK 3")] == [[1, 2], [3]]
    assert [list(body(part)) for part in chunk("1 BREAK BREAK 3")] == [[1], [], [3]]


def test_break_at_the_end_adds_nothing() -> None:
    assert [list(body(part)) for part in chunk("1 2 BREAK")] == [[1, 2]]


def test_a_short_window_cuts_short_chunks() -> None:
    assert [len(body(part)) for part in chunk(words(70), window=32)] == [30, 30, 10]


def test_a_prompt_beyond_all_windows_is_refused_with_the_limit() -> None:
    chunk(words(75 * MAX_CHUNKS))
    with pytest.raises(InvalidRequest, match=f"more than {MAX_CHUNKS} chunks of 75 tokens") as caught:
        chunk(words(75 * MAX_CHUNKS + 1))
    assert caught.value.param == "prompt"
