"""Which answers are taken."""

from __future__ import annotations

import pytest

from diffserve.api.rewrite_types import Rewrite
from diffserve.api.text_types import FinishReason, TextResult
from diffserve.rewriting.cleaning import find_lost_numbers
from diffserve.rewriting.judging import Judge, TextWindow, loops, refuses
from diffserve.rewriting.style import load_style


def judged(
    wish: str,
    answer: str,
    *,
    style: str = "prose",
    entropy: float = 0.1,
    reason: FinishReason = "stop",
    force: bool = False,
) -> Rewrite:
    judge = Judge(load_style(style), TextWindow(20, lambda text: len(text.split())), max_entropy=1.0)
    result = TextResult(text_index=0, text=answer, token_ids=(1, 2), finish_reason=reason, mean_entropy=entropy)
    return judge.rewrite(wish, result, force=force)


@pytest.mark.parametrize("style", ["tags", "prose"])
@pytest.mark.parametrize(
    "answer",
    [
        "I'm sorry, I can't do that.",
        "I’m sorry",
        "Sorry!",
        "I cannot help with this",
        "As an AI, I do not paint.",
        "  Unfortunately, I am not able to.",
        '"I can\'t assist with that."',
    ],
)
def test_an_answer_that_declines_is_a_refusal(style: str, answer: str) -> None:
    verdict = judged("a cat", answer, style=style)
    assert (verdict.prompt, verdict.fallback, verdict.answer) == ("a cat", "refused", answer)


@pytest.mark.parametrize(
    "answer", ["A sorry-looking dog", "An apologetic dog says I can't", "Sorrywater lake", "I candy you not: a fair"]
)
def test_an_answer_with_such_words_inside_is_none(answer: str) -> None:
    assert judged("a dog", answer).prompt == answer


def test_a_refusal_is_detected_by_full_words() -> None:
    assert refuses("Sorry.", ["sorry"])
    assert not refuses("sorrywater", ["sorry"])
    assert not refuses("", ["sorry"])


@pytest.mark.parametrize(
    ("words", "is_loop"),
    [
        ("very very very good", False),
        ("cat cat cat cat", True),
        ("a dog then a cat and a cat and a cat and a cat and", True),
        ("a cat and a cat and a cat", False),
        ("one two three four five six seven eight", False),
        ("", False),
    ],
)
def test_four_copies_in_a_row_are_a_loop(words: str, is_loop: bool) -> None:
    assert loops(words.split()) is is_loop


def test_an_answer_that_hit_the_limit_is_endless_and_a_refusal_that_did_is_a_refusal() -> None:
    assert judged("a cat", "A cat that", reason="length").fallback == "runaway"
    assert judged("a cat", "I cannot paint cats, because", reason="length").fallback == "refused"


def test_entropy_counts_only_where_all_else_is_well() -> None:
    assert judged("a cat", "A cat sits.", entropy=1.01).fallback == "unsure"
    assert judged("a cat", "A cat sits.", entropy=1.0).fallback is None
    assert judged("a cat", "A cat sits.", entropy=9.0, force=True).prompt == "A cat sits."
    assert judged('"Mia"', "A cat sits.", entropy=9.0, force=True).fallback == "lost_words"


def test_warnings_name_at_most_three_of_the_lost() -> None:
    verdict = judged("walk with Ada, Bob, Cleo and Dan", "Four friends walk.")
    assert verdict.warning == 'the rewriter left out "Ada", "Bob", "Cleo", ...; the prompt was left as it is.'


def test_the_embedded_style_says_that_its_language_lacks_a_quoted_text_and_reads_names_as_shouting() -> None:
    verdict = judged('a Cat with a sign "Open"', "a cat on a red background", style="embedded")
    assert verdict.prompt == 'a Cat with a sign "Open"'
    assert verdict.warning is not None
    assert verdict.warning.startswith('the image model does not know "Open"; ')
    assert judged("a Kitty in Rome", "a cat in the city", style="embedded").prompt == "a cat in the city"
    assert judged('a "cat"', "a cat on a red background", style="embedded").fallback is None


def test_the_wish_itself_is_never_touched() -> None:
    wish = "  a  CAT \n"
    assert judged(wish, "").prompt == wish


@pytest.mark.parametrize(
    ("wish", "caption", "missing_parts"),
    [
        ("I want five penguins", "three penguins in the snow", ("five",)),
        ("5 penguins", "a penguin", ("5",)),
        ("two penguins", "three penguins", ("two",)),
        ("a pair of penguins", "two penguins on the beach", ()),
        ("2 doggos chillin", "two dogs on the beach", ()),
        ("two friends, a cat and a dog", "a cat next to a dog", ()),
        ("a 4k photo of an owl, 2.5 metres high", "an owl", ()),
    ],
)
def test_how_many_were_wanted_is_not_changed(wish: str, caption: str, missing_parts: tuple[str, ...]) -> None:
    assert find_lost_numbers(wish, caption) == missing_parts
