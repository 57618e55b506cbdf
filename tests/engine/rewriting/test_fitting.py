"""Too long a prompt is made shorter from its end, and never cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffserve.rewriting.cleaning import find_lost
from diffserve.rewriting.judging import TextWindow, fit
from diffserve.rewriting.style import Parts


def window(num_tokens: int) -> TextWindow:
    return TextWindow(num_tokens, lambda text: len(text.replace(",", " , ").split()))


def test_the_last_tags_go_first_and_those_that_must_stay_stay() -> None:
    tags = "a fox, Ada Lovelace, deep snow, fog, dusk"
    assert fit(tags, "tags", window(20), ()) == tags
    assert fit(tags, "tags", window(8), ()) == "a fox, Ada Lovelace, deep snow"
    assert fit(tags, "tags", window(7), ("Lovelace", "fog")) == "a fox, Ada Lovelace, fog"
    assert fit(tags, "tags", window(6), ("Lovelace", "fog")) is None
    assert fit(tags, "tags", window(1), ()) is None


def test_repeated_tags_are_dropped() -> None:
    assert fit("a fox, snow, A Fox , , snow", "tags", window(20), ()) == "a fox, snow"


def test_commas_inside_quotes_and_brackets_part_nothing() -> None:
    tags = 'a sign "Bread, milk", (snow, fog:1.2), dusk'
    assert fit(tags, "tags", window(9), ()) == 'a sign "Bread, milk", (snow, fog:1.2)'
    assert fit(tags, "tags", window(8), ()) == 'a sign "Bread, milk"'


def test_the_last_sentences_go_and_then_the_last_clauses() -> None:
    prose = 'A fox sits in the snow, at dusk, by 3.5 trees. A sign says "No. 7." It snows!'
    assert fit(prose, "sentences", window(30), ()) == prose
    assert (
        fit(prose, "sentences", window(18), ()) == 'A fox sits in the snow, at dusk, by 3.5 trees. A sign says "No. 7."'
    )
    assert fit(prose, "sentences", window(14), ()) == "A fox sits in the snow, at dusk, by 3.5 trees."
    assert fit(prose, "sentences", window(10), ()) == "A fox sits in the snow, at dusk"
    assert fit(prose, "sentences", window(13), ("No. 7.",)) == 'A fox sits in the snow, A sign says "No. 7."'
    assert fit(prose, "sentences", window(5), ()) is None


def test_a_caption_is_whole_or_not_at_all() -> None:
    assert fit("a fox, snow", "whole", window(4), ()) == "a fox, snow"
    assert fit("a fox, snow", "whole", window(3), ()) is None


@pytest.mark.parametrize("parts", ["tags", "sentences", "whole"])
@settings(max_examples=150, deadline=None)
@given(
    text=st.text('ab ,.!?"“”(«»)', max_size=60), num_tokens=st.integers(1, 12), phrase=st.sampled_from(["", "a", "ab"])
)
def test_what_comes_out_fits_and_has_lost_nothing_that_was_to_stay(
    parts: Parts, text: str, num_tokens: int, phrase: str
) -> None:
    phrases = [phrase] if phrase and not find_lost(text, (), [phrase]) else []
    fitted_text = fit(text, parts, window(num_tokens), phrases)
    if fitted_text is None:
        assert not window(num_tokens).fits(text) or parts == "tags"
    else:
        assert window(num_tokens).fits(fitted_text)
        assert not find_lost(fitted_text, (), phrases)
        assert set(fitted_text.casefold()) <= set(text.casefold()) | {",", " "}
