"""The prompt syntax, token by token; none of it needs torch."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffserve.api.errors import InvalidRequest
from diffserve.api.prompt_syntax import Piece, in_a1111, parse_prompt
from diffserve.models.loras import read_tags
from diffserve.runtime.text.prompt import SpecialTokens, chunk_prompt

UP, DOWN = 1.1, 1 / 1.1


def assert_pieces(prompt: str, expected: list[tuple[str, float]]) -> None:
    """``prompt`` has no BREAK and is read as ``expected``."""
    (section,) = parse_prompt(prompt)
    assert [piece.text for piece in section] == [text for text, _ in expected]
    assert [piece.weight for piece in section] == pytest.approx([weight for _, weight in expected])


@pytest.mark.parametrize(
    ("prompt", "pieces"),
    [
        ("a red hat", [("a red hat", 1.0)]),
        ("a (red) hat", [("a ", 1.0), ("red", UP), (" hat", 1.0)]),
        ("a ((red)) hat", [("a ", 1.0), ("red", UP * UP), (" hat", 1.0)]),
        ("a [red] hat", [("a ", 1.0), ("red", DOWN), (" hat", 1.0)]),
        ("a (red:1.3) hat", [("a ", 1.0), ("red", 1.3), (" hat", 1.0)]),
        ("(red: 0.5 )", [("red", 0.5)]),
        ("(red:+1.5)", [("red", 1.5)]),
        ("(red:-1)", [("red", -1.0)]),
        ("(red:.5)", [("red", 0.5)]),
        ("((red:1.5) hat)", [("red", 1.5 * UP), (" hat", UP)]),
        ("([red])", [("red", UP * DOWN)]),
        ("(a:1.2)(b:1.2)", [("ab", 1.2)]),
    ],
)
def test_brackets_weigh_what_they_hold(prompt: str, pieces: list[tuple[str, float]]) -> None:
    assert_pieces(prompt, pieces)


def test_a_nested_prompt_gets_the_weights_that_a1111_gives() -> None:
    expected = [
        ("a ", 1.0),
        ("house", 1.3 * UP * UP),
        (" ", UP),
        ("on", 1.0),
        (" a ", UP),
        ("hill", 0.5 * UP),
        (", sun, ", UP),
        ("sky", UP**4),
        (".", UP),
    ]
    assert_pieces("a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).", expected)


@pytest.mark.parametrize(
    ("prompt", "pieces"),
    [
        (r"\(literal\)", [("(literal)", 1.0)]),
        (r"\[literal\]", [("[literal]", 1.0)]),
        (r"\(mixed\]", [("(mixed]", 1.0)]),
        (r"back\\slash", [("back\\slash", 1.0)]),
        (r"(a \(b\):1.5)", [("a (b)", 1.5)]),
        ("C:\\temp", [("C:\\temp", 1.0)]),
    ],
)
def test_a_backslash_makes_a_bracket_plain(prompt: str, pieces: list[tuple[str, float]]) -> None:
    assert parse_prompt(prompt) == [[Piece(*piece) for piece in pieces]]


@pytest.mark.parametrize(
    ("prompt", "pieces"),
    [
        ("unopened) bracket", [("unopened) bracket", 1.0)]),
        ("unopened] bracket", [("unopened] bracket", 1.0)]),
        ("ratio 3:4", [("ratio 3:4", 1.0)]),
        ("no bracket :1.2)", [("no bracket :1.2)", 1.0)]),
        ("(unclosed", [("unclosed", UP)]),
        ("[unclosed", [("unclosed", DOWN)]),
        ("a (b (c", [("a ", 1.0), ("b ", UP), ("c", UP * UP)]),
        ("(a [b) c]", [("a ", UP), ("b", UP * DOWN), (" c", DOWN)]),
        ("(red:1.2.3)", [("red:1.2.3", UP)]),
        ("(red:big)", [("red:big", UP)]),
        ("()", [("", 1.0)]),
        ("", [("", 1.0)]),
    ],
)
def test_malformed_brackets_are_read_as_a1111_reads_them(prompt: str, pieces: list[tuple[str, float]]) -> None:
    assert_pieces(prompt, pieces)


def test_break_starts_a_new_section() -> None:
    assert parse_prompt("a cat BREAK a dog") == [[Piece("a cat", 1.0)], [Piece("a dog", 1.0)]]


def test_break_keeps_the_weight_of_the_bracket_around_it() -> None:
    assert parse_prompt("(a cat BREAK a dog:1.5)") == [[Piece("a cat", 1.5)], [Piece("a dog", 1.5)]]


def test_break_inside_a_word_or_in_small_letters_is_text() -> None:
    assert parse_prompt("BREAKFAST and break") == [[Piece("BREAKFAST and break", 1.0)]]


def test_break_at_the_end_gives_an_empty_section() -> None:
    assert parse_prompt("a cat BREAK") == [[Piece("a cat", 1.0)], [Piece("", 1.0)]]


@pytest.mark.parametrize("prompt", ["(red:101)", "(red:-1000)", "(" * 80 + "red", "((red:99):99)"])
def test_a_weight_beyond_measure_is_refused_with_its_text(prompt: str) -> None:
    with pytest.raises(InvalidRequest, match="weight of 'red' in the prompt is"):
        parse_prompt(prompt)


@given(st.text(alphabet="ab ()[]:\\.1<lora>BREAK\n", max_size=60))
def test_a_plain_prompt_is_read_as_it_stands(text: str) -> None:
    assert parse_prompt(in_a1111(text, "plain")) == [[Piece(text, 1.0)]]
    assert read_tags(in_a1111(text, "plain"))[1] == ()


def test_a_plain_prompt_weighs_breaks_and_names_nothing() -> None:
    text = "(fox:1.3) [cat] BREAK \\BREAK <lora:ink:0.5> \\(a)"
    assert parse_prompt(in_a1111(text, "plain")) == [[Piece(text, 1.0)]]
    assert in_a1111(text, "a1111") == text
    with pytest.raises(InvalidRequest, match="prompt_syntax is 'comfy'; give a1111 or plain"):
        in_a1111(text, "comfy")


@given(st.text(alphabet="ab ()[]:\\.1BREAK\n", max_size=60))
def test_any_text_parses_and_only_syntax_is_lost(prompt: str) -> None:
    sections = parse_prompt(prompt)
    text = "".join(piece.text for section in sections for piece in section)
    assert sections
    assert len(text) <= len(prompt)
    assert [letter for letter in text if letter in "ab"] == [letter for letter in prompt if letter in "ab"]


@pytest.mark.parametrize("prompt", ["(a:" + "1" * 32_000, "a" + " " * 32_000 + "b", "(a:" + " " * 32_000])
def test_long_runs_of_digits_and_blanks_take_no_time(prompt: str) -> None:
    started = time.perf_counter()
    parse_prompt(prompt)
    assert time.perf_counter() - started < 1.0


def test_blanks_around_a_break_go_with_it() -> None:
    assert parse_prompt("a \n BREAK\t b BREAK  BREAK c ") == [
        [Piece("a", 1.0)],
        [Piece("b", 1.0)],
        [Piece("", 1.0)],
        [Piece("c ", 1.0)],
    ]


def test_a_prompt_of_thousands_of_pieces_is_refused_after_as_many_tokens_as_fit() -> None:
    pieces = [Piece(f"a{number}", 1.0 + number / 10_000) for number in range(10_000)]
    calls: list[str] = []

    def tokenize(text: str) -> list[int]:
        calls.append(text)
        return [7, 8]

    with pytest.raises(InvalidRequest, match="more than 32 chunks of 75 tokens"):
        chunk_prompt([[Piece("one", 1.0)], pieces], tokenize, SpecialTokens(1, 2, 0, 5), 77)
    assert len(calls) <= 32 * 75 // 2 + 2


def test_thousands_of_open_brackets_take_no_time() -> None:
    started = time.perf_counter()
    parse_prompt("(a[b" * 8 + ")]" * 8 + "(a)" * 8000 + "[)" * 3)
    assert time.perf_counter() - started < 1.0
